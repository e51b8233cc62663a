"""What a CronTask's status says of its slots."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from agentrun.domain.slots import SlotOutcome
from agentrun.manifests import CronTask, cron_task_of
from agentrun.store.cron_tasks import TaskState
from agentrun_operator.schedules import members

NOW = datetime(2026, 11, 29, 12, 0, 30, tzinfo=UTC)
UID = UUID(int=1)


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, 29, hour, minute, tzinfo=UTC)


def manifest(**spec: Any) -> CronTask:
    given = {"agentRunRef": {"name": "support"}, "schedule": "0 13 * * *", "input": "report", **spec}
    return cron_task_of(
        {"apiVersion": "agentrun.dev/v1alpha1", "kind": "CronTask", "metadata": {"name": "nightly"}, "spec": given}
    )


def state(**known: Any) -> TaskState:
    nothing = dict.fromkeys(("next_slot", "last_slot", "last_outcome", "last_success"))
    return TaskState(**{"uid": UID, "generation": 1, **nothing, "active": (), **known})


def test_everything_that_is_known_is_said() -> None:
    known = state(
        next_slot=at(14),
        last_slot=at(11),
        last_outcome=SlotOutcome.SKIPPED_OVERLAP,
        last_success=at(10, 2),
        active=(UID,),
        recent=((at(11), SlotOutcome.SKIPPED_OVERLAP), (at(10), SlotOutcome.RAN)),
    )
    assert members(known, manifest(), old={}, now=NOW) == {
        "lastScheduleTime": "2026-11-29T11:00:00Z",
        "lastOutcome": "skipped_overlap",
        "lastSuccessfulTime": "2026-11-29T10:02:00Z",
        "nextScheduleTime": "2026-11-29T14:00:00Z",
        "nextScheduleTimes": ["2026-11-29T14:00:00Z", "2026-11-30T13:00:00Z", "2026-12-01T13:00:00Z"],
        "recentSlots": [
            {"slot": "2026-11-29T11:00:00Z", "outcome": "skipped_overlap"},
            {"slot": "2026-11-29T10:00:00Z", "outcome": "ran"},
        ],
        "active": [str(UID)],
    }


def test_cr_15_until_a_scheduler_has_looked_the_next_three_times_are_reckoned() -> None:
    assert members(state(), manifest(), old={}, now=NOW) == {
        "nextScheduleTime": "2026-11-29T13:00:00Z",
        "nextScheduleTimes": ["2026-11-29T13:00:00Z", "2026-11-30T13:00:00Z", "2026-12-01T13:00:00Z"],
    }
    in_tokyo = members(state(), manifest(timeZone="Asia/Tokyo"), old={}, now=NOW)
    assert in_tokyo["nextScheduleTime"] == in_tokyo["nextScheduleTimes"][0] == "2026-11-30T04:00:00Z"
    odd_mondays = members(state(), manifest(schedule="0 0 */2 * MON"), old={}, now=NOW)["nextScheduleTimes"]
    assert odd_mondays == ["2026-12-07T00:00:00Z", "2026-12-21T00:00:00Z", "2027-01-11T00:00:00Z"]


def test_a_suspended_task_has_no_next_time() -> None:
    assert members(state(next_slot=at(14)), manifest(suspend=True), old={}, now=NOW) == {}


def test_where_the_new_spec_cannot_be_followed_the_stored_schedule_goes_on() -> None:
    assert members(state(next_slot=at(14)), None, old={}, now=NOW) == {
        "nextScheduleTime": "2026-11-29T14:00:00Z",
        "nextScheduleTimes": ["2026-11-29T14:00:00Z"],
    }
    assert members(state(), None, old={}, now=NOW) == {}


@pytest.mark.parametrize("old", [{}, {"lastOutcome": "ran", "active": ["x"], "conditions": []}])
def test_what_was_not_read_stays_as_it_is(old: dict[str, Any]) -> None:
    assert members(None, manifest(), old=old, now=NOW) == {name: old[name] for name in old if name != "conditions"}
