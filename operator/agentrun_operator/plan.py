"""What is to be done for one AgentRun: from what was observed to a list of writes. Pure; the time is an argument.

    checks → conditions → gate → writes and deletions → status → events

The gate: nothing is made or changed as long as the spec cannot be used, the schema is not known to fit, or Redis must not be used. Pods
that run keep running, on the configuration, policies and template that they have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from agentrun_operator import availability, checks, schema_checks, spending, suspension
from agentrun_operator.checks import Finding, first
from agentrun_operator.conditions import Condition, Status
from agentrun_operator.facts import Object, Observed
from agentrun_operator.jobs import is_at_work
from agentrun_operator.lenient import note_of
from agentrun_operator.objects import desired_objects, migration_objects, ref_of
from agentrun_operator.reasons import ALWAYS_PRESENT, ConditionType, Reason
from agentrun_operator.render.labels import CREATING
from agentrun_operator.render.names import SERVING, Component, component
from agentrun_operator.resources import CONFIGMAPS, JOBS, Ref
from agentrun_operator.situation import Defaults, Situation
from agentrun_operator.status import differs, status_of
from agentrun_operator.transitions import Event, events_of

__all__ = ["Apply", "Defaults", "Delete", "Event", "Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Apply:
    """One object as it should be. `live` is what was seen of it, None if it was not there."""

    ref: Ref
    body: Mapping[str, Any]
    live: Object | None
    first_replicas: int | None = None
    """Of a worker Deployment that is not there yet: with how many replicas it begins. See `apply.py`."""


@dataclass(frozen=True, slots=True)
class Delete:
    """One object that should not be there."""

    ref: Ref
    uid: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes in their order: deletions of what stands in the way, applies, prunes, status, events."""

    applies: Sequence[Apply] = ()
    deletes: Sequence[Delete] = ()
    status: Mapping[str, Any] | None = None
    """None: it is as it should be."""
    events: Sequence[Event] = ()
    requeue_after: float | None = None
    """Seconds; None: an event will come."""
    gate_open: bool = False
    """What the spec and the Secrets say is rolled out now."""
    schema_ready: bool = False
    """The database has a schema that fits and is this AgentRun's: it may be looked into."""
    stores_in_use: bool = False
    """The stores that the Secrets name are those of the pods, or there are no pods yet."""


class Gate(StrEnum):
    """What may be written."""

    OPEN = "open"
    MIGRATE = "migrate"
    """Only what the migration needs."""
    CLOSED = "closed"


def plan(observed: Observed, *, now: datetime, defaults: Defaults) -> Plan:
    """The plan for one AgentRun."""
    situation = Situation(observed, defaults, now)
    findings = _findings(situation)
    gate = _gate(situation, findings)
    if gate is Gate.CLOSED and findings[ConditionType.SCHEMA_READY].reason is Reason.MIGRATING and not situation.migrates:
        findings[ConditionType.SCHEMA_READY] = Finding(
            Status.UNKNOWN, Reason.NOT_EVALUATED, "the migration begins when nothing else stands in the way; see Ready"
        )
    desired = _desired(situation, gate)
    applies = [_apply(situation, body) for body in desired if not _terminates(situation, body)]
    changing = frozenset(_changing(situation, applies)) if gate is Gate.OPEN else frozenset[Component]()
    opened = gate is Gate.OPEN
    findings[ConditionType.GATEWAY_AVAILABLE] = availability.gateway(situation, gate_open=opened)
    findings[ConditionType.WORKERS_AVAILABLE] = availability.workers(situation, gate_open=opened)
    findings[ConditionType.SCALING_ACTIVE] = availability.scaling(situation)
    findings[ConditionType.READY] = _summary(situation, findings, gate, changing)
    _add_passing(situation, findings, changing)
    status = status_of(situation, [_condition(kind, findings[kind]) for kind in ConditionType if kind in findings])
    return Plan(
        applies=applies,
        deletes=[*_remains(observed), *_prunes(situation, gate, changing, [apply.ref for apply in applies])],
        status=status if differs(situation.old_status, status) else None,
        events=events_of(situation, findings, applies=[(apply.ref, apply.live, apply.body) for apply in applies]),
        requeue_after=min((finding.again for finding in findings.values() if finding.again is not None), default=None),
        gate_open=opened,
        schema_ready=situation.schema_fits,
        stores_in_use=observed.manifest is not None and situation.stores_in_use,
    )


