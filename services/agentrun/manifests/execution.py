"""The parts of an AgentRun that say how runs are executed: workers and their number, schedulers, stuck work, submissions, event flushes."""

from typing import Literal

from pydantic import Field, model_validator

from agentrun.manifests.base import ONLY_IN_KUBERNETES, Spec, refuse
from agentrun.manifests.pods import Resources


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
    resources: Resources = Field(
        default=Resources(requests={"cpu": "250m", "memory": "256Mi"}),
        description="What one worker asks for and may use.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )

    @model_validator(mode="after")
    def _bounds_agree(self) -> "WorkersSpec":
        if self.min_replicas > self.max_replicas:
            what = f"{self.min_replicas} is above workers.maxReplicas ({self.max_replicas})"
            refuse(("minReplicas",), what, "lower it or raise workers.maxReplicas")
        return self


class ScalingSpec(Spec):
    """How many workers are wanted for how much work."""

    mode: Literal["Managed", "External"] = Field(
        default="Managed",
        description="Managed: workers follow demand. External: something else, such as an autoscaler, sets the replicas.",
        json_schema_extra=ONLY_IN_KUBERNETES,
    )
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


class SchedulerSpec(Spec):
    """The processes that fire CronTasks and look after stuck work."""

    replicas: int = Field(
        default=2, ge=1, le=10, description="Schedulers that work at the same time; none leads, and no slot starts twice."
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

    policy: Literal["Merge", "Enqueue", "Reject"] = Field(
        default="Merge",
        description="Merge: the session's last unfinished run ends as superseded and one run answers all its messages and the new one. "
        "Enqueue: the message becomes the session's next run. Reject: 409, nothing is stored.",
    )
    window_seconds: int = Field(
        default=30,
        ge=1,
        le=86_400,
        description="How long after the first message that a run holds others are merged with it; later ones are queued. Only with Merge.",
    )


class StreamingSpec(Spec):
    """How a run's events become durable."""

    flush_events: int = Field(default=50, ge=1, le=100, description="Events that are stored together at most.")
    flush_milliseconds: int = Field(
        default=200, ge=10, le=10_000, description="An event is stored at the latest after this time."
    )
    replay_limit: int = Field(
        default=10_000,
        ge=100,
        le=1_000_000,
        description="A client that is further behind than so many events gets the text so far instead of them, as one gap.",
    )
    event_retention_seconds: int = Field(
        default=604_800,
        ge=60,
        le=315_360_000,
        description="How long after a run's end the pieces of its output are kept; then only whole texts, and a late client gets a gap.",
    )


class RetentionSpec(Spec):
    """How long Postgres keeps what has ended."""

    runs: int = Field(
        default=0,
        ge=0,
        le=3650,
        description="Days after which runs that have ended are deleted, with their messages and sessions left empty; 0: never. "
        "At least streaming.eventRetentionSeconds. Runs that wait for a person stay.",
    )
    ledger: int = Field(default=0, ge=0, le=3650, description="Days after which the record of a model call is deleted; 0: never.")
