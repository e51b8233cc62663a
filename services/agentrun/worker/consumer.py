"""From the work stream to claimed runs: reads for free capacity only, looks each run up, and acts by the table.

The stream only hints; Postgres decides. What is not claimed here is acknowledged, or left to the reaper.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from agentrun import failpoints
from agentrun.bus.runs import Delivery, Held, WorkStream
from agentrun.control.reaping import Action, for_worker
from agentrun.store import runs, transitions
from agentrun.store.pool import Pool
from agentrun.store.transitions import Claim, Claimed
from agentrun.telemetry import ENTRIES
from agentrun.worker.patience import Complaint, until_answered

BLOCK_MS = 1_000
IDLE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


class Slots:
    """How many more runs this worker may hold."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._news = asyncio.Event()

    def take(self, count: int) -> None:
        """Before runs come in."""
        self.free -= count

    def give(self, count: int) -> None:
        """After they have gone."""
        self.free += count
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Until some slot is free, at most so long."""
        if self.free > 0:
            return
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    @property
    def chunk(self) -> int:
        """How many entries to ask for: a quarter of all at most, so that reading, claiming and executing overlap."""
        return min(self.free, max(1, self.capacity // 4))


@dataclass(frozen=True, slots=True)
class Taken:
    """A run that this worker owns now. `leased_from` is the monotonic time before the first try to claim it."""

    claimed: Claimed
    entry_id: str
    leased_from: float


class Consumer:
    """The reading side of one worker. `begin` starts attempts; each gives its slot back when it has ended."""

    def __init__(
        self,
        work: WorkStream,
        pool: Pool,
        *,
        name: str,
        slots: Slots,
        lease_seconds: float,
        begin: Callable[[Sequence[Taken]], Awaitable[None]],
    ) -> None:
        self._work = work
        self._pool = pool
        self._name = name
        self._slots = slots
        self._lease_seconds = lease_seconds
        self._begin = begin
        self._stopping = False
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bus = Complaint("cannot read work from Redis")
        self._store = Complaint("cannot claim runs in Postgres")
        self._broken = Complaint("an entry could not be handled; the reaper will")

    def stop(self) -> None:
        """Reads nothing more; what is being read is given back."""
        self._stopping = True

    async def stopped(self) -> None:
        """Waits, after `stop`, until nothing is read or claimed any more."""
        await self._stopped.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Drops what is still being claimed."""
        for task in self._tasks:
            task.cancel()

    async def run(self, stamp: Callable[[], None]) -> None:
        """Reads until `stop`, and then waits to be cancelled. `stamp` is called again and again: it is alive."""
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping:
            stamp()
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
                self._slots.take(len(deliveries))
                task = asyncio.create_task(self._handle(deliveries))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif time.monotonic() - start < BLOCK_MS / 2000:
                await asyncio.sleep(FIRST_PAUSE_SECONDS)  # the group was made anew, or the read was broken off
        self._stopped.set()
        await asyncio.get_running_loop().create_future()

    async def _handle(self, deliveries: Sequence[Delivery]) -> None:
        unused = len(deliveries)
        try:
            if self._stopping:
                await self._republish(deliveries)
                return
            taken = await self._take(deliveries)
            unused -= len(taken)
            if taken:
                await self._begin(taken)
        except Exception as error:
            self._broken.about(error)
        finally:
            self._slots.give(unused)

    async def _republish(self, deliveries: Sequence[Delivery]) -> None:
        """Somebody else shall have them: publishing a run twice, or one that is not pending, is harmless."""
        await self._work.republish([Held(one.run_id, one.entry_id) for one in deliveries if one.run_id is not None])
        ENTRIES.labels(Action.REPUBLISH.value).inc(len(deliveries))

    async def _take(self, deliveries: Sequence[Delivery]) -> list[Taken]:
        """Looks, then claims or acknowledges. A claim whose reply was lost is asked again as the same owner."""
        ids = list({one.run_id for one in deliveries if one.run_id is not None})
        looks = await until_answered(lambda: runs.look(self._pool, ids), complaint=self._store) if ids else {}
        done: list[Held] = []
        wishes: dict[UUID, tuple[Claim, str]] = {}
        for one in deliveries:
            look = looks.get(one.run_id) if one.run_id is not None else None
            action = for_worker(look)
            if action is Action.CLAIM and look is not None and look.run_id not in wishes:
                owner = f"{self._name}/{secrets.token_hex(6)}"
                wishes[look.run_id] = (Claim(look.run_id, look.epoch, owner), one.entry_id)
                continue
            if action is Action.CLAIM:
                action = Action.ACK  # a second entry of a run that is in this very group
            ENTRIES.labels(action.value).inc()
            if action is not Action.LEAVE:
                done.append(Held(one.run_id, one.entry_id))
        await failpoints.hit("worker.looked")
        taken = await self._claim(wishes) if wishes else []
        mine = {one.claimed.run_id for one in taken}
        done += [Held(run_id, entry) for run_id, (_, entry) in wishes.items() if run_id not in mine]
        if done:
            await self._acknowledge(done)
        return taken

    async def _claim(self, wishes: dict[UUID, tuple[Claim, str]]) -> list[Taken]:
        group = [claim for claim, _ in wishes.values()]
        leased_from = time.monotonic()
        claimed = await until_answered(
            lambda: transitions.claim(self._pool, group, lease_seconds=self._lease_seconds), complaint=self._store
        )
        await failpoints.hit("worker.claimed")
        ENTRIES.labels(Action.CLAIM.value).inc(len(claimed))
        ENTRIES.labels(Action.ACK.value).inc(len(group) - len(claimed))
        return [Taken(one, wishes[one.run_id][1], leased_from) for one in claimed]

    async def _acknowledge(self, done: Sequence[Held]) -> None:
        try:
            await self._work.acknowledge(done)
        except Exception as error:  # the reaper acknowledges them
            self._bus.about(error)
