"""What one attempt writes, in order: events with their numbers, ledger rows, checkpoints, and at last what is left over.

A number goes out only if it is known to be reserved in Postgres, so that whatever a reader has seen can be taken back. An
attempt's writes to Postgres happen one after the other (`_order`), so they commit in the order of their events.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from agentrun import failpoints
from agentrun.domain.errors import Fenced
from agentrun.domain.events import Event, Kind
from agentrun.store.effects import Begin, Begun, Settle, Settled
from agentrun.store.transitions import RESERVE, AttemptRef, Checkpoint, Flush, LedgerRow
from agentrun.telemetry import FENCED_WRITES

FLUSH_BYTES = 1_000_000
"""So much goes to Postgres without waiting for more."""
BUFFER_BYTES = 4_000_000
"""So much may wait for it; then the agent waits too."""


class Live(Protocol):
    """The way to the readers."""

    def put(self, run_id: UUID, events: Sequence[Event]) -> None:
        """Hands events over, without waiting."""
        ...


class Out(Protocol):
    """The part of `Writer` that is needed here."""

    @property
    def live(self) -> Live:
        """The way to the readers."""
        ...

    async def flush(self, item: Flush) -> bool:
        """Stores; answers whether the attempt still held its run."""
        ...

    def late(self, item: Flush) -> None:
        """Stores ledger rows that came after their attempt's end."""
        ...

    async def begin_effect(self, item: Begin) -> Begun:
        """Puts a call on record that is about to go out."""
        ...

    async def settle_effect(self, item: Settle) -> Settled:
        """Puts on record what came of it."""
        ...


@dataclass(frozen=True, slots=True)
class FlushLimits:
    """When events go to Postgres at the latest: this many, or this many seconds after the first of them."""

    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """What an attempt has not stored yet when it ends, and the last number that it gave out."""

    events: list[Event]
    ledger: list[LedgerRow]
    last_seq: int


class RunLog:
    """The log of one attempt. `on_refused` is called once when a write is refused: the attempt can only end then."""

    def __init__(
        self,
        out: Out,
        ref: AttemptRef,
        *,
        top: int,
        reserved: int,
        limits: FlushLimits,
    ) -> None:
        self._out = out
        self._ref = ref
        self._limits = limits
        self.on_refused: Callable[[Exception], None] = lambda error: None
        self._next = top + 1
        self._reserved = reserved
        self._events: list[Event] = []
        self._bytes = 0
        self._ledger: list[LedgerRow] = []
        self._order = asyncio.Lock()
        self._sealed = False
        self._refusal: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flusher: asyncio.Task[None] | None = None

    @property
    def last_seq(self) -> int:
        """The last number that went out; the top of the log at the start if none did."""
        return self._next - 1

    @property
    def room(self) -> bool:
        """Whether the next number is known to be reserved, and the buffer takes more."""
        return self._next <= self._reserved and self._bytes < BUFFER_BYTES

    def check(self) -> None:
        """Raises if nothing may be written any more: Fenced, or the error with which Postgres refused a write."""
        if self._refusal is not None:
            raise self._refusal
        if self._sealed:
            raise self._over()

    def append(self, kind: Kind, data: bytes) -> Event:
        """Gives the event its number and sends it to the readers; it is stored soon. Only while there is `room`."""
        assert self.room
        event = Event(self._next, self._ref.epoch, kind, data)
        self._next += 1
        self._events.append(event)
        self._bytes += len(data)
        self._out.live.put(self._ref.run_id, (event,))
        self._schedule()
        return event

    def book(self, row: LedgerRow) -> None:
        """Takes a ledger row, also after the end: it goes with the next write, or alone if there is none any more."""
        if self._sealed:
            self._out.late(Flush(self._ref.run_id, self._ref.epoch, 0, ledger=(row,)))
        else:
            self._ledger.append(row)

    async def flush(self, checkpoint: str | None = None) -> None:
        """Stores what has been written so far, with a checkpoint where one is given, and reserves the next numbers.

        Raises Fenced if the attempt has been ended; its ledger rows are stored all the same.
        """
        async with self._order:
            self.check()
            events, ledger = list(self._events), list(self._ledger)
            if not events and not ledger and checkpoint is None:
                return
            top = self.last_seq
            await failpoints.hit("worker.flush.before")
            reserve = top + RESERVE
            point = Checkpoint(top, checkpoint) if checkpoint is not None else None
            held = await self._out.flush(Flush(self._ref.run_id, self._ref.epoch, reserve, events, ledger, point))
            del self._ledger[: len(ledger)]
            if not held:
                self.fence()
                self.check()
            del self._events[: len(events)]
            self._bytes -= sum(len(event.data) for event in events)
            self._reserved = max(self._reserved, reserve)
            await failpoints.hit("worker.checkpoint.committed" if point else "worker.flush.committed")

    async def begin_effect(self, item: Begin) -> Begun:
        """Puts a call on record, before it goes out. Raises Fenced."""
        self.check()
        begun = await self._out.begin_effect(item)
        if not begun.held:
            self.fence()
        self.check()
        return begun

    async def settle_effect(self, item: Settle) -> Settled:
        """Puts on record what came of a call. Raises Fenced."""
        self.check()
        settled = await self._out.settle_effect(item)
        if not settled.held:
            self.fence()
        self.check()
        return settled

    @property
    def fenced(self) -> bool:
        """Whether a write has found that somebody else ended the attempt."""
        return isinstance(self._refusal, Fenced)

    def fence(self) -> None:
        """A write of this attempt changed nothing: it has been ended by somebody else."""
        FENCED_WRITES.inc()
        self._refuse(self._over())

    def _over(self) -> Fenced:
        return Fenced(f"attempt {self._ref.epoch} of run {self._ref.run_id} is over; what it does now changes nothing")

    def _refuse(self, error: Exception) -> None:
        if self._refusal is None:
            self._refusal = error
            self.on_refused(error)

    @contextlib.asynccontextmanager
    async def end(self) -> AsyncIterator[Rest]:
        """Seals the log and gives out what is left, after the writes that are on their way. Only ledger rows may follow."""
        self._sealed = True
        if self._timer is not None:
            self._timer.cancel()
        async with self._order:
            yield Rest(self._events, self._ledger, self.last_seq)

    def abandon(self) -> None:
        """Gives up what is still on its way; after `end` there is nothing."""
        self._sealed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._flusher is not None:
            self._flusher.cancel()

    def _schedule(self) -> None:
        if self._flusher is not None:
            return
        if len(self._events) >= self._limits.events or self._bytes >= FLUSH_BYTES:
            self._flush_soon()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.seconds, self._flush_soon)

    def _flush_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flusher is None and not self._sealed:
            self._flusher = asyncio.create_task(self._flush_in_background())

    async def _flush_in_background(self) -> None:
        try:
            await self.flush()
        except Fenced:
            pass  # the attempt has been told, or has ended
        except Exception as error:  # Postgres answered, and would refuse the same events again
            self._refuse(error)
        finally:
            self._flusher = None
            if self._events and not self._sealed and self._refusal is None:
                self._schedule()
