"""When the time of a condition moves."""

from datetime import UTC, datetime

from agentrun_operator.conditions import LONGEST_MESSAGE, Condition, Status, merge, seconds_since, stamp
from agentrun_operator.reasons import ConditionType, Reason

THEN = datetime(2026, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def _ready(status: Status, message: str = "m") -> Condition:
    return Condition(ConditionType.READY, status, Reason.PENDING, message)


def test_the_time_moves_with_the_status_only() -> None:
    (old,) = merge((), [_ready(Status.UNKNOWN)], generation=1, now=THEN)
    (same,) = merge([old], [_ready(Status.UNKNOWN, "other")], generation=2, now=NOW)
    assert (same["lastTransitionTime"], same["observedGeneration"], same["message"]) == ("2026-01-01T00:00:00Z", 2, "other")
    (changed,) = merge([same], [_ready(Status.TRUE)], generation=2, now=NOW)
    assert changed["lastTransitionTime"] == "2026-01-02T00:00:00Z"


def test_equal_conditions_are_unchanged() -> None:
    old = merge((), [_ready(Status.TRUE)], generation=1, now=THEN)
    assert merge(old, [_ready(Status.TRUE)], generation=1, now=NOW) == old


def test_a_condition_without_a_time_gets_one() -> None:
    (found,) = merge([{"type": "Ready", "status": "True"}], [_ready(Status.TRUE)], generation=1, now=NOW)
    assert found["lastTransitionTime"] == stamp(NOW)


def test_a_message_fits_the_schema() -> None:
    (found,) = merge((), [_ready(Status.TRUE, "x" * 10_000)], generation=1, now=NOW)
    assert len(found["message"]) == LONGEST_MESSAGE


def test_an_unreadable_time_is_now() -> None:
    assert seconds_since({"lastTransitionTime": "soon"}, NOW) == 0.0
    assert seconds_since({"lastTransitionTime": "2026-01-01T00:00:00Z"}, NOW) == 86_400.0
