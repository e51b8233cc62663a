"""The AgentRun as typed values: every field with its bounds, its default and a sentence on what it does.

Members are camelCase in files and snake_case here. A field that is not built is not in the model, so a file that
names it is refused instead of being half obeyed. Must not know files or YAML: see `manifests.loading`.
"""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

API_VERSION = "agentrun.dev/v1alpha1"
CROSS_FIELD = "cross_field"

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ModelName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*:\S+$", max_length=253)]
ObjectPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=253)
]


def _refuse(path: tuple[str, ...], what: str, remedy: str) -> NoReturn:
    """Refuses a combination of fields; `path` leads from the object under validation to the field to be changed."""
    raise PydanticCustomError(CROSS_FIELD, "{what}; {remedy}", {"path": path, "what": what, "remedy": remedy})


class Spec(BaseModel):
    """Base of all parts: frozen, strict about types, closed against unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )


class AgentSpec(Spec):
    """What executes a run: a model with instructions and tools, or code of one's own."""

    model: ModelName | None = Field(
        default=None, description="The model as provider:name, for example openai:gpt-4.1 or demo:chat."
    )
    entrypoint: ObjectPath | None = Field(
        default=None,
        description="Code of one's own as module:attribute: a pydantic-ai Agent, or an async function run(ctx).",
    )
    instructions: str = Field(default="", max_length=100_000, description="The system prompt. Only with model.")
    model_settings: dict[str, JsonValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Settings passed on to the model, such as temperature. Only with model.",
    )
    tools: list[ObjectPath] = Field(
        default_factory=list,
        max_length=128,
        description="Functions that the model may call, as module:attribute. Only with model.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "AgentSpec":
        if self.model is None and self.entrypoint is None:
            _refuse(("model",), "neither model nor entrypoint is given", "set one of them, for example model: demo:chat")
        if self.model is not None and self.entrypoint is not None:
            _refuse(("entrypoint",), "model and entrypoint are both given", "remove one of them")
        if self.entrypoint is not None:
            for name in ("instructions", "model_settings", "tools"):
                if getattr(self, name):
                    remedy = "remove it, or use model instead of entrypoint"
                    _refuse((to_camel(name),), "an entrypoint brings its own", remedy)
        return self


class DatabaseSpec(Spec):
    """How a process uses Postgres; where it is comes from DATABASE_URL."""

    pool_size: int = Field(default=10, ge=2, le=200, description="Connections that one process keeps to Postgres at most.")


class RedisSpec(Spec):
    """How a process uses Redis; where it is comes from REDIS_URL. No settings so far."""


class GatewaySpec(Spec):
    """The HTTP side."""

    max_body_bytes: int = Field(
        default=1_048_576,
        ge=1024,
        le=104_857_600,
        description="Largest request body that is accepted, in bytes; above: 413.",
    )


class WorkersSpec(Spec):
    """The processes that execute runs."""

    min_replicas: int = Field(default=0, ge=0, le=1000, description="Workers kept even without work; 0 scales to zero.")
    max_replicas: int = Field(default=10, ge=1, le=1000, description="Workers at most, however much work waits.")
    concurrency: int = Field(default=10, ge=1, le=1000, description="Runs that one worker executes at the same time.")
    lease_seconds: int = Field(
        default=30,
        ge=2,
        le=600,
        description="How long an attempt owns its run without renewing; a dead worker's runs go on after this time.",
    )
    max_run_seconds: int = Field(
        default=3600,
        ge=1,
        le=604_800,
        description="Longest time for one attempt; reaching it is a timeout, which is retried.",
    )
    drain_seconds: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="Time that a stopping worker gives its runs to end before it hands them back.",
    )
    retries: int = Field(default=3, ge=0, le=20, description="How often a run is tried again after a retryable error.")


class ScalingSpec(Spec):
    """How many workers are wanted for how much work."""

    target_per_worker: int = Field(
        default=10,
        ge=1,
        le=10_000,
        description="Waiting and running runs per worker that are aimed at; usually workers.concurrency.",
    )
    scale_down_stabilization_seconds: int = Field(
        default=60,
        ge=0,
        le=3600,
        description="Fewer workers are wanted only after demand has been lower for this long.",
    )
    cooldown_seconds: int = Field(
        default=300, ge=0, le=86_400, description="The last worker goes only after this long without any work."
    )


