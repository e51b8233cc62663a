"""The Events on an AgentRun: what a person would want to have been told, once, when it happens. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrun_operator.availability import same_pods, up_to_date
from agentrun_operator.checks import Finding
from agentrun_operator.conditions import Status
from agentrun_operator.facts import Object
from agentrun_operator.reasons import ConditionType, EventReason, Reason
from agentrun_operator.resources import CONFIGMAPS, DEPLOYMENTS, JOBS, Ref
from agentrun_operator.situation import Situation

QUIET = frozenset(
    {
        Reason.PENDING,
        Reason.NOT_EVALUATED,
        Reason.MIGRATING,
        Reason.STARTING,
        Reason.ROLLING_OUT,
        Reason.SUSPENDED,
        Reason.PREDECESSOR_REMAINS,
        Reason.MIGRATION_FAILED,
    }
)
"""Reasons for which "not ready" is no news, or is told by another Event."""


@dataclass(frozen=True, slots=True)
class Event:
    """One Event."""

    reason: EventReason
    message: str
    warning: bool = False


def events_of(
    situation: Situation,
    findings: Mapping[ConditionType, Finding],
    *,
    applies: Sequence[tuple[Ref, Object | None, Mapping[str, Any]]],
) -> list[Event]:
    """What this reconcile changes, as against the status that is there."""
    return [*_of_status(situation, findings), *_of_writes(situation, applies)]


def _of_status(situation: Situation, findings: Mapping[ConditionType, Finding]) -> Iterator[Event]:
    ready, was = findings[ConditionType.READY], situation.old_condition(ConditionType.READY) or {}
    if ready.status is Status.TRUE and was.get("status") != Status.TRUE:
        yield Event(EventReason.READY, ready.message)
    if ready.status is not Status.TRUE and ready.reason not in QUIET and was.get("reason") != ready.reason:
        yield Event(EventReason.NOT_READY, f"{ready.reason}: {ready.message}", warning=True)
    schema, had = findings[ConditionType.SCHEMA_READY], situation.old_condition(ConditionType.SCHEMA_READY) or {}
    if schema.reason is Reason.MIGRATION_FAILED and had.get("reason") != schema.reason:
        yield Event(EventReason.MIGRATION_FAILED, schema.message, warning=True)
    if schema.true and had.get("reason") in (Reason.MIGRATING, Reason.MIGRATION_FAILED, Reason.MIGRATION_NEEDED):
        yield Event(EventReason.MIGRATED, "the schema is up to date")
    suspended = situation.old_condition(ConditionType.SUSPENDED) is not None
    if ConditionType.SUSPENDED in findings and not suspended:
        yield Event(EventReason.SUSPENDED, findings[ConditionType.SUSPENDED].message)
    if ConditionType.SUSPENDED not in findings and suspended:
        yield Event(EventReason.RESUMED, "messages are taken again")


def _of_writes(situation: Situation, applies: Sequence[tuple[Ref, Object | None, Mapping[str, Any]]]) -> Iterator[Event]:
    for ref, live, body in applies:
        what = f"{ref.resource.kind} {ref.name}"
        if ref.resource == JOBS:
            if live is None:
                yield Event(EventReason.MIGRATION_STARTED, f"Job {ref.name} brings the schema up to date")
        elif live is None:
            if situation.was_ready() and not _is_another(situation, ref):
                yield Event(EventReason.DRIFT_CORRECTED, f"{what} was deleted by somebody else and is made again", warning=True)
        elif not up_to_date(live, body):
            if ref.resource == DEPLOYMENTS and not same_pods(live, body):
                yield Event(EventReason.ROLLED_OUT, f"{what} gets new pods")
        elif situation.drifted(ref, live, body):
            yield Event(EventReason.DRIFT_CORRECTED, f"{what} was changed by somebody else and is set right", warning=True)


def _is_another(situation: Situation, ref: Ref) -> bool:
    """A ConfigMap that no pod has had yet follows a change of the spec, or of this operator."""
    return ref.resource == CONFIGMAPS and ref.name not in situation.configs_mounted