def _findings(situation: Situation) -> dict[ConditionType, Finding]:
    """Accepted, SchemaReady, QueueReady."""
    usable = f"the spec can be used{note_of(situation.observed.unknown)}{checks.schedules_left_alone(situation)}"
    accepted = first(checks.ACCEPTED, situation, Finding(Status.TRUE, Reason.ACCEPTED, usable))
    findings = {ConditionType.ACCEPTED: accepted}
    if accepted.true or accepted.reason is Reason.OBJECT_REFUSED:
        findings[ConditionType.SCHEMA_READY] = first(
            schema_checks.SCHEMA, situation, Finding(Status.TRUE, Reason.SCHEMA_READY, "the database has a schema that fits")
        )
        findings[ConditionType.QUEUE_READY] = first(
            checks.QUEUE, situation, Finding(Status.TRUE, Reason.QUEUE_READY, "Redis can be used")
        )
    else:
        later = Finding(Status.UNKNOWN, Reason.NOT_EVALUATED, "not looked at before Accepted is True")
        findings |= {ConditionType.SCHEMA_READY: later, ConditionType.QUEUE_READY: later}
    return findings


def _gate(situation: Situation, findings: Mapping[ConditionType, Finding]) -> Gate:
    if not findings[ConditionType.ACCEPTED].true:
        return Gate.CLOSED
    queue, schema = findings[ConditionType.QUEUE_READY], findings[ConditionType.SCHEMA_READY]
    # Redis may come after the pods, but those that run do not go to one that is not there.
    if not queue.true and (queue.reason is not Reason.REDIS_UNREACHABLE or situation.redis_is_new):
        return Gate.CLOSED
    if schema.true:
        return Gate.OPEN
    return Gate.MIGRATE if schema.reason is Reason.MIGRATING else Gate.CLOSED


def _desired(situation: Situation, gate: Gate) -> list[dict[str, Any]]:
    if gate is Gate.OPEN:
        return desired_objects(situation)
    if gate is Gate.MIGRATE and situation.migration_at_work is None:
        # A Job's template cannot be changed, so one that is there is left alone, whichever version made it.
        return [
            body for body in migration_objects(situation) if ref_of(body) not in situation.observed.children or not _is_job(body)
        ]
    return []


def _summary(
    situation: Situation, findings: Mapping[ConditionType, Finding], gate: Gate, changing: frozenset[Component]
) -> Finding:
    found = availability.summary(situation, findings, changing=changing)
    return found if gate is Gate.OPEN else replace(found, message=found.message + suspension.not_in_effect(situation))


def _apply(situation: Situation, body: Mapping[str, Any]) -> Apply:
    ref = ref_of(body)
    live = situation.observed.children.get(ref)
    if ref != component(situation.observed.key, Component.WORKER) or (live is not None and not _unfinished(live)):
        return Apply(ref, body, live)
    return Apply(ref, body, live, first_replicas=_first_replicas(situation))


def _first_replicas(situation: Situation) -> int:
    """With how many workers the Deployment begins."""
    scaling, spec = situation.observed.scaling, situation.manifest.spec
    least, most = spec.workers.min_replicas, spec.workers.max_replicas
    if spec.suspend:
        return 0
    if spec.scaling.mode == "External":
        return max(1, least)  # an autoscaler of Kubernetes does not touch what stands at zero
    return least if scaling is None or scaling.desired is None else min(max(scaling.desired, least), most)


def _unfinished(worker: Object) -> bool:
    return CREATING in (worker["metadata"].get("annotations") or {})


def _terminates(situation: Situation, body: Mapping[str, Any]) -> bool:
    """It is being deleted: it is made again when it is gone."""
    live = situation.observed.children.get(ref_of(body))
    return live is not None and "deletionTimestamp" in live["metadata"]