class ReaperSpec(Spec):
    """How stuck work is found and how often a run may be lost."""

    idle_seconds: int = Field(
        default=30,
        ge=2,
        le=3600,
        description="A delivered entry untouched for this long is looked at again; at least workers.leaseSeconds.",
    )
    interval_seconds: int = Field(default=1, ge=1, le=60, description="Time between two looks for stuck work.")
    max_lost_attempts: int = Field(
        default=3,
        ge=1,
        le=20,
        description="Attempts of one run that may die without a word before the run fails as a dead letter.",
    )


class SubmissionSpec(Spec):
    """How submissions are told apart."""

    dedupe_seconds: int = Field(
        default=10,
        ge=0,
        le=86_400,
        description="The same body without an Idempotency-Key is the same run within this time; 0: never.",
    )


class FollowUpsSpec(Spec):
    """What happens to a message while its session has an unfinished run."""

    policy: Literal["Enqueue"] = Field(default="Enqueue", description="Enqueue: the message becomes the session's next run.")


class StreamingSpec(Spec):
    """How a run's events become durable."""

    flush_events: int = Field(default=50, ge=1, le=100, description="Events that are stored together at most.")
    flush_milliseconds: int = Field(
        default=200, ge=10, le=10_000, description="An event is stored at the latest after this time."
    )


class AgentRunSpec(Spec):
    """What the admin wants."""

    agent: AgentSpec = Field(description="What executes a run.")
    database: DatabaseSpec = Field(default_factory=DatabaseSpec, description="How a process uses Postgres.")
    redis: RedisSpec = Field(default_factory=RedisSpec, description="How a process uses Redis.")
    gateway: GatewaySpec = Field(default_factory=GatewaySpec, description="The HTTP side.")
    workers: WorkersSpec = Field(default_factory=WorkersSpec, description="The processes that execute runs.")
    scaling: ScalingSpec = Field(default_factory=ScalingSpec, description="How many workers are wanted for how much work.")
    reaper: ReaperSpec = Field(default_factory=ReaperSpec, description="How stuck work is found.")
    submission: SubmissionSpec = Field(default_factory=SubmissionSpec, description="How submissions are told apart.")
    follow_ups: FollowUpsSpec = Field(default_factory=FollowUpsSpec, description="Messages while a session is busy.")
    streaming: StreamingSpec = Field(default_factory=StreamingSpec, description="How a run's events become durable.")

    @model_validator(mode="after")
    def _fields_agree(self) -> "AgentRunSpec":
        workers, reaper = self.workers, self.reaper
        if workers.min_replicas > workers.max_replicas:
            what = f"{workers.min_replicas} is above workers.maxReplicas ({workers.max_replicas})"
            _refuse(("workers", "minReplicas"), what, "lower it or raise workers.maxReplicas")
        if reaper.idle_seconds < workers.lease_seconds:
            what = f"{reaper.idle_seconds} is below workers.leaseSeconds ({workers.lease_seconds})"
            _refuse(("reaper", "idleSeconds"), what, f"set it to {workers.lease_seconds} or more")
        return self


class Metadata(Spec):
    """Which AgentRun this is. Labels and annotations are accepted and have no effect outside Kubernetes."""

    name: DnsLabel = Field(description="The AgentRun's name: lower-case letters, digits and hyphens, at most 63.")
    namespace: DnsLabel = Field("dev", description="The namespace; together with the name it keys everything that is stored.")
    labels: dict[str, str] = Field(default_factory=dict, description="Kubernetes labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Kubernetes annotations.")


class AgentRun(Spec):
    """A deployment of an agent."""

    api_version: Literal["agentrun.dev/v1alpha1"] = Field(description="Always agentrun.dev/v1alpha1.")
    kind: Literal["AgentRun"] = Field(description="Always AgentRun.")
    metadata: Metadata = Field(description="Name and namespace.")
    spec: AgentRunSpec = Field(description="What the admin wants.")

    def as_document(self) -> dict[str, Any]:
        """The manifest as JSON-like values with camelCase members; loading it again gives an equal AgentRun."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
