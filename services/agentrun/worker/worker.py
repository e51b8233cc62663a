"""One worker: puts its parts together, starts attempts, and stops without losing what it holds."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from redis.asyncio import Redis

from agentrun.agents.base import Executor, RunInfo
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.costs.rules import Rules, rules_of
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun.manifests import AgentRun
from agentrun.store.pool import Pool
from agentrun.store.transitions import AttemptRef, Claimed
from agentrun.telemetry import WORKER_CAPACITY
from agentrun.worker import opening
from agentrun.worker.attempt import Attempt, End
from agentrun.worker.consumer import Consumer, Taken
from agentrun.worker.context import Opening
from agentrun.worker.endings import Ending, Failure, Retries
from agentrun.worker.event_writer import Writer
from agentrun.worker.keeper import LeaseKeeper
from agentrun.worker.lease import Lease
from agentrun.worker.patience import Complaint, by_halves, log
from agentrun.worker.purse import Purse
from agentrun.worker.run_log import FlushLimits, RunLog
from agentrun.worker.slots import Slots

FIRST_BACK_OFF_SECONDS = 1.0
HAND_BACK_SECONDS = 9.0
CLOSE_SECONDS = 3.0
"""With drainSeconds, both together stay below the pod's grace period (drainSeconds + 15)."""
STALE_SECONDS = 60.0
REPLACE_SECONDS = 5.0
"""How long agents that were told to end may fill the worker."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What the manifest says about a worker."""

    capacity: int
    lease_seconds: float
    max_run_seconds: float
    flush: FlushLimits
    retries: Retries
    max_lost_attempts: int
    money: Rules = field(default_factory=Rules)


def limits(manifest: AgentRun) -> Limits:
    """The limits of a manifest."""
    workers, streaming = manifest.spec.workers, manifest.spec.streaming
    return Limits(
        capacity=workers.concurrency,
        lease_seconds=workers.lease_seconds,
        max_run_seconds=workers.max_run_seconds,
        flush=FlushLimits(streaming.flush_events, streaming.flush_milliseconds / 1000),
        retries=Retries(workers.retries, FIRST_BACK_OFF_SECONDS, random.random),
        max_lost_attempts=manifest.spec.reaper.max_lost_attempts,
        money=rules_of(manifest.spec),
    )


def consumer_name(pod_name: str) -> str:
    """A name that no other start of any worker has, also not of the same pod."""
    return f"{pod_name}-{secrets.token_hex(4)}"