def _changing(situation: Situation, applies: Sequence[Apply]) -> Iterator[Component]:
    """The Deployments that are not yet what they should be."""
    planned = {apply.ref: apply for apply in applies}
    for part in SERVING:
        apply = planned.get(component(situation.observed.key, part))
        if (
            apply is None
            or apply.live is None
            or not availability.up_to_date(apply.live, apply.body)
            or situation.drifted(apply.ref, apply.live, apply.body)
        ):
            yield part


def _prunes(situation: Situation, gate: Gate, changing: frozenset[Component], applied: Sequence[Ref]) -> Iterator[Delete]:
    """What was ours and is not wanted any more. While the gate is closed everything stays as it is."""
    if gate is Gate.CLOSED:
        return
    kept = {*applied, situation.migration}
    for ref, live in sorted(situation.observed.children.items()):
        outdated = gate is Gate.OPEN or ref.resource == JOBS
        if (
            outdated
            and ref not in kept
            and "deletionTimestamp" not in live["metadata"]
            and not _in_use(situation, changing, ref, live)
        ):
            yield Delete(ref, str(live["metadata"]["uid"]))


def _in_use(situation: Situation, changing: frozenset[Component], ref: Ref, live: Object) -> bool:
    """A migration is not cut off in the middle of its work, and no pod loses the configuration that it has."""
    if ref.resource == JOBS:
        return is_at_work(live)
    if ref.resource != CONFIGMAPS:
        return False
    deployments = [situation.child(part) for part in SERVING]
    rolled_out = not changing and all(found is not None and availability.is_rolled_out(found) for found in deployments)
    return not rolled_out or ref.name in situation.configs_mounted


def _remains(observed: Observed) -> list[Delete]:
    return [
        Delete(ref, str(body["metadata"]["uid"]))
        for ref, body in sorted(observed.remains.items(), key=lambda item: item[0])
        if "deletionTimestamp" not in body["metadata"]
    ]


def _add_passing(situation: Situation, findings: dict[ConditionType, Finding], changing: frozenset[Component]) -> None:
    """The conditions that are there only while they are True."""
    for kind in _STALLABLE:
        if findings[kind].status is Status.FALSE and findings[kind].reason in STALLED:
            findings[ConditionType.STALLED] = Finding(Status.TRUE, findings[kind].reason, findings[kind].message)
            break
    suspended = suspension.suspended(situation, changing=changing)
    if suspended is not None:
        findings[ConditionType.SUSPENDED] = suspended
    exhausted = spending.exhausted(situation)
    if exhausted is not None:
        findings[ConditionType.BUDGET_EXHAUSTED] = exhausted
    unpriced = spending.unpriced(situation)
    if unpriced is not None:
        findings[ConditionType.CALLS_UNPRICED] = unpriced


_STALLABLE = (
    *(kind for kind in ALWAYS_PRESENT if kind not in (ConditionType.READY, ConditionType.SCALING_ACTIVE)),
    ConditionType.READY,
)

STALLED = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.IMAGE_MISSING,
        Reason.NAME_TAKEN,
        Reason.OBJECT_REFUSED,
        Reason.ROLL_OUT_FAILED,
        Reason.MIGRATION_FAILED,
        Reason.MIGRATION_NEEDED,
        Reason.IMAGE_TOO_OLD,
        Reason.SCHEMA_TOO_NEW,
        Reason.DATABASE_NOT_OURS,
        Reason.DATABASE_REFUSED,
        Reason.DATABASE_URL_INVALID,
        Reason.DATABASE_TLS_FAILED,
        Reason.REDIS_REFUSED,
        Reason.REDIS_URL_INVALID,
        Reason.REDIS_TLS_FAILED,
        Reason.REDIS_TOO_OLD,
        Reason.REDIS_EVICTS,
    }
)
"""Reasons that nobody but a person takes away."""


def _condition(kind: ConditionType, finding: Finding) -> Condition:
    return Condition(kind, finding.status, finding.reason, finding.message)


def _is_job(body: Mapping[str, Any]) -> bool:
    return bool(body["kind"] == JOBS.kind)
