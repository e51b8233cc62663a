"""What happens to an entry of the work stream: the whole table, cell by cell."""

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun.control.contact import Contact
from agentrun.control.reaping import Action, for_reaper, for_worker, runs_alone
from agentrun.domain.states import FINAL, RunStatus

PENDING, RUNNING = RunStatus.PENDING, RunStatus.RUNNING


@dataclass(frozen=True)
class Look:
    status: RunStatus
    head: bool = True
    due: bool = True
    lease_alive: bool = False


@pytest.mark.parametrize(
    ("look", "worker", "reaper"),
    [
        (None, Action.ORPHAN, Action.ORPHAN),
        *((Look(status), Action.ACK, Action.ACK) for status in sorted(FINAL)),
        (Look(PENDING), Action.CLAIM, Action.REPUBLISH),
        (Look(PENDING, head=False), Action.ACK, Action.ACK),
        (Look(PENDING, due=False), Action.ACK, Action.ACK),
        (Look(RUNNING, lease_alive=True), Action.ACK, Action.GIVE_BACK),
        (Look(RUNNING), Action.LEAVE, Action.TAKE_OVER),
    ],
)
def test_the_table(look: Look | None, worker: Action, reaper: Action) -> None:
    assert for_worker(look) is worker
    assert for_reaper(look) is reaper


def test_only_a_pending_due_head_is_executed_and_only_an_expired_attempt_is_ended() -> None:
    for status, head, due, alive in itertools.product(RunStatus, *[(True, False)] * 3):
        look = Look(status, head, due, alive)
        assert (for_worker(look) is Action.CLAIM) == (status is PENDING and head and due)
        assert (for_reaper(look) is Action.TAKE_OVER) == (status is RUNNING and not alive)
        assert for_worker(look) is not Action.TAKE_OVER
        assert for_reaper(look) is not Action.CLAIM


@pytest.mark.parametrize(
    ("lost", "most", "alone"),
    [(0, 3, False), (1, 3, False), (2, 3, True), (3, 3, True), (0, 2, False), (1, 2, True), (0, 1, False), (1, 1, False)],
)
def test_only_the_last_of_several_chances_is_had_alone(lost: int, most: int, alone: bool) -> None:
    assert runs_alone(lost, max_lost_attempts=most) is alone


START = datetime(2025, 1, 1, tzinfo=UTC)
LONG_AGO = START - timedelta(days=1)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def contact() -> Contact:
    return Contact(lease=timedelta(seconds=30), longest_gap=timedelta(seconds=15))


def test_a_reaper_is_steady_one_lease_after_its_start() -> None:
    mine, seen = contact(), []
    for second in range(0, 41, 10):
        mine.reached(at(second), started=LONG_AGO)
        seen.append(mine.steady)

    assert seen == [False, False, False, True, True]


@pytest.mark.parametrize("kind", ["no answer", "silence", "postgres restarted", "clock went back"])
def test_a_break_makes_the_count_begin_anew(kind: str) -> None:
    mine, base, started = contact(), 40.0, LONG_AGO
    for second in range(0, 41, 10):
        mine.reached(at(second), started=LONG_AGO)
    assert mine.steady

    if kind == "no answer":
        mine.broken()
        assert not mine.steady
    elif kind == "silence":
        base = 100.0
    elif kind == "postgres restarted":
        started = at(45)
    else:
        base = 10.0
    seen = []
    for second in range(5, 46, 10):
        mine.reached(at(base + second), started=started)
        seen.append(mine.steady)

    assert seen[:3] == [False] * 3
    assert seen[-1]


def test_a_contact_is_good_for_as_long_as_a_gap_may_last() -> None:
    mine = contact()
    assert mine.good_until is None
    for second in range(0, 31, 10):
        assert mine.good_until is None
        mine.reached(at(second), started=LONG_AGO)
    assert mine.good_until == at(30 + 15)

    mine.reached(at(46), started=LONG_AGO)
    assert mine.good_until is None


@given(st.lists(st.tuples(st.floats(-5, 40), st.booleans()), max_size=60))
def test_steady_means_one_lease_of_answers_without_a_gap(steps: list[tuple[float, bool]]) -> None:
    mine, now, unbroken, answered = contact(), 0.0, 0.0, False
    for step, works in steps:
        now += step
        if not works:
            mine.broken()
            answered = False
        else:
            mine.reached(at(now), started=LONG_AGO)
            unbroken = unbroken + step if answered and 0 <= step <= 15 else 0.0
            answered = True
        if mine.steady:
            assert answered
            assert unbroken >= 29.999
