"""Runs of a CronTask that somebody asks for: one now, or those of past slots that have none. Neither can start a run twice.

Both take the CronTask's row, as a scheduler does, and the keys of the runs decide. `suspend`, `concurrencyPolicy`, `jitterSeconds` and
`catchUp` are not asked, since somebody did; the runs count as unfinished ones for the slots that come after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from uuid import UUID

from agentrun.domain import slots
from agentrun.schedules import tasks
from agentrun.schedules.starting import Owner, start_manual, start_slots
from agentrun.store import cron_tasks, runs
from agentrun.store import slots as table
from agentrun.store.budgets import Budget, Refused
from agentrun.store.cron_tasks import Locked
from agentrun.store.ids import new_id
from agentrun.store.pool import Connection, Pool, unavailable
from agentrun.store.slots import Started
from agentrun.store.transitions import Submitted

EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""Slots of before are not backfilled."""
MOST = 100
"""Slots of one backfill."""


class NotYet(ValueError):
    """A backfill would reach beyond now."""


class OverBudget(Exception):
    """What was asked for does not fit into the day's budget; nothing was stored."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.scope)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Triggered:
    """The run that was asked for; `session` is its session's name."""

    run: Submitted
    session: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot and its run; `started`: the run is a new one. `run_id` is None only where nothing was to be changed."""

    slot: datetime
    run_id: UUID | None
    started: bool


@dataclass(frozen=True, slots=True)
class Backfilled:
    """What became of slots, oldest first; `following` is the first slot that was not looked at. `heads` can be worked on."""

    filled: list[Filled]
    following: datetime | None
    heads: list[UUID]


async def trigger(pool: Pool, *, agent: str, name: str, client_id: str, budget: Budget | None = None) -> Triggered | None:
    """Starts a run now, or finds the one of an earlier request with the same id; None: there is no such CronTask.

    Raises OverBudget, StoreUnavailable.
    """
    with unavailable():
        async with pool.acquire() as conn, conn.transaction():
            locked = await cron_tasks.lock_named(conn, name)
            if locked is None:
                return None
            owner = _owner(agent, locked, budget)
            found = await start_manual(conn, owner, client_id, locked.now)
            if isinstance(found, Refused):
                raise OverBudget(found)
    return Triggered(found, owner.task.fixed_session or slots.manual_session(name, client_id))


async def backfill(
    pool: Pool,
    *,
    agent: str,
    name: str,
    since: datetime,
    until: datetime | None,
    limit: int,
    dry_run: bool,
    budget: Budget | None = None,
) -> Backfilled | None:
    """Starts a run for each slot from `since` to `until` (None: now) that has none, at most `limit` slots; None: there is no such CronTask.

    Raises NotYet if `until` has not come, OverBudget unless all fit, CronError if the schedule cannot be followed, StoreUnavailable.
    """
    with unavailable():
        async with pool.acquire() as conn, conn.transaction():
            locked = await cron_tasks.lock_named(conn, name)
            if locked is None:
                return None
            last = locked.now if until is None else until
            if last > locked.now:
                raise NotYet
            owner = _owner(agent, locked, budget)
            schedule = owner.task.when(namespace=agent.partition("/")[0])
            wanted = takewhile(lambda slot: slot <= last, schedule.after(max(since, EARLIEST) - timedelta(microseconds=1)))
            due = list(islice(wanted, limit + 1))
            filled, heads = await _fill(conn, owner, due[:limit], dry_run=dry_run)
    return Backfilled(filled, due[limit] if len(due) > limit else None, heads)


async def _fill(conn: Connection, owner: Owner, due: Sequence[datetime], *, dry_run: bool) -> tuple[list[Filled], list[UUID]]:
    there = await _there(conn, owner.task.name, due)
    new = [slot for slot in due if slot not in there]
    if dry_run or not new:
        return [Filled(slot, there.get(slot), slot not in there) for slot in due], []
    await table.backfill(conn, owner.uid, new)
    asked, _ = await start_slots(conn, owner, [Started(slot, new_id(), None) for slot in new])
    found = [run for run in asked if isinstance(run, Submitted)]
    if len(found) < len(asked):
        raise OverBudget(next(run for run in asked if isinstance(run, Refused)))
    runs_of = there | {slot: run.run_id for slot, run in zip(new, found, strict=True)}
    return [Filled(slot, runs_of[slot], slot not in there) for slot in due], [run.run_id for run in found if run.is_head]


async def _there(conn: Connection, name: str, due: Sequence[datetime]) -> dict[datetime, UUID]:
    """Runs of these slots: this CronTask's, and those of its predecessors of the same name."""
    keys = {slots.run_key(uid, slot): slot for uid in await cron_tasks.uids_of(conn, name) for slot in due}
    return {keys[key]: run_id for key, run_id in (await runs.by_keys(conn, list(keys))).items()}


def _owner(agent: str, locked: Locked, budget: Budget | None) -> Owner:
    return Owner(agent, locked.schedule.uid, tasks.read(locked.schedule.spec), budget)
