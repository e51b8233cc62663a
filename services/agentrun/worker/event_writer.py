"""The way out of a worker: what all attempts write, in groups.

Events go to Redis at once through one stage over all attempts; that they arrive there is never waited for and never
needed, since readers find what is missing in Postgres. Flushes, endings and what follows an ending go in group commits.

Must not know what an attempt is about, nor in which order its writes come: that is `run_log`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar
from uuid import UUID

from agentrun import failpoints
from agentrun.bus.events import EventStream
from agentrun.bus.runs import Held, WorkStream
from agentrun.costs.usage import NAME_CHARACTERS
from agentrun.domain.events import Event
from agentrun.store import effects, transitions
from agentrun.store.effects import Begin, Begun, Settle, Settled
from agentrun.store.group import Group
from agentrun.store.pool import Pool
from agentrun.store.transitions import AttemptRef, Finish, Finished, Flush, LedgerRow, TakenOver, TakeOver
from agentrun.telemetry import EVENTS
from agentrun.worker.patience import Complaint, log, until_answered

MOST = 500
BUFFERED_EVENTS = 20_000
BUFFERED_BYTES = 64_000_000
GROUP_BYTES = 4_000_000
EVENT_OVERHEAD_BYTES = 100
REDIS_PAUSE_SECONDS = 0.5

R = TypeVar("R")
W = TypeVar("W", Flush, Finish, TakeOver)


class Appends(Protocol):
    """The part of `EventStream` that is needed here."""

    async def append(self, events: Sequence[tuple[UUID, Event]]) -> Sequence[bool]:
        """Sends events to their runs' streams. Raises BusUnavailable."""
        ...


