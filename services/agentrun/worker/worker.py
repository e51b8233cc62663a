"""One worker: puts its parts together, starts attempts, and stops without losing what it holds."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from agentrun.agents.base import Executor, RunInfo
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun.manifests import AgentRun
from agentrun.store.pool import Pool
from agentrun.store.transitions import AttemptRef
from agentrun.telemetry import WORKER_CAPACITY
from agentrun.worker import opening
from agentrun.worker.attempt import Attempt, End, Opening
from agentrun.worker.consumer import Consumer, Slots, Taken
from agentrun.worker.endings import Ending, Retries
from agentrun.worker.event_writer import Writer
from agentrun.worker.keeper import LeaseKeeper
from agentrun.worker.lease import Lease
from agentrun.worker.patience import Complaint, log, until_answered
from agentrun.worker.run_log import FlushLimits, RunLog

FIRST_BACK_OFF_SECONDS = 1.0
HAND_BACK_SECONDS = 9.0
CLOSE_SECONDS = 3.0
"""With drainSeconds, both together stay below the pod's grace period (drainSeconds + 15)."""
STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the manifest says about a worker."""

    capacity: int
    lease_seconds: float
    max_run_seconds: float
    flush: FlushLimits
    retries: Retries


def limits(manifest: AgentRun) -> Limits:
    """The limits of a manifest."""
    workers, streaming = manifest.spec.workers, manifest.spec.streaming
    return Limits(
        capacity=workers.concurrency,
        lease_seconds=workers.lease_seconds,
        max_run_seconds=workers.max_run_seconds,
        flush=FlushLimits(streaming.flush_events, streaming.flush_milliseconds / 1000),
        retries=Retries(workers.retries, FIRST_BACK_OFF_SECONDS, random.random),
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
            lease_seconds=limits.lease_seconds,
            begin=self._begin,
        )
        self._supervisor = Supervisor()
        self._attempts: dict[AttemptRef, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = Complaint("cannot read inputs and history from Postgres")
        self._handing_back = False
        self.left_behind: set[asyncio.Task[Any]] = set()
        self.cut_short = False
        """Whether any agent was ended before it was done: its threads, or it itself, may still run."""

    def start(self) -> None:
        """Begins to read."""
        WORKER_CAPACITY.set(self._limits.capacity)
        self._supervisor.run("consumer", self._consumer.run, stale_after=STALE_SECONDS)
        self._supervisor.run("control", self._listen, stale_after=float("inf"))

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
        self._handing_back = True
        for attempt in list(self._attempts.values()):
            attempt.ask(End.HANDED_BACK)
        await self._within(max(HAND_BACK_SECONDS, until - time.monotonic()), self._idle)
        self._consumer.cancel()
        for task in list(self._tasks):
            self.cut_short = True
            task.cancel()
        await self._within(CLOSE_SECONDS, self._writer.close)
        await self._supervisor.stop()
        await self._work.aclose()

    async def _idle(self) -> None:
        await self._consumer.stopped()
        while self._tasks:
            await asyncio.wait(self._tasks)

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
        """Starts an attempt for each run taken; from here on each gives its own slot back."""
        leases = {one.claimed.run_id: self._lease(one) for one in group}
        started = False
        try:
            openings = await until_answered(
                lambda: opening.read(self._pool, [one.claimed for one in group]), complaint=self._store
            )
            for one in group:
                self._start(one, leases[one.claimed.run_id], openings[one.claimed.run_id])
            started = True
        finally:
            if not started:  # the leases run out, and the reaper takes the runs
                for lease in leases.values():
                    self._keeper.remove(lease)
                self._slots.give(len(group))

    def _lease(self, one: Taken) -> Lease:
        lease = Lease(
            AttemptRef(one.claimed.run_id, one.claimed.epoch),
            one.entry_id,
            deadline=one.leased_from + self._limits.lease_seconds,
            stops_at=time.monotonic() + self._limits.max_run_seconds,
        )
        self._keeper.add(lease)
        return lease

    def _start(self, one: Taken, lease: Lease, given: Opening) -> None:
        claimed = one.claimed
        run_log = RunLog(self._writer, lease.ref, top=claimed.top, reserved=claimed.seq_reserved, limits=self._limits.flush)
        attempt = Attempt(
            self._executor,
            RunInfo(claimed.run_id, claimed.session_id, claimed.agent, claimed.user_id, claimed.epoch),
            given,
            run_log,
            lease,
            Ending(self._writer, run_log, claimed, one.entry_id, self._limits.retries),
        )
        self._attempts[lease.ref] = attempt
        if self._handing_back:
            attempt.ask(End.HANDED_BACK)
        task = asyncio.create_task(self._execute(attempt, lease), name=f"attempt {claimed.run_id}/{claimed.epoch}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, attempt: Attempt, lease: Lease) -> None:
        try:
            await attempt.execute()
        except Exception:
            # Nothing is lost: the lease runs out and the reaper takes the run.
            log.exception("an attempt could not be ended", run_id=str(lease.ref.run_id), attempt=lease.ref.epoch)
        finally:
            self._keeper.remove(lease)
            self._attempts.pop(lease.ref, None)
            self._slots.give(1)
            self.cut_short = self.cut_short or attempt.cut_short
            if attempt.left_behind is not None:
                self.left_behind.add(attempt.left_behind)
                attempt.left_behind.add_done_callback(self._ended_after_all)

    def _ended_after_all(self, task: asyncio.Task[Any]) -> None:
        self.left_behind.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody reports it as lost: it is fenced, whatever it did
