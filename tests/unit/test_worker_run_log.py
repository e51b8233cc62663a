"""Numbers are durable before anyone sees them, and an attempt's writes commit in the order of its events."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from agentrun.domain.errors import Fenced
from agentrun.domain.events import Event, Kind
from agentrun.store.ids import new_id
from agentrun.store.transitions import RESERVE, AttemptRef, Flush, LedgerRow
from agentrun.worker.run_log import BUFFER_BYTES, FLUSH_BYTES, FlushLimits, RunLog

ROW = LedgerRow(0, "m", 1, 0, 0, 1, 0, 0, 0, None, None, False)
NEVER = FlushLimits(10_000, 1_000.0)


class Store:
    """Postgres and Redis of one attempt, in memory. Flushes take turns of the loop; it may be held up, or have fenced us."""

    def __init__(self, *, top: int = -1, turns: Sequence[int] = ()) -> None:
        self.reserved = top + RESERVE
        self.seen: list[int] = []
        self.unreserved: list[int] = []
        self.stored: list[int] = []
        self.flushes: list[Flush] = []
        self.ledger: list[LedgerRow] = []
        self.lately: list[Flush] = []
        self.mine = True
        self.error: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self._turns = list(turns)
        self.live = self

    def put(self, run_id: UUID, events: Sequence[Event]) -> None:
        self.seen += [event.seq for event in events]
        self.unreserved += [event.seq for event in events if event.seq > self.reserved]

    async def flush(self, item: Flush) -> bool:
        for _ in range(self._turns.pop() if self._turns else 0):
            await asyncio.sleep(0)
        await self.open.wait()
        if self.error:
            raise self.error
        self.ledger += item.ledger
        if not self.mine:
            return False
        self.flushes.append(item)
        self.stored += [event.seq for event in item.events]
        self.reserved = max(self.reserved, item.reserve_through)
        return True

    def late(self, item: Flush) -> None:
        self.lately.append(item)


def run_log(store: Store, *, top: int = -1, limits: FlushLimits = NEVER) -> RunLog:
    return RunLog(store, AttemptRef(new_id(), 1), top=top, reserved=top + RESERVE, limits=limits)


async def emit(log: RunLog) -> None:
    """What the context does for each event."""
    while not log.room:
        await log.flush()
    log.append(Kind.TEXT_DELTA, b"{}")


@given(
    writers=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    events=st.integers(1, 100),
    turns=st.lists(st.integers(0, 30), max_size=50),
    top=st.integers(-1, 500),
)
@settings(max_examples=40, deadline=None)
def test_no_number_goes_out_that_is_not_reserved_and_none_is_left_out(
    writers: list[int], events: int, turns: list[int], top: int
) -> None:
    async def scenario() -> None:
        store = Store(top=top, turns=turns)
        log = run_log(store, top=top, limits=FlushLimits(events, 1_000.0))

        async def write(count: int) -> None:
            for n in range(count):
                await emit(log)
                if n % 7 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(*(write(count) for count in writers))
        async with log.end() as rest:
            left = [event.seq for event in rest.events]

        assert store.unreserved == []
        assert store.seen == list(range(top + 1, top + 1 + sum(writers)))
        assert store.stored + left == store.seen
        assert rest.last_seq == top + sum(writers)
        log.abandon()

    asyncio.run(scenario())


async def test_the_next_number_waits_for_a_flush_that_has_committed() -> None:
    store = Store()
    log = run_log(store)
    for _ in range(RESERVE):
        await emit(log)
    store.open.clear()
    waiting = asyncio.create_task(emit(log))
    await asyncio.sleep(0.02)
    assert not waiting.done() and store.seen[-1] == RESERVE - 1
    store.open.set()
    await waiting
    assert store.seen[-1] == RESERVE and store.unreserved == []


async def test_enough_events_are_flushed_at_once() -> None:
    store = Store()
    log = run_log(store, limits=FlushLimits(3, 1_000.0))
    for _ in range(3):
        await emit(log)
    await eventually(lambda: store.stored == [0, 1, 2], within=2, what="three events are stored")


async def test_few_events_are_flushed_after_a_while() -> None:
    store = Store()
    log = run_log(store, limits=FlushLimits(50, 0.02))
    await emit(log)
    assert store.stored == []
    await eventually(lambda: store.stored == [0], within=2, what="the event is stored")
    await emit(log)
    await eventually(lambda: store.stored == [0, 1], within=2, what="so is the next one")
    log.abandon()


async def test_a_checkpoint_holds_every_event_before_it_and_commits_after_them() -> None:
    store = Store()
    log = run_log(store)
    store.open.clear()
    await emit(log)
    flushing = asyncio.create_task(log.flush())
    await asyncio.sleep(0)
    await emit(log)
    point = asyncio.create_task(log.flush('{"step": 1}'))
    await asyncio.sleep(0)
    await emit(log)
    store.open.set()
    await asyncio.gather(flushing, point)
    assert [event.seq for event in store.flushes[0].events] == [0]
    checkpoint = store.flushes[1].checkpoint
    assert checkpoint is not None and checkpoint.state == '{"step": 1}'
    assert checkpoint.seq == max(event.seq for event in store.flushes[1].events)


async def test_a_refused_flush_stores_the_ledger_tells_the_attempt_once_and_ends_all_writing() -> None:
    store = Store()
    log = run_log(store)
    told: list[Exception] = []
    log.on_refused = told.append
    await emit(log)
    log.book(ROW)
    store.mine = False
    for _ in range(2):
        with pytest.raises(Fenced):
            await log.flush()
    assert store.ledger == [ROW]
    assert len(told) == 1 and log.fenced
    with pytest.raises(Fenced):
        log.check()


async def test_an_event_that_postgres_cannot_take_ends_the_attempt_with_that_error() -> None:
    store = Store()
    log = run_log(store, limits=FlushLimits(1, 1_000.0))
    told: list[Exception] = []
    log.on_refused = told.append
    store.error = ValueError("no such character")
    await emit(log)
    await eventually(lambda: told, within=2, what="the attempt is told")
    assert not log.fenced
    with pytest.raises(ValueError, match="no such character"):
        log.check()


async def test_a_call_booked_after_the_end_is_stored_alone() -> None:
    store = Store()
    log = run_log(store)
    async with log.end():
        pass
    log.book(ROW)
    assert [list(item.ledger) for item in store.lately] == [[ROW]]
    with pytest.raises(Fenced):
        log.check()


async def test_a_cancelled_flush_loses_nothing() -> None:
    store = Store()
    log = run_log(store)
    await emit(log)
    log.book(ROW)
    store.open.clear()
    flushing = asyncio.create_task(log.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    async with log.end() as rest:
        assert [event.seq for event in rest.events] == [0] and rest.ledger == [ROW]


async def test_large_events_are_stored_at_once_and_only_so_many_of_them_wait() -> None:
    store = Store()
    log = run_log(store, limits=FlushLimits(100, 1_000.0))
    store.open.clear()
    for _ in range(2 * BUFFER_BYTES // FLUSH_BYTES):
        if log.room:
            log.append(Kind.TEXT_DELTA, b"x" * FLUSH_BYTES)
            await asyncio.sleep(0)
    assert len(store.seen) == BUFFER_BYTES // FLUSH_BYTES and not log.room
    store.open.set()
    await eventually(lambda: store.stored == store.seen, within=2, what="they are stored")
    assert log.room and len(store.flushes[0].events) == 1
    log.abandon()
