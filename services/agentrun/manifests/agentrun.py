"""The AgentRun as typed values: every field with its bounds, its default and a sentence on what it does.

Members are camelCase in files and snake_case here. A field that is not built is not in the model, so a file that
names it is refused instead of being half obeyed. The same fields are in crds/agentruns.yaml, and a test compares the
two. Must not know files or YAML: see `manifests.loading`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from agentrun.domain.errors import ManifestError
from agentrun.manifests.base import API_VERSION as API_VERSION
from agentrun.manifests.base import (
    ONLY_IN_KUBERNETES,
    REQUIRED_IN_KUBERNETES,
    DnsLabel,
    KeysSecretRef,
    Name,
    NamedRef,
    SecretRef,
    Spec,
    keyed,
    refuse,
)
from agentrun.manifests.execution import (
    FollowUpsSpec,
    ReaperSpec,
    RetentionSpec,
    ScalingSpec,
    SchedulerSpec,
    StreamingSpec,
    SubmissionSpec,
    WorkersSpec,
)
from agentrun.manifests.money import BudgetSpec, PriceSpec
from agentrun.manifests.pods import NetworkPolicy, PodTemplate, Resources, Service

ModelName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*:[!-~]+$", max_length=253)]
_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
ObjectPath = Annotated[str, StringConstraints(pattern=f"^{_DOTTED}:{_DOTTED}$", max_length=253)]
Image = Annotated[str, StringConstraints(pattern=r"^[!-~]+$", max_length=512)]


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
    secret_refs: Annotated[list[NamedRef], keyed("name")] = Field(
        default_factory=list,
        max_length=16,
        description="Secrets whose keys become environment variables of workers, such as OPENAI_API_KEY.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )

    @model_validator(mode="after")
    def _one_source(self) -> "AgentSpec":
        if self.model is None and self.entrypoint is None:
            refuse(("model",), "neither model nor entrypoint is given", "set one of them, for example model: demo:chat")
        if self.model is not None and self.entrypoint is not None:
            refuse(("entrypoint",), "model and entrypoint are both given", "remove one of them")
        if self.entrypoint is not None:
            for name in ("instructions", "model_settings", "tools"):
                if getattr(self, name):
                    remedy = "remove it, or use model instead of entrypoint"
                    refuse((to_camel(name),), "an entrypoint brings its own", remedy)
        return self


class DatabaseSpec(Spec):
    """Postgres. Outside Kubernetes DATABASE_URL says where it is."""

    secret_ref: SecretRef | None = Field(
        default=None,
        description="The Secret that holds the URL of the database, as postgresql://user:password@host/database.",
        json_schema_extra=REQUIRED_IN_KUBERNETES,
    )
    migration_secret_ref: SecretRef | None = Field(
        default=None,
        description="The URL that migrations use instead, for a role that may change the schema. Only with migrations: Apply.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    migrations: Literal["Apply", "Verify"] = Field(
        default="Apply",
        description="Apply: a Job brings the schema up to date before new pods start. Verify: people do, with agentrun migrate.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    pool_size: int = Field(default=10, ge=2, le=200, description="Connections that one process keeps to Postgres at most.")

    @model_validator(mode="after")
    def _migrations_agree(self) -> "DatabaseSpec":
        if self.migration_secret_ref is not None and self.migrations != "Apply":
            what = "migrationSecretRef is used with migrations: Apply only"
            refuse(("migrationSecretRef",), what, "remove it or set migrations: Apply")
        return self


class RedisSpec(Spec):
    """Redis or Valkey. Outside Kubernetes REDIS_URL says where it is."""

    secret_ref: SecretRef | None = Field(
        default=None,
        description="The Secret that holds the URL of Redis, as redis://user:password@host:6379/0 or rediss:// for TLS.",
        json_schema_extra=REQUIRED_IN_KUBERNETES,
    )


class AuthSpec(Spec):
    """Who may use the HTTP API."""

    keys_secret_ref: KeysSecretRef | None = Field(
        default=None,
        description="The Secret that holds the file of hashed API keys, made with agentrun keys create --file.",
        json_schema_extra=REQUIRED_IN_KUBERNETES,
    )


class GatewaySpec(Spec):
    """The HTTP side."""

    replicas: int = Field(
        default=2, ge=1, le=100, description="Gateways that serve at the same time.", json_schema_extra=ONLY_IN_KUBERNETES
    )
    resources: Resources = Field(
        default=Resources(requests={"cpu": "100m", "memory": "128Mi"}),
        description="What one gateway asks for and may use.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    service: Service = Field(default_factory=Service, description="The gateway's Service.", json_schema_extra=ONLY_IN_KUBERNETES)
    auth: AuthSpec = Field(
        default_factory=AuthSpec, description="Who may use the HTTP API.", json_schema_extra=REQUIRED_IN_KUBERNETES
    )
    max_body_bytes: int = Field(
        default=1_048_576,
        ge=1024,
        le=104_857_600,
        description="Largest request body that is accepted, in bytes; above: 413.",
    )


@dataclass(frozen=True, slots=True)
class StoreSecrets:
    """Where pods find what they must not be told in a manifest."""

    database: SecretRef
    migration: SecretRef
    """The same as `database` unless migrations have their own."""
    redis: SecretRef
    api_keys: KeysSecretRef


class AgentRunSpec(Spec):
    """What the admin wants."""

    agent: AgentSpec = Field(description="What executes a run.")
    image: Image | None = Field(
        default=None,
        description="Image of all pods, with the agent's code in it; unless given, the operator's own.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the image is pulled.", json_schema_extra=ONLY_IN_KUBERNETES
    )
    image_pull_secrets: Annotated[list[NamedRef], keyed("name")] = Field(
        default_factory=list,
        max_length=16,
        description="Secrets with the registry's credentials.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    database: DatabaseSpec = Field(
        default_factory=DatabaseSpec, description="Postgres, which holds the truth.", json_schema_extra=REQUIRED_IN_KUBERNETES
    )
    redis: RedisSpec = Field(
        default_factory=RedisSpec,
        description="Redis or Valkey, which delivers work and streams.",
        json_schema_extra=REQUIRED_IN_KUBERNETES,
    )
    gateway: GatewaySpec = Field(
        default_factory=GatewaySpec, description="The HTTP side.", json_schema_extra=REQUIRED_IN_KUBERNETES
    )
    workers: WorkersSpec = Field(default_factory=WorkersSpec, description="The processes that execute runs.")
    scaling: ScalingSpec = Field(default_factory=ScalingSpec, description="How many workers are wanted for how much work.")
    scheduler: SchedulerSpec = Field(
        default_factory=SchedulerSpec,
        description="The processes that fire CronTasks and look after stuck work.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    reaper: ReaperSpec = Field(default_factory=ReaperSpec, description="How stuck work is found.")
    submission: SubmissionSpec = Field(default_factory=SubmissionSpec, description="How submissions are told apart.")
    follow_ups: FollowUpsSpec = Field(default_factory=FollowUpsSpec, description="Messages while a session is busy.")
    streaming: StreamingSpec = Field(default_factory=StreamingSpec, description="How a run's events become durable.")
    budget: BudgetSpec = Field(default_factory=BudgetSpec, description="What may be spent. Without limits nothing is refused.")
    prices: Annotated[list[PriceSpec], keyed("model", "since")] = Field(
        default_factory=list,
        max_length=128,
        description="Prices of one's own. They win over the built-in ones, from their day on.",
    )
    retention: RetentionSpec = Field(default_factory=RetentionSpec, description="How long is kept what has ended.")
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy,
        description="What the pods may be connected with.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate,
        description="What is added to every pod of this AgentRun.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
    suspend: bool = Field(
        default=False,
        description="True: the gateway takes no new messages (503 suspended) and workers end; reading goes on, nothing is lost.",
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> "AgentRunSpec":
        if self.reaper.idle_seconds < self.workers.lease_seconds:
            what = f"{self.reaper.idle_seconds} is below workers.leaseSeconds ({self.workers.lease_seconds})"
            refuse(("reaper", "idleSeconds"), what, f"set it to {self.workers.lease_seconds} or more")
        seconds = self.streaming.event_retention_seconds
        if 0 < self.retention.runs * 86_400 < seconds:
            what = f"{self.retention.runs} days are less than streaming.eventRetentionSeconds ({seconds})"
            refuse(("retention", "runs"), what, "raise it or lower streaming.eventRetentionSeconds")
        return self

    def store_secrets(self) -> StoreSecrets:
        """The references that a cluster needs. Raises ManifestError if one is missing, which the API server does not admit."""
        database, redis, keys = self.database.secret_ref, self.redis.secret_ref, self.gateway.auth.keys_secret_ref
        if database is None:
            raise ManifestError("spec.database.secretRef: is missing; name the Secret that holds the database's URL")
        if redis is None:
            raise ManifestError("spec.redis.secretRef: is missing; name the Secret that holds the URL of Redis")
        if keys is None:
            raise ManifestError("spec.gateway.auth.keysSecretRef: is missing; name the Secret that holds the API keys")
        return StoreSecrets(database, self.database.migration_secret_ref or database, redis, keys)


class Metadata(Spec):
    """Which AgentRun this is. Labels and annotations are accepted and have no effect outside Kubernetes."""

    name: Name = Field(
        description="The AgentRun's name: lower-case letters, digits and hyphens, beginning with a letter, at most 63."
    )
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
