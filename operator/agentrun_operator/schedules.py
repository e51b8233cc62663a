"""A CronTask as the API server has it: whether it can be followed, and what its status says of its slots. Pure."""

from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from agentrun.domain import cron
from agentrun.domain.errors import ManifestError
from agentrun.manifests import CronTask
from agentrun.store.cron_tasks import TaskState
from agentrun_operator.conditions import Condition, Status, stamp
from agentrun_operator.lenient import Known, known_cron_task, note_of
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.resources import Key

MEMBERS = (
    "lastScheduleTime",
    "lastOutcome",
    "lastSuccessfulTime",
    "nextScheduleTime",
    "nextScheduleTimes",
    "recentSlots",
    "active",
)
NEXT_SHOWN = 3

Body = Mapping[str, Any]


def agent_of(task: Body) -> Key:
    """The AgentRun that a CronTask is for."""
    ref = (task.get("spec") or {}).get("agentRunRef") or {}
    return Key(task["metadata"].get("namespace", ""), str(ref.get("name", "")))


def generation_of(task: Body) -> int:
    return int(task["metadata"].get("generation", 1))


def refused(reason: Reason, message: str) -> Condition:
    """Says that a CronTask is not accepted."""
    return Condition(ConditionType.ACCEPTED, Status.FALSE, reason, message)


def read(task: Body) -> Known[CronTask] | Condition:
    """The manifest, or why it cannot be followed."""
    try:
        known = known_cron_task(task)
    except ManifestError as error:
        return refused(Reason.INVALID_SPEC, str(error))
    if problem := cron.schedule_problem(known.manifest.spec.schedule):
        return refused(Reason.SCHEDULE_INVALID, problem)
    if problem := cron.zone_problem(known.manifest.spec.time_zone):
        return refused(Reason.TIME_ZONE_UNKNOWN, problem)
    return known


def valid(task: Body) -> CronTask | None:
    """The manifest, if it can be followed: of one that cannot, the last good generation stays."""
    known = read(task)
    return known.manifest if isinstance(known, Known) else None


def left_out(task: Body) -> str:
    """What the condition adds about members that this operator does not know."""
    known = read(task)
    return note_of(known.unknown) if isinstance(known, Known) else ""


def members(state: TaskState | None, manifest: CronTask | None, *, old: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The status members, without those that there is nothing to say of.

    `state` is what the database has, None: it was not read, so what the `old` status says stays. `manifest` None: the spec cannot be
    followed; then the schedule that is stored goes on.
    """
    if state is None:
        return {name: old[name] for name in MEMBERS if name in old}
    following = _next(state, manifest, now)
    found = {
        "lastScheduleTime": _stamp(state.last_slot) or old.get("lastScheduleTime"),  # a new database goes on after it
        "lastOutcome": state.last_outcome.value if state.last_outcome else None,
        "lastSuccessfulTime": _stamp(state.last_success),
        "nextScheduleTime": _stamp(following[0] if following else None),
        "nextScheduleTimes": [stamp(slot) for slot in following],
        "recentSlots": [{"slot": stamp(slot), "outcome": outcome.value} for slot, outcome in state.recent],
        "active": [str(run) for run in state.active],
    }
    return {name: value for name, value in found.items() if value}


def _next(state: TaskState, manifest: CronTask | None, now: datetime) -> list[datetime]:
    """The next slots, the first as a scheduler has noted it; until one has seen this generation, by the same arithmetic."""
    if manifest is not None and manifest.spec.suspend:
        return []
    first = [] if state.next_slot is None else [state.next_slot]
    if manifest is None:
        return first
    spec, metadata = manifest.spec, manifest.metadata
    schedule = cron.parse(spec.schedule, spec.time_zone, seed=cron.seed(metadata.namespace, metadata.name))
    return [*first, *islice(schedule.after(first[0] if first else now), NEXT_SHOWN - len(first))]


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else stamp(moment)
