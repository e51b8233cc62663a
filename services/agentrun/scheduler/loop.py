"""Fires CronTasks: for each due task one transaction that decides its slots and stores their runs.

Nobody leads and no lock outlives a transaction, so any number of schedulers may run. Whoever gets the task's row decides; the slot's
row and the run's key, made of the scheduled minute, are conflicts for everybody else. Postgres' clock says what is due. A crash before
the commit leaves nothing, one after it leaves runs that the sweep publishes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

import asyncpg
import structlog

from agentrun import failpoints
from agentrun.domain import slots
from agentrun.domain.errors import AgentrunError, StoreUnavailable
from agentrun.domain.slots import STARTED, SlotOutcome
from agentrun.domain.states import RunStatus
from agentrun.maintenance.supervise import Stamp
from agentrun.schedules import tasks
from agentrun.schedules.decision import Concurrency, Stretch, decide
from agentrun.schedules.starting import Owner, start_slots
from agentrun.schedules.tasks import Task
from agentrun.store import cron_tasks
from agentrun.store import slots as table
from agentrun.store.budgets import Budget, Refused
from agentrun.store.cron_tasks import Locked
from agentrun.store.ids import new_id
from agentrun.store.pool import Connection, Pool, unavailable
from agentrun.store.slots import Slot, Started
from agentrun.store.transitions import Reason, Submitted, TakenOver
from agentrun.telemetry import BUDGET_REFUSALS, RUNS_FINISHED, SLOT_DELAY, SLOTS, SLOTS_FORGOTTEN, TAKEOVERS

LOOK_SECONDS = 1.0
"""Between the end of one look at all tasks and the next."""

_REFUSED = (asyncpg.PostgresError, asyncpg.InterfaceError)
"""What `unavailable` lets through: errors about values."""

_OVER_BUDGET = "the day's budget is spent or set aside for runs that have not ended"

_log = structlog.get_logger(__name__)


class _NothingFits(Exception):
    """Rolls back what was done for a slot."""


@dataclass(frozen=True, slots=True)
class News:
    """What was committed and Redis does not know: runs that can be worked on, and runs that were cancelled."""

    heads: list[UUID] = field(default_factory=list)
    cancelled: list[TakenOver] = field(default_factory=list)


class Announcer(Protocol):
    """Tells Redis. What it cannot tell, it drops: the sweep finds the runs."""

    async def send(self, news: News) -> None: ...


class Firing:
    """The schedules of one AgentRun."""

    def __init__(
        self,
        pool: Pool,
        announcer: Announcer,
        *,
        namespace: str,
        name: str,
        suspended: bool,
        budget: Budget | None = None,
        ahead: timedelta = timedelta(),
    ) -> None:
        """`suspended`: the AgentRun's own spec.suspend. `budget`: into what runs must fit. `ahead` sets this scheduler's idea of now off
        from Postgres'.
        """
        self._pool = pool
        self._announcer = announcer
        self._namespace = namespace
        self._agent = f"{namespace}/{name}"
        self._suspended = suspended
        self._budget = budget
        self._ahead = ahead
        self._begun = False
        self._broken: set[UUID] = set()
        self._last: UUID | None = None

    async def keep_looking(self, stamp: Stamp) -> None:
        """Ticks until it is cancelled. Each task is progress, however long all of them take together. Raises StoreUnavailable."""
        while True:
            await self.tick(stamp)
            stamp()
            await asyncio.sleep(LOOK_SECONDS)

    async def tick(self, stamp: Stamp = lambda: None) -> None:
        """Decides what is due; at the first time, looks at every task. Raises StoreUnavailable."""
        found = await cron_tasks.due(self._pool, ahead=self._ahead, whatever=not self._begun)
        for uid in sorted(found, key=lambda uid: uid == self._last):
            self._last = uid  # if Postgres fails at this one, it is the last one next time: it may be its own fault
            stamp()
            news = await self._try(uid)
            if news is not None and (news.heads or news.cancelled):
                await self._announcer.send(news)
        self._begun, self._last = True, None

    async def _try(self, uid: UUID) -> News | None:
        """One task; a fault of its own does not hold up the others."""
        try:
            return await self._fire(uid)
        except AgentrunError:
            raise
        except Exception as error:
            if uid not in self._broken:
                _log.exception("a schedule cannot be followed", cron_task=str(uid), error=str(error))
            self._broken.add(uid)
            return None

    async def _fire(self, uid: UUID) -> News:
        news = News()
        with unavailable():
            async with self._pool.acquire() as conn, conn.transaction():
                locked = await cron_tasks.lock(conn, uid)
                if locked is None:
                    return news
                await failpoints.hit("scheduler.slots.locked")
                decided, forgotten = await self._decide(conn, locked, news)
                await failpoints.hit("scheduler.slots.stored")
        await failpoints.hit("scheduler.slots.committed")
        self._broken.discard(uid)
        now = locked.now + self._ahead
        SLOTS_FORGOTTEN.inc(forgotten)
        for one in decided:
            SLOTS.labels(one.outcome.value).inc()
            if one.outcome is SlotOutcome.SKIPPED_BUDGET:
                BUDGET_REFUSALS.labels("slot").inc()
            if one.outcome in STARTED:
                SLOT_DELAY.observe(max((now - one.slot).total_seconds(), 0.0))
        if news.cancelled:
            TAKEOVERS.labels(Reason.CANCELLED.value).inc(len(news.cancelled))
            RUNS_FINISHED.labels(RunStatus.CANCELLED.value).inc(len(news.cancelled))
        return news

    async def _decide(self, conn: Connection, locked: Locked, news: News) -> tuple[list[Slot], int]:
        """Everything of the transaction: slots, runs, and how far the task is decided. Answers what is new, and how many are forgotten."""
        uid, now = locked.schedule.uid, locked.now + self._ahead
        task = tasks.read(locked.schedule.spec)
        when = task.when(namespace=self._namespace)
        after = max(filter(None, (locked.schedule.slots_from, locked.decided_through)))
        active = [] if task.concurrency_policy is Concurrency.ALLOW else await table.unfinished(conn, uid)
        earlier = task.before(namespace=self._namespace)
        stretches = [replace(one, after=max(filter(None, (one.after, locked.decided_through)))) for one in earlier]
        stretches.append(Stretch(when, after, now, task.suspend))
        decided, forgotten = decide(stretches, task.rules, now=now, suspended=self._suspended or task.suspend, busy=bool(active))
        newest = max((one.slot for one in decided), default=None)
        if decided:
            new = await table.record(conn, uid, decided)
            decided = [one for one in decided if one.slot in new]
            starting = [one.slot for one in decided if one.outcome in STARTED]
            if starting:
                replaced = active if task.concurrency_policy is Concurrency.REPLACE else []
                owner = Owner(self._agent, uid, task, self._budget)
                skipped, outcome, why = await self._start(conn, owner, starting, replaced, news)
                if skipped:
                    decided = [Slot(one.slot, outcome) if one.slot in skipped else one for one in decided]
                    await table.fail(conn, uid, skipped, why, outcome)
            await table.prune(conn, uid, keep=task.history_limit)
        settled = all(one.until <= now for one in earlier)
        await cron_tasks.note(conn, locked, decided_through=newest, next_slot=when.next(max(now, after)), settled=settled)
        return decided, forgotten

    async def _start(
        self, conn: Connection, owner: Owner, starting: Sequence[datetime], replaced: Sequence[UUID], news: News
    ) -> tuple[list[datetime], SlotOutcome, str]:
        """Stores the runs of slots: all, none if they cannot be stored, or those that fit into the day's budget. Answers the slots without
        a run, their outcome, and why. A run is replaced only by one that is stored.
        """
        wanted = [Started(slot, new_id(), _not_before(owner.uid, owner.task, slot)) for slot in starting]
        try:
            async with conn.transaction():
                found, cancelled = await start_slots(conn, owner, wanted, replaced=replaced)
                if cancelled and not any(isinstance(run, Submitted) for run in found):
                    raise _NothingFits
        except _NothingFits:
            return list(starting), SlotOutcome.SKIPPED_BUDGET, _OVER_BUDGET
        except _REFUSED as error:
            if conn.is_closed():
                raise StoreUnavailable("the connection was lost while runs of slots were stored") from error
            _log.error("a scheduled run cannot be stored", cron_task=owner.task.name, slots=len(starting), error=str(error))
            return list(starting), SlotOutcome.FAILED, f"the run could not be stored: {error}"
        news.cancelled.extend(cancelled)
        pairs = list(zip(found, wanted, strict=True))
        stored = [(run, one) for run, one in pairs if isinstance(run, Submitted)]
        news.heads.extend(run.run_id for run, one in stored if run.is_head and one.not_before is None)
        refused = [one.slot for run, one in pairs if isinstance(run, Refused)]
        return refused, SlotOutcome.SKIPPED_BUDGET, _OVER_BUDGET


def _not_before(uid: UUID, task: Task, slot: datetime) -> datetime | None:
    wait = slots.jitter(uid, slot, most=task.jitter_seconds)
    return slot + wait if wait else None
