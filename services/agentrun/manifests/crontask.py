"""The CronTask as typed values: every field with its bounds, its default and a sentence on what it does."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from agentrun.domain.text import unstorable
from agentrun.manifests.base import DnsLabel, Name, Spec, refuse

_NUMBERS = {
    "minute": "[0-5]?[0-9]",
    "hour": "([01]?[0-9]|2[0-3])",
    "day": "(0?[1-9]|[12][0-9]|3[01])",
    "month": "(0?[1-9]|1[0-2]|JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC)",
    "weekday": "([0-7]|SUN|MON|TUE|WED|THU|FRI|SAT)",
}


def _field(number: str) -> str:
    item = rf"([*]|H|{number}(-{number})?)(/[1-9][0-9]?)?"
    return f"{item}(,{item})*"


SCHEDULE_PATTERN = rf"^(@(hourly|daily|weekly|monthly|yearly)|{' +'.join(map(_field, _NUMBERS.values()))})$"

_schedule = StringConstraints(pattern=SCHEDULE_PATTERN, max_length=128)


class AgentRunRef(Spec):
    """The AgentRun that a schedule is for."""

    name: Name = Field(description="Name of the AgentRun, in the namespace of this object.")


class SessionSpec(Spec):
    """In which conversation the runs take place."""

    mode: Literal["PerSlot", "Fixed"] = Field(
        default="PerSlot",
        description="PerSlot: each run begins a session of its own. Fixed: all runs are turns of one session and see what was said before.",
    )
    id: Annotated[str, StringConstraints(pattern=r"^[!-~]+$", max_length=200)] | None = Field(
        default=None, description="The session of all runs, of the user cron:NAME. Required with mode Fixed, and only used there."
    )

    @model_validator(mode="after")
    def _id_of_fixed(self) -> "SessionSpec":
        if self.mode == "Fixed" and self.id is None:
            refuse(("id",), "mode Fixed needs the session's id", "set it, for example id: daily-report")
        if self.mode == "PerSlot" and self.id is not None:
            refuse(("id",), "an id is used with mode Fixed only", "remove it or set mode: Fixed")
        return self


class CatchUpSpec(Spec):
    """What becomes of slots at whose time no scheduler was there, or Postgres was away, for more than a minute."""

    mode: Literal["All", "Latest", "None"] = Field(
        default="All",
        description="All: each missed slot is run, late. Latest: only the newest slot that is due. None: none, only slots on time are run.",
    )
    limit: int = Field(
        default=10,
        ge=1,
        le=100,
        description="With All: the most missed slots that are run at once, the newest; the others are skipped.",
    )


class CronTaskSpec(Spec):
    """What the admin wants to be run when."""

    agent_run_ref: AgentRunRef = Field(description="The AgentRun that the runs belong to. It cannot be changed.")
    schedule: Annotated[str, _schedule] = Field(
        description=(
            "Minute, hour, day, month and weekday, for example 0 9 * * MON-FRI; H is a value chosen from namespace and name, to spread"
            " load. Or one of @hourly @daily @weekly @monthly @yearly."
        )
    )
    time_zone: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}$", max_length=64)] = Field(
        default="Etc/UTC", description="The time zone of the schedule, by its IANA name, for example Europe/Berlin."
    )
    input: Annotated[str, StringConstraints(min_length=1, max_length=65_536)] = Field(
        description="What the user says in each run. {{slot}} stands for the scheduled minute in UTC, {{task}} for the CronTask's name."
    )
    session: SessionSpec = Field(default_factory=SessionSpec, description="In which conversation the runs take place.")
    concurrency_policy: Literal["Allow", "Forbid", "Replace"] = Field(
        default="Allow",
        description=(
            "While an earlier run of this CronTask has not ended: Allow starts another, Forbid skips the slot, Replace cancels the earlier"
            " run and starts a new one."
        ),
    )
    starting_deadline_seconds: int | None = Field(
        default=None,
        ge=10,
        le=31_536_000,
        description="A slot that is older than this when it is looked at is skipped. Without it only catchUp decides.",
    )
    catch_up: CatchUpSpec = Field(default_factory=CatchUpSpec, description="What becomes of slots that were missed.")
    jitter_seconds: int = Field(
        default=0,
        ge=0,
        le=3600,
        description="Each run waits between 0 and this many seconds after its slot, so that many CronTasks do not start at once.",
    )
    suspend: bool = Field(default=False, description="True: slots are skipped. They are not made up for when it is False again.")
    history_limit: int = Field(
        default=1000, ge=1, le=10_000, description="Slots whose outcome is remembered. Runs are kept as the AgentRun says."
    )

    @field_validator("input")
    @classmethod
    def _storable(cls, text: str) -> str:
        if unstorable(text):
            refuse((), "holds a character that cannot be stored (U+0000, or half of a pair)", "remove it")
        return text


class CronTaskMetadata(Spec):
    """Which CronTask this is."""

    name: Name = Field(
        description="The CronTask's name: lower-case letters, digits and hyphens, beginning with a letter, at most 63."
    )
    namespace: DnsLabel = Field("dev", description="The namespace, which is also that of the AgentRun.")
    labels: dict[str, str] = Field(default_factory=dict, description="Kubernetes labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Kubernetes annotations.")


class CronTask(Spec):
    """A schedule on which an agent is run."""

    api_version: Literal["agentrun.dev/v1alpha1"] = Field(description="Always agentrun.dev/v1alpha1.")
    kind: Literal["CronTask"] = Field(description="Always CronTask.")
    metadata: CronTaskMetadata = Field(description="Name and namespace.")
    spec: CronTaskSpec = Field(description="What is to be run when.")

    def as_document(self) -> dict[str, Any]:
        """The manifest as JSON-like values with camelCase members; loading it again gives an equal CronTask."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def as_row(self) -> str:
        """What the scheduler reads, as JSON: the spec and the name."""
        return json.dumps({"name": self.metadata.name, **self.as_document()["spec"]}, sort_keys=True)
