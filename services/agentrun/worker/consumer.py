"""From the work stream to claimed runs: reads for free capacity only, looks each run up, and acts by the table.

The stream only hints; Postgres decides. What is not claimed here is acknowledged, or left to the reaper.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from agentrun import failpoints
from agentrun.bus.runs import Delivery, Held, WorkStream
from agentrun.control.reaping import Action, for_worker, runs_alone
from agentrun.store import runs, transitions
from agentrun.store.pool import Pool
from agentrun.store.transitions import Claim, Claimed
from agentrun.telemetry import ENTRIES
from agentrun.worker.patience import Complaint, by_halves, until_answered
from agentrun.worker.slots import Slots

BLOCK_MS = 1_000
IDLE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A run that this worker owns now. `leased_from` is the monotonic time before the first try to claim it."""

    claimed: Claimed
    entry_id: str
    leased_from: float


@dataclass(frozen=True, slots=True)
class Wish:
    """A run to claim, and the entry that it came with."""

    claim: Claim
    entry_id: str


class Entries(Protocol):
    """The part of `LeaseKeeper` that is needed here."""

    def hold(self, entry_id: str) -> None:
        """Keeps an entry from being reclaimed."""
        ...

    def let_go(self, entry_id: str) -> None:
        """Keeps it no more."""
        ...