class Worker:
    """One worker. `start`, then `stop`; the keeper, the pool and the client are given in and stay open."""

    def __init__(
        self,
        executor: Executor,
        *,
        name: str,
        pool: Pool,
        redis: Redis,
        keys: Keys,
        keeper: LeaseKeeper,
        limits: Limits,
    ) -> None:
        self.name = name
        self._executor = executor
        self._pool = pool
        self._limits = limits
        self._keeper = keeper
        self._work = WorkStream(redis, keys)
        self._control = Control(redis, keys)
        self._writer = Writer(pool, self._work, EventStream(redis, keys))
        self._slots = Slots(limits.capacity)
        self._consumer = Consumer(
            self._work,
            pool,
            name=name,
            slots=self._slots,
            entries=keeper,
            lease_seconds=limits.lease_seconds,
            max_lost_attempts=limits.max_lost_attempts,
            begin=self._begin,
        )
        self._supervisor = Supervisor()
        self._attempts: dict[AttemptRef, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = Complaint("cannot read inputs and history from Postgres")
        self._hand_back = asyncio.Event()
        self._spent_since: float | None = None
        self.left_behind: set[asyncio.Task[Any]] = set()
        """Agents that did not end when they were told to. Each keeps its slot until it does."""
        self.spent = asyncio.Event()
        """Set when too many agents were left behind for this worker to be of use: it should be stopped."""
        self.cut_short = False
        """Whether any agent was ended before it was done: its threads, or it itself, may still run."""

    def start(self) -> None:
        """Begins to read."""
        WORKER_CAPACITY.set(self._limits.capacity)
        self._supervisor.run("consumer", self._consumer.run, stale_after=STALE_SECONDS)
        self._supervisor.run("control", self._listen, stale_after=float("inf"))
        self._supervisor.every("left behind", LOOK_SECONDS, self._look_whether_spent)

    @property
    def active(self) -> int:
        """How many runs are held."""
        return len(self._tasks)

    def stalled(self) -> str | None:
        """What does not get on; None if all is well."""
        return self._supervisor.stalled()

    async def stop(self, drain_seconds: float) -> None:
        """Stops reading, lets runs end within `drain_seconds`, hands the rest back."""
        until = time.monotonic() + drain_seconds
        self._consumer.stop()
        await self._within(until - time.monotonic(), self._idle)
        if self._tasks:
            log.info("handing runs back", count=len(self._tasks))
        self._hand_back.set()
        for attempt in list(self._attempts.values()):
            attempt.ask(End.HANDED_BACK)
        await self._within(max(HAND_BACK_SECONDS, until - time.monotonic()), self._idle)
        self._consumer.cancel()
        for task in list(self._tasks):
            self.cut_short = True
            task.cancel()
        await self._within(CLOSE_SECONDS, self._close)
        await self._supervisor.stop()
        await self._work.aclose()

    async def _idle(self) -> None:
        await self._consumer.stopped()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _close(self) -> None:
        await self._idle()
        await self._writer.close()

    async def _within(self, seconds: float, what: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await what()
        except TimeoutError:
            pass

    async def _listen(self, stamp: Stamp) -> None:
        await self._control.listen(self.name, self._told)

    def _told(self, message: ControlMessage) -> None:
        attempt = self._attempts.get(AttemptRef(message.run_id, message.epoch))
        if attempt is not None and message.action is ControlAction.CANCEL:
            attempt.ask(End.CANCELLED)

    async def _begin(self, group: Sequence[Taken]) -> None:
        """Starts an attempt for each run taken; from here on each gives its own slot back.

        If the worker stops before a run is started, the run is handed back: it must not count as lost.
        """
        waiting = {one.claimed.run_id: (one, self._lease(one)) for one in group}
        reading = asyncio.create_task(self._open(waiting))
        stopping = asyncio.create_task(self._hand_back.wait())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            stopping.cancel()
            for one, lease in waiting.values():
                self._keep(self._ending(one, self._log(one, lease), lease).hand_back, lease)
            waiting.clear()

    async def _open(self, waiting: dict[UUID, tuple[Taken, Lease]]) -> None:
        """Reads what agents are given and starts them. Who has been started, or has ended instead, is taken out of `waiting`."""

        async def ask(part: Sequence[Claimed]) -> dict[UUID, Opening]:
            return await opening.read(self._pool, part)

        async def start(part: Sequence[Claimed], openings: dict[UUID, Opening]) -> None:
            for claimed in part:
                self._start(*waiting.pop(claimed.run_id), openings[claimed.run_id])

        async def fail(claimed: Claimed, error: Exception) -> None:
            log.error("a run cannot be opened", run_id=str(claimed.run_id), exc_info=error)
            one, lease = waiting.pop(claimed.run_id)
            failure = Failure(
                "unreadable", f"the run's inputs, history or checkpoint cannot be read: {type(error).__name__}: {error}"
            )
            ending = self._ending(one, self._log(one, lease), lease)
            self._keep(lambda: ending.fail(failure), lease)

        group = [one.claimed for one, _ in waiting.values()]
        if group and not self._hand_back.is_set():
            await by_halves(group, ask, then=start, bad=fail, complaint=self._store)

    def _lease(self, one: Taken) -> Lease:
        lease = Lease(
            AttemptRef(one.claimed.run_id, one.claimed.epoch),
            one.entry_id,
            deadline=one.leased_from + self._limits.lease_seconds,
            stops_at=time.monotonic() + self._limits.max_run_seconds,
        )
        self._keeper.add(lease)
        return lease

    def _log(self, one: Taken, lease: Lease) -> RunLog:
        claimed = one.claimed
        return RunLog(self._writer, lease.ref, top=claimed.top, reserved=claimed.seq_reserved, limits=self._limits.flush)

    def _ending(self, one: Taken, run_log: RunLog, lease: Lease) -> Ending:
        return Ending(self._writer, run_log, one.claimed, lease.take_entry, self._limits.retries)

    def _start(self, one: Taken, lease: Lease, given: Opening) -> None:
        claimed, run_log = one.claimed, self._log(one, lease)
        run = RunInfo(claimed.run_id, claimed.session_id, claimed.agent, claimed.user_id, claimed.epoch)
        purse = Purse(self._limits.money, given.purse)
        attempt = Attempt(self._executor, run, given, run_log, lease, self._ending(one, run_log, lease), purse)
        self._attempts[lease.ref] = attempt
        if self._hand_back.is_set():
            attempt.ask(End.HANDED_BACK)
        self._keep(attempt.execute, lease, attempt)

    def _keep(self, ending: Callable[[], Awaitable[None]], lease: Lease, attempt: Attempt | None = None) -> None:
        """Holds a run until `ending` has come through."""
        task = asyncio.create_task(self._hold(ending, lease, attempt), name=f"attempt {lease.ref.run_id}/{lease.ref.epoch}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hold(self, ending: Callable[[], Awaitable[None]], lease: Lease, attempt: Attempt | None) -> None:
        try:
            await ending()
        except Exception:
            # Nothing is lost: the lease runs out and the reaper takes the run.
            log.exception("an attempt could not be ended", run_id=str(lease.ref.run_id), attempt=lease.ref.epoch)
        finally:
            self._keeper.remove(lease)
            self._attempts.pop(lease.ref, None)
            self.cut_short = self.cut_short or (attempt is not None and attempt.cut_short)
            if attempt is not None and attempt.left_behind is not None:
                self.left_behind.add(attempt.left_behind)  # it keeps its slot
                attempt.left_behind.add_done_callback(self._ended_after_all)
            else:
                self._slots.give(1)

    def _ended_after_all(self, task: asyncio.Task[Any]) -> None:
        self.left_behind.discard(task)
        self._slots.give(1)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody reports it as lost: it is fenced, whatever it did

    async def _look_whether_spent(self) -> None:
        """Agents that do not end hold their slots. If they hold half of all, or stand in the way of a run that must be alone, for
        longer than they may just be slow to end, only a new process helps.
        """
        left, capacity = len(self.left_behind), self._limits.capacity
        alone = self._consumer.waits_to_be_empty and self._slots.free + left == capacity
        if not left or not (alone or 2 * left >= capacity):
            self._spent_since = None
            return
        now = time.monotonic()
        self._spent_since = self._spent_since or now
        if now - self._spent_since >= REPLACE_SECONDS and not self.spent.is_set():
            log.warning("agents that do not end fill the worker: it stops so that it is replaced", count=left, capacity=capacity)
            self.spent.set()
