"""The operator's queue: each key once, by one worker at a time, later again if it failed. And the workers that empty it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from agentrun.domain.errors import StoreUnavailable
from agentrun.maintenance.supervise import Supervisor
from agentrun_operator.kube_errors import Unavailable
from agentrun_operator.reconciler import Reconciler
from agentrun_operator.resources import Key
from agentrun_operator.work_queue import WorkQueue

A, B = Key("x", "a"), Key("x", "b")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[Key]:
    return WorkQueue(clock=clock, jitter=lambda: 1.0)


def test_a_key_that_waits_is_there_once(queue: WorkQueue[Key]) -> None:
    queue.add(A)
    queue.add(B)
    queue.add(A)

    assert (queue.take(), queue.take(), queue.take()) == (A, B, None)


def test_a_key_is_handled_by_one_worker_at_a_time(queue: WorkQueue[Key]) -> None:
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.add(A)

    assert queue.take() is None
    queue.done(A)
    assert queue.take() == A
    queue.done(A)
    assert queue.take() is None


def test_the_sooner_of_two_times_counts(queue: WorkQueue[Key], clock: Clock) -> None:
    queue.add(A, after=30)
    queue.add(A, after=5)
    queue.add(A, after=60)

    assert queue.seconds_to_next() == 5
    clock.now = 5
    assert queue.take() == A
    queue.done(A)
    clock.now = 100
    assert queue.take() is None


def test_a_time_given_while_a_key_is_handled_counts_from_then(queue: WorkQueue[Key], clock: Clock) -> None:
    queue.add(A)
    queue.take()
    queue.add(A, after=10)
    clock.now = 4
    queue.done(A)

    assert queue.seconds_to_next() == 6


def test_pauses_double_and_end_at_a_minute_and_begin_anew_after_success(queue: WorkQueue[Key]) -> None:
    pauses = []
    for _ in range(9):
        pauses.append(queue.retry(A))
    queue.forget(A)

    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert queue.retry(A) == 0.5
    assert queue.failures(A) == 1


def test_pauses_are_spread_and_never_shorter_than_the_server_asks(clock: Clock) -> None:
    queue = WorkQueue[Key](clock=clock, jitter=lambda: 0.0)

    assert queue.retry(A) == 0.25
    assert queue.retry(A, at_least=30) == 30


def test_later_looks_are_spread_by_a_fifth(clock: Clock) -> None:
    for jitter, latest in ((0.0, 10.0), (1.0, 12.0)):
        queue = WorkQueue[Key](clock=clock, jitter=lambda jitter=jitter: jitter)
        queue.look_again(A, 10.0)
        assert queue.seconds_to_next() == pytest.approx(latest)


def test_a_change_overtakes_a_pause(queue: WorkQueue[Key]) -> None:
    queue.retry(A)
    queue.add(A)

    assert queue.take() == A
    assert queue.failures(A) == 1


def test_ko_12_namespaces_take_turns_whatever_crowd_one_of_them_has(clock: Clock) -> None:
    queue: WorkQueue[Key] = WorkQueue(clock=clock, group=lambda key: key.namespace)
    crowd = [Key("crowd", str(number)) for number in range(1000)]
    for key in crowd:
        queue.add(key)
    clock.now = 60
    queue.add(Key("other", "1"))
    queue.add(Key("other", "2"), after=5)
    assert [queue.take() for _ in range(3)] == [crowd[0], Key("other", "1"), crowd[1]]
    clock.now = 65
    assert [queue.take() for _ in range(3)] == [crowd[2], Key("other", "2"), crowd[3]]
    assert [queue.take() for _ in range(997)] == [*crowd[4:], None]


def test_a_key_that_comes_to_a_time_that_it_has_left_is_there_once(queue: WorkQueue[Key], clock: Clock) -> None:
    queue.add(A, after=5)
    queue.add(A)
    assert queue.take() == A
    queue.done(A)
    queue.add(A, after=5)
    clock.now = 5
    assert (queue.take(), queue.take(), len(queue)) == (A, None, 0)


def test_how_long_the_first_key_waits_shows(queue: WorkQueue[Key], clock: Clock) -> None:
    assert queue.overdue() == 0
    queue.add(A, after=5)
    assert queue.overdue() == 0
    clock.now = 12
    assert queue.overdue() == 7
    queue.take()
    assert queue.overdue() == 0


async def test_who_waits_gets_a_key_when_it_is_due() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add(A, after=0.05)
    queue.add(B)

    async with asyncio.timeout(2):
        assert await asyncio.gather(*waiting) in ([A, B], [B, A])


async def test_a_worker_that_is_cancelled_while_it_waits_takes_nothing_along() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    waiting.cancel()
    queue.add(A)
    await asyncio.gather(waiting, return_exceptions=True)

    assert queue.take() == A


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "later", "take", "done", "retry", "wait"]), st.integers(0, 3), st.integers(0, 5)),
    max_size=80,
)


@given(ACTIONS)
def test_no_key_is_lost_and_none_is_handled_twice_at_once(actions: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    queue = WorkQueue[int](clock=clock, jitter=lambda: 1.0)
    owed: set[int] = set()
    for action, key, seconds in actions:
        if action in ("add", "later"):
            queue.add(key, after=float(seconds) if action == "later" else 0.0)
            owed.add(key)
        elif action == "retry":
            queue.retry(key)
            owed.add(key)
        elif action == "wait":
            clock.now += seconds
        elif action == "done":
            queue.done(key)
        else:
            before = queue.handled
            taken = queue.take()
            if taken is not None:
                assert taken not in before
                assert taken in owed
                owed.discard(taken)
    for key in queue.handled:
        queue.done(key)
    clock.now += 1000
    rest = set()
    while (taken := queue.take()) is not None:
        assert taken not in rest
        rest.add(taken)
    assert rest == owed


@dataclass
class Recorder:
    """A reconcile that does what it is told for each turn of a key."""

    turns: dict[Key, list[Exception | float | None]] = field(default_factory=dict)
    asked: list[Key] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def __call__(self, key: Key, /) -> float | None:
        self.asked.append(key)
        if self.hold is not None:
            await self.hold.wait()
        turn = self.turns.get(key, [])
        result = turn.pop(0) if turn else None
        if isinstance(result, Exception):
            raise result
        return result


@contextlib.asynccontextmanager
async def working(
    queue: WorkQueue[Key], reconcile: Recorder, *, workers: int = 2, seconds: float = 5.0
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    Reconciler("test", queue, reconcile, seconds=seconds).start(supervisor, workers=workers)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("error", [StoreUnavailable("away"), RuntimeError("bug"), Unavailable("slow down", retry_after=0.4)])
async def test_what_fails_is_tried_again_and_the_others_go_on(error: Exception) -> None:
    queue: WorkQueue[Key] = WorkQueue(jitter=lambda: 0.0)
    reconcile = Recorder({A: [error, error, None]})
    async with working(queue, reconcile, workers=1):
        queue.add(A)
        queue.add(B)
        await eventually(lambda: reconcile.asked.count(A) == 3, within=5, what="three tries")

    assert reconcile.asked[:2] == [A, B]
    assert queue.failures(A) == 0


async def test_a_retry_after_of_the_api_server_is_kept() -> None:
    clock = Clock()
    queue: WorkQueue[Key] = WorkQueue(clock=clock)
    reconcile = Recorder({A: [Unavailable("slow down", retry_after=30)]})
    async with working(queue, reconcile):
        queue.add(A)
        await eventually(lambda: queue.failures(A) == 1, within=5, what="the failure")

    assert queue.seconds_to_next() == 30


async def test_a_reconcile_that_hangs_is_cut_and_tried_again() -> None:
    queue: WorkQueue[Key] = WorkQueue(jitter=lambda: 0.0)
    reconcile = Recorder(hold=asyncio.Event())
    async with working(queue, reconcile, workers=1, seconds=0.05):
        queue.add(A)
        await eventually(lambda: queue.failures(A) >= 1, within=5, what="it is cut")
        assert reconcile.hold is not None
        reconcile.hold.set()
        await eventually(lambda: queue.failures(A) == 0, within=5, what="it is tried again")


async def test_it_looks_again_when_it_was_asked_to() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    reconcile = Recorder({A: [0.05]})
    async with working(queue, reconcile):
        queue.add(A)
        await eventually(lambda: reconcile.asked == [A, A], within=5, what="the second look")


async def test_what_is_cut_by_the_loss_of_the_lease_waits_for_the_next_one() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    reconcile = Recorder(hold=asyncio.Event())
    async with working(queue, reconcile):
        queue.add(A)
        await eventually(lambda: reconcile.asked == [A], within=5, what="it is begun")

    assert queue.handled == frozenset()
    assert queue.take() == A