class Consumer:
    """The reading side of one worker. `begin` starts attempts; each gives its slot back when it has ended.

    A run at its last chance waits here, with its entry kept fresh, while nothing more is read. When the worker is empty it is
    claimed, and until it has gone nothing else is (docs/decisions/0004).
    """

    def __init__(
        self,
        work: WorkStream,
        pool: Pool,
        *,
        name: str,
        slots: Slots,
        entries: Entries,
        lease_seconds: float,
        max_lost_attempts: int,
        begin: Callable[[Sequence[Taken]], Awaitable[None]],
    ) -> None:
        self._work = work
        self._pool = pool
        self._name = name
        self._slots = slots
        self._entries = entries
        self._lease_seconds = lease_seconds
        self._max_lost_attempts = max_lost_attempts
        self._begin = begin
        self._last_chances: deque[Delivery] = deque()
        self._stopping = False
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bus = Complaint("cannot read work from Redis")
        self._store = Complaint("cannot claim runs in Postgres")
        self._broken = Complaint("an entry could not be handled; the reaper will")

    @property
    def waits_to_be_empty(self) -> bool:
        """Whether a run at its last chance waits until nothing else is held."""
        return bool(self._last_chances)

    def stop(self) -> None:
        """Reads nothing more; what is being read is given back."""
        self._stopping = True

    async def stopped(self) -> None:
        """Waits, after `stop`, until nothing is read or claimed any more, and what waited here has been given back."""
        await self._stopped.wait()
        self._give_back_last_chances()
        while self._tasks:
            await asyncio.wait(self._tasks)
            self._give_back_last_chances()

    def cancel(self) -> None:
        """Claims nothing more; a claim whose answer is not known yet is looked up, and begun if it was made."""
        for task in self._tasks:
            task.cancel()

    async def run(self, stamp: Callable[[], None]) -> None:
        """Reads until `stop`, and then waits to be cancelled. `stamp` is called again and again: it is alive."""
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping:
            stamp()
            if self._last_chances:
                await self._give_last_chance(stamp)
                continue
            await self._slots.wait(IDLE_SECONDS)
            if self._stopping or self._slots.free <= 0:
                continue
            start = time.monotonic()
            try:
                deliveries = await self._work.read(self._name, count=self._slots.chunk, block_ms=BLOCK_MS)
                self._bus.over()
            except Exception as error:  # Redis is away, or not as it should be: it is asked again
                self._bus.about(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            if deliveries:
                await failpoints.hit("worker.read")
                self._handle_soon(deliveries)
            elif time.monotonic() - start < BLOCK_MS / 2000:
                await asyncio.sleep(FIRST_PAUSE_SECONDS)  # the group was made anew, or the read was broken off
        self._stopped.set()
        await asyncio.get_running_loop().create_future()

    async def _give_last_chance(self, stamp: Callable[[], None]) -> None:
        """Waits until nothing is held, takes up one run that waits for that, and waits until it has gone."""
        await self._emptied(stamp)
        if not self._stopping:
            self._handle_soon([self._last_chances.popleft()], alone=True)
            await self._emptied(stamp)

    def _give_back_last_chances(self) -> None:
        if self._last_chances:
            waiting = list(self._last_chances)
            self._last_chances.clear()
            self._handle_soon(waiting)

    async def _emptied(self, stamp: Callable[[], None]) -> None:
        while not self._stopping and not self._slots.empty:
            stamp()
            await self._slots.wait_empty(IDLE_SECONDS)

    def _handle_soon(self, deliveries: Sequence[Delivery], *, alone: bool = False) -> None:
        self._slots.take(len(deliveries))
        self._keep(self._handle(deliveries, alone=alone))

    def _keep(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, deliveries: Sequence[Delivery], *, alone: bool) -> None:
        unused = len(deliveries)
        try:
            if self._stopping:
                await self._republish(deliveries)
                return
            wishes = await self._look(deliveries, alone=alone)
            unused -= len(wishes)
            self._slots.give(unused)
            unused = 0
            if wishes:
                await self._claim(wishes)
        except Exception as error:
            self._broken.about(error)
        finally:
            self._slots.give(unused)
            if alone or self._stopping:
                for one in deliveries:
                    self._entries.let_go(one.entry_id)

    async def _republish(self, deliveries: Sequence[Delivery]) -> None:
        """Somebody else shall have them: publishing a run twice, or one that is not pending, is harmless."""
        await self._work.republish([Held(one.run_id, one.entry_id) for one in deliveries if one.run_id is not None])
        ENTRIES.labels(Action.REPUBLISH.value).inc(len(deliveries))

    async def _look(self, deliveries: Sequence[Delivery], *, alone: bool) -> list[Wish]:
        """Looks each run up: what is to be claimed now is the answer, what has to wait waits, the rest is acknowledged or left."""
        ids = list({one.run_id for one in deliveries if one.run_id is not None})
        looks = await until_answered(lambda: runs.look(self._pool, ids), complaint=self._store) if ids else {}
        done: list[Held] = []
        wishes: dict[UUID, Wish] = {}
        for one in deliveries:
            look = looks.get(one.run_id) if one.run_id is not None else None
            action = for_worker(look)
            if action is Action.CLAIM and look is not None and look.run_id not in wishes:
                if not alone and runs_alone(look.lost, max_lost_attempts=self._max_lost_attempts):
                    self._entries.hold(one.entry_id)
                    self._last_chances.append(one)
                    continue
                owner = f"{self._name}/{secrets.token_hex(6)}"
                wishes[look.run_id] = Wish(Claim(look.run_id, look.epoch, owner), one.entry_id)
                continue
            if action is Action.CLAIM:
                action = Action.ACK  # a second entry of a run that is in this very group
            ENTRIES.labels(action.value).inc()
            if action is not Action.LEAVE:
                done.append(Held(one.run_id, one.entry_id))
        await failpoints.hit("worker.looked")
        await self._acknowledge(done)
        return list(wishes.values())

    async def _claim(self, wishes: Sequence[Wish]) -> None:
        """Claims, and begins what was claimed. A claim whose reply was lost is asked again as the same owner."""
        leased_from = time.monotonic()

        async def claim(part: Sequence[Wish]) -> list[Claimed]:
            return await transitions.claim(self._pool, [one.claim for one in part], lease_seconds=self._lease_seconds)

        async def begin(part: Sequence[Wish], claimed: list[Claimed]) -> None:
            await failpoints.hit("worker.claimed")
            mine = {one.run_id: one for one in claimed}
            ENTRIES.labels(Action.CLAIM.value).inc(len(mine))
            ENTRIES.labels(Action.ACK.value).inc(len(part) - len(mine))
            self._slots.give(len(part) - len(mine))
            taken = [Taken(mine[it.claim.run_id], it.entry_id, leased_from) for it in part if it.claim.run_id in mine]
            lost = [Held(it.claim.run_id, it.entry_id) for it in part if it.claim.run_id not in mine]
            await asyncio.gather(self._begin(taken), self._acknowledge(lost))

        async def leave(wish: Wish, error: Exception) -> None:
            self._broken.about(error)
            ENTRIES.labels(Action.LEAVE.value).inc()
            self._slots.give(1)

        async def ask(part: Sequence[Wish]) -> list[Claimed]:
            try:
                return await claim(part)
            except asyncio.CancelledError:
                self._keep(self._look_up(part, claim, begin))
                raise

        await by_halves(wishes, ask, then=begin, bad=leave, complaint=self._store)

    async def _look_up(
        self,
        wishes: Sequence[Wish],
        claim: Callable[[Sequence[Wish]], Awaitable[list[Claimed]]],
        begin: Callable[[Sequence[Wish], list[Claimed]], Awaitable[None]],
    ) -> None:
        """After a claim was broken off: it may have been made, and then the run would count as lost. As the same owner it is found."""
        try:
            await begin(wishes, await claim(wishes))
        except Exception as error:
            self._broken.about(error)

    async def _acknowledge(self, done: Sequence[Held]) -> None:
        if not done:
            return
        try:
            await self._work.acknowledge(done)
        except Exception as error:  # the reaper acknowledges them
            self._bus.about(error)