class LiveStage:
    """Events on their way to Redis, in order. Never blocks who puts one in; what finds no room or no Redis is dropped."""

    def __init__(
        self,
        stream: Appends,
        *,
        most_waiting: int = BUFFERED_EVENTS,
        most_bytes: int = BUFFERED_BYTES,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self._stream = stream
        self._most_waiting = most_waiting
        self._most_bytes = most_bytes
        self._group_bytes = group_bytes
        self._bytes = 0
        self._waiting: deque[tuple[UUID, Event]] = deque()
        self._put = 0
        self._done = 0
        self._marks: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._complaint = Complaint("events do not reach Redis; readers get them from Postgres")

    def put(self, run_id: UUID, events: Sequence[Event]) -> None:
        """Hands events over."""
        for event in events:
            if len(self._waiting) < self._most_waiting and self._bytes < self._most_bytes:
                self._waiting.append((run_id, event))
                self._bytes += len(event.data)
                self._put += 1
        if self._sender is None and self._waiting:
            self._sender = asyncio.create_task(self._send(), name="live events")

    async def sent(self) -> None:
        """Waits until everything put in so far has been tried."""
        if self._done < self._put:
            mark: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._marks.append((self._put, mark))
            await mark

    async def _send(self) -> None:
        try:
            while self._waiting:
                group = self._take()
                away = not await self._try(group)
                self._done += len(group)
                while self._marks and self._marks[0][0] <= self._done:
                    mark = self._marks.popleft()[1]
                    if not mark.done():
                        mark.set_result(None)
                if away:
                    await asyncio.sleep(REDIS_PAUSE_SECONDS)
        finally:
            self._sender = None

    def _take(self) -> list[tuple[UUID, Event]]:
        group: list[tuple[UUID, Event]] = []
        size = 0
        while self._waiting and len(group) < MOST and size < self._group_bytes:
            group.append(self._waiting.popleft())
            size += len(group[-1][1].data)
        self._bytes -= size
        return group

    async def _try(self, group: Sequence[tuple[UUID, Event]]) -> bool:
        try:
            await self._stream.append(group)
        except Exception as error:  # whatever is wrong with Redis, the runs go on
            self._complaint.about(error)
            return False
        self._complaint.over()
        EVENTS.inc(len(group))
        return True


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What follows the end of an attempt, once that is committed.

    `events` go to the run's readers, `publish` is the session's next run, and the entry is acknowledged, or exchanged
    for a new one if the run waits again (`again`).
    """

    run_id: UUID
    entry_id: str
    events: Sequence[Event] = ()
    publish: UUID | None = None
    again: bool = False


class Writer:
    """All that a worker's attempts write. Store calls here are repeated until Postgres answers."""

    def __init__(self, pool: Pool, work: WorkStream, events: EventStream) -> None:
        self._pool = pool
        self._work = work
        self.live = LiveStage(events)
        self._flushes: Group[Flush, bool] = Group(self._flush_group, most=MOST, weigh=_weight, stage="flush")
        self._finishes: Group[Finish, Finished] = Group(self._finish_group, most=MOST, weigh=_weight, stage="finish")
        self._take_overs: Group[TakeOver, TakenOver] = Group(self._take_over_group, most=MOST, weigh=_weight, stage="give_back")
        self._begun: Group[Begin, Begun] = Group(self._begin_group, most=MOST, weigh=_effect_weight, stage="begin_effect")
        self._settled: Group[Settle, Settled] = Group(self._settle_group, most=MOST, weigh=_effect_weight, stage="settle_effect")
        self._aftermaths: Group[Aftermath, None] = Group(self._after_group, most=MOST, stage="after")
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_complaint = Complaint("Postgres does not take what the runs write")
        self._bus_complaint = Complaint("Redis does not take acknowledgements; the reaper will")

    async def flush(self, item: Flush) -> bool:
        """Stores; answers whether the attempt still held its run."""
        return await self._write(self._flushes, item)

    async def finish(self, item: Finish) -> Finished:
        """Ends a run by its own attempt."""
        return await self._write(self._finishes, item)

    async def give_back(self, item: TakeOver) -> TakenOver:
        """Gives a run back by its own attempt."""
        return await self._write(self._take_overs, item)

    async def begin_effect(self, item: Begin) -> Begun:
        """Puts a call on record that is about to go out."""
        return await until_answered(lambda: self._begun.submit(item), complaint=self._store_complaint)

    async def settle_effect(self, item: Settle) -> Settled:
        """Puts on record what came of it."""
        return await until_answered(lambda: self._settled.submit(item), complaint=self._store_complaint)

    def after(self, item: Aftermath) -> None:
        """Does what follows an ending, in the background."""
        self._keep(asyncio.create_task(self._aftermaths.submit(item)))

    def late(self, item: Flush) -> None:
        """Stores ledger rows that came after their attempt's end, in the background."""
        self._keep(asyncio.create_task(self._late(item)))

    async def close(self) -> None:
        """Waits until everything handed over has been tried."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.live.sent()

    async def _write(self, group: Group[W, R], item: W) -> R:
        """Until it is answered. What Postgres refuses is tried again without its ledger rows, which are then stored one by one: neither
        does a bad row cost the run's output, nor bad output the rows.
        """
        try:
            return await until_answered(lambda: group.submit(item), complaint=self._store_complaint)
        except Exception:
            if not item.ledger:
                raise
            for row in item.ledger:
                await self._book(AttemptRef(item.run_id, item.epoch or 0), row)
            bare = replace(item, ledger=())
            return await until_answered(lambda: group.submit(bare), complaint=self._store_complaint)

    async def _book(self, ref: AttemptRef, row: LedgerRow) -> None:
        """One ledger row; one that is refused without its figures, so that at least the call is on record."""
        for told in (row, _without_figures(row)):
            item = Flush(ref.run_id, ref.epoch, 0, ledger=(told,))
            try:
                await until_answered(lambda item=item: self._flushes.submit(item), complaint=self._store_complaint)  # type: ignore[misc]
                return
            except Exception as refusal:
                log.error("a ledger row is refused", run_id=str(ref.run_id), row=repr(told), error=str(refusal))

    async def _late(self, item: Flush) -> None:
        await self.flush(item)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what follows an ending failed", error=f"{type(error).__name__}: {error}")

    async def _flush_group(self, group: Sequence[Flush]) -> list[bool]:
        held = await transitions.flush(self._pool, group)
        return [AttemptRef(item.run_id, item.epoch) in held for item in group]

    async def _finish_group(self, group: Sequence[Finish]) -> list[Finished]:
        found = {(done.run_id, done.epoch): done for done in await transitions.finish(self._pool, group)}
        return [found[item.run_id, item.epoch] for item in group]

    async def _take_over_group(self, group: Sequence[TakeOver]) -> list[TakenOver]:
        return await transitions.take_over(self._pool, group)

    async def _begin_group(self, group: Sequence[Begin]) -> list[Begun]:
        return await effects.begin(self._pool, group)

    async def _settle_group(self, group: Sequence[Settle]) -> list[Settled]:
        return await effects.settle(self._pool, group)

    async def _after_group(self, group: Sequence[Aftermath]) -> list[None]:
        """After the commit: last events, next heads, entries. Redis may be away: sweep and reaper make up for it."""
        for item in group:
            self.live.put(item.run_id, item.events)
        await self.live.sent()
        await failpoints.hit("worker.terminal.sent")
        try:
            heads = [item.publish for item in group if item.publish]
            if heads:
                await self._work.publish(heads)
            await failpoints.hit("worker.head.published")
            again = [Held(item.run_id, item.entry_id) for item in group if item.again]
            if again:
                await self._work.republish(again)
            done = [Held(item.run_id, item.entry_id) for item in group if not item.again]
            if done:
                await self._work.acknowledge(done)
            await failpoints.hit("worker.acked")
            self._bus_complaint.over()
        except Exception as error:
            self._bus_complaint.about(error)
        return [None] * len(group)


def _weight(item: Flush | Finish | TakeOver) -> int:
    """About how many bytes it takes to store."""
    weight = sum(len(event.data) + EVENT_OVERHEAD_BYTES for event in item.events)
    if isinstance(item, Flush):
        return weight + (len(item.checkpoint.state) if item.checkpoint else 0)
    return weight + (len(item.result or "") if isinstance(item, Finish) else 0)


def _effect_weight(item: Begin | Settle) -> int:
    return len((item.request if isinstance(item, Begin) else item.response) or "")


def _without_figures(row: LedgerRow) -> LedgerRow:
    return LedgerRow(row.call, row.model[:NAME_CHARACTERS], 0, 0, 0, 0, 0, 0, 0, None, None, unmeasured=True)
