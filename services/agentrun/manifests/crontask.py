"""The CronTask as typed values. This version stores schedules and does not fire them."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from agentrun.manifests.base import DnsLabel, Name, Spec

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


class CronTaskSpec(Spec):
    """What the admin wants to be run when."""

    agent_run_ref: AgentRunRef = Field(description="The AgentRun that the runs belong to. It cannot be changed.")
    schedule: Annotated[str, _schedule] = Field(
        description=(
            "Minute, hour, day, month and weekday, for example 0 9 * * MON-FRI; H is a value chosen from the name, to spread load."
            " Or one of @hourly @daily @weekly @monthly @yearly."
        )
    )
    time_zone: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}$", max_length=64)] = Field(
        default="Etc/UTC", description="The time zone of the schedule, by its IANA name, for example Europe/Berlin."
    )
    input: Annotated[str, StringConstraints(min_length=1, max_length=65_536)] = Field(
        description="What the user says in each run."
    )
    suspend: bool = Field(default=False, description="True: the schedule is not to be fired.")


class CronTaskMetadata(Spec):
    """Which CronTask this is."""

    name: Name = Field(
        description="The CronTask's name: lower-case letters, digits and hyphens, beginning with a letter, at most 63."
    )
    namespace: DnsLabel = Field("dev", description="The namespace, which is also that of the AgentRun.")
    labels: dict[str, str] = Field(default_factory=dict, description="Kubernetes labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Kubernetes annotations.")


class CronTask(Spec):
    """A schedule on which an agent is to be run. This version stores schedules and does not fire them yet."""

    api_version: Literal["agentrun.dev/v1alpha1"] = Field(description="Always agentrun.dev/v1alpha1.")
    kind: Literal["CronTask"] = Field(description="Always CronTask.")
    metadata: CronTaskMetadata = Field(description="Name and namespace.")
    spec: CronTaskSpec = Field(description="What is to be run when.")

    def as_document(self) -> dict[str, Any]:
        """The manifest as JSON-like values with camelCase members; loading it again gives an equal CronTask."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
