"""The schedules of an AgentRun, as the cluster's CronTasks say it. Written by the operator (or `dev`), read by the scheduler.

The row of a CronTask is also what schedulers lock to decide its slots, and where they note how far they are.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from agentrun.domain.slots import SlotOutcome
from agentrun.store.pool import Connection, Executor, unavailable

ACTIVE_SHOWN = 20
"""How many unfinished runs of a CronTask `states` names."""
RECENT_SHOWN = 5
"""How many decided slots of a CronTask `states` names."""
HOLD_SECONDS = 10
"""How long a scheduler that hangs in a transaction may hold a CronTask: Postgres ends its session then."""
MOST_COUNTED = 20
"""How far `lapses` counts."""
HANDED_OVER = "1 minute"
"""A CronTask made anew with the same times takes over the slots of so long before it, so that none falls between the two."""
_MOST_SUPERSEDED = 50
"""How many edits of a CronTask's times are remembered while nobody decides its slots."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One generation of a CronTask. `spec` is JSON: the CronTask's spec and its `name`. Slots up to `slots_from` are not its own, but those
    of the times that held before: read from the table, `spec` has them as `superseded` until their slots are decided.
    """

    uid: UUID
    generation: int
    spec: str
    slots_from: datetime


@dataclass(frozen=True, slots=True)
class Stored:
    """A schedule as the table has it."""

    schedule: Schedule
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True)
class Locked:
    """A schedule whose row this transaction holds. No slot up to `decided_through` is to be decided; `now` is Postgres' clock."""

    schedule: Schedule
    decided_through: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True)
class TaskState:
    """What has come of a CronTask.

    `next_slot` is None as long as no scheduler has looked at this generation. `last_success` is the end of the newest slot's run
    that succeeded. `active` are unfinished runs, oldest first, at most ACTIVE_SHOWN. `recent` are the newest slots, newest first, at most
    RECENT_SHOWN; the last slot is the first of them.
    """

    uid: UUID
    generation: int
    next_slot: datetime | None
    last_slot: datetime | None
    last_outcome: SlotOutcome | None
    last_success: datetime | None
    active: tuple[UUID, ...]
    recent: tuple[tuple[datetime, SlotOutcome], ...] = ()


@dataclass(frozen=True, slots=True)
class Lapse:
    """How many slots of a CronTask that are decided came after its newest success had ended, at most MOST_COUNTED.

    Only slots of the present times count, and none that was skipped because of a suspension. Those after `counted_through` are not
    counted yet; `now` is Postgres' clock.
    """

    name: str
    spec: str
    decided: int
    counted_through: datetime
    now: datetime


# Deletions first: they wait for a scheduler that is just deciding, so that what it decided is seen by the statement after this one.
_DELETE = "UPDATE cron_tasks SET deleted_at = now() WHERE deleted_at IS NULL AND NOT uid = ANY ($1)"

_OTHER_TIMES = """(
            known.spec -> 'schedule' IS DISTINCT FROM excluded.spec -> 'schedule'
            OR known.spec -> 'timeZone' IS DISTINCT FROM excluded.spec -> 'timeZone'
            OR known.spec -> 'suspend' IS DISTINCT FROM excluded.spec -> 'suspend')"""

_UPSERT = f"""
INSERT INTO cron_tasks AS known (uid, generation, spec, slots_from)
SELECT uid, generation, spec, greatest(decided, CASE
    WHEN same_since IS NULL THEN least(slots_from, now())
    ELSE greatest(same_since, least(slots_from, now()) - interval '{HANDED_OVER}') END)
FROM (
    SELECT new.*, max(p.decided_through) AS decided, max(p.slots_from) FILTER (
        WHERE p.deleted_at > new.slots_from - interval '{HANDED_OVER}'
        AND p.spec -> 'schedule' = new.spec -> 'schedule' AND p.spec -> 'timeZone' IS NOT DISTINCT FROM new.spec -> 'timeZone'
        AND p.spec -> 'suspend' IS DISTINCT FROM 'true'::jsonb AND NOT EXISTS (SELECT FROM cron_tasks t WHERE t.uid = new.uid)
        ) AS same_since
    FROM unnest($1::uuid[], $2::bigint[], $3::jsonb[], $4::timestamptz[]) AS new (uid, generation, spec, slots_from)
    LEFT JOIN cron_tasks p ON p.spec ->> 'name' = new.spec ->> 'name' AND p.uid <> new.uid
    GROUP BY new.uid, new.generation, new.spec, new.slots_from) seen
ORDER BY uid
ON CONFLICT (uid) DO UPDATE SET
    slots_from = CASE WHEN known.generation < excluded.generation AND (
            known.deleted_at IS NOT NULL OR {_OTHER_TIMES})
        THEN excluded.slots_from ELSE known.slots_from END,
    generation = excluded.generation,
    spec = excluded.spec || CASE
        WHEN known.deleted_at IS NULL AND {_OTHER_TIMES} THEN jsonb_build_object('superseded',
            CASE WHEN jsonb_array_length(known.spec -> 'superseded') >= {_MOST_SUPERSEDED} THEN (known.spec -> 'superseded') - 0
                 ELSE coalesce(known.spec -> 'superseded', '[]') END
            || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
                'schedule', known.spec -> 'schedule', 'timeZone', known.spec -> 'timeZone', 'suspend', known.spec -> 'suspend',
                'after', known.slots_from, 'until', excluded.slots_from))))
        WHEN known.deleted_at IS NULL AND known.spec ? 'superseded'
            THEN jsonb_build_object('superseded', known.spec -> 'superseded')
        ELSE '{{}}' END,
    deleted_at = NULL
WHERE known.generation < excluded.generation
   OR (known.generation = excluded.generation AND known.deleted_at IS NOT NULL)
"""
# An older generation never replaces a newer one, so a writer that is late changes nothing. One that was marked as deleted and is there
# after all goes on from its own slots_from. An edit that leaves the times as they are drops none of them; another one leaves those of
# before to be decided, which is what `superseded` is for. A CronTask made anew under the same name does not decide again what its
# predecessor decided, and decides what came just before it, which the predecessor did not live to see. Nobody's clock but Postgres' puts
# slots off.


async def replace(conn: Connection, schedules: Sequence[Schedule], *, keep: Collection[UUID] = ()) -> None:
    """Makes these the schedules: newer generations are stored, all others are marked as deleted, except `keep`, which stay as they are.

    One transaction. Rows stay, since slots refer to them. Raises StoreUnavailable.
    """
    with unavailable():
        async with conn.transaction():
            await conn.execute(_DELETE, [*(one.uid for one in schedules), *keep])
            if schedules:
                await conn.execute(
                    _UPSERT,
                    [one.uid for one in schedules],
                    [one.generation for one in schedules],
                    [one.spec for one in schedules],
                    [one.slots_from for one in schedules],
                )


async def all_of(conn: Executor) -> list[Stored]:
    """All schedules as they were written, deleted ones included. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT uid, generation, spec - 'superseded', slots_from, deleted_at FROM cron_tasks ORDER BY uid"
        )
    return [Stored(Schedule(row[0], row[1], row[2], row[3]), row[4]) for row in rows]


async def count_live(conn: Executor) -> int:
    """How many schedules are not deleted. Raises StoreUnavailable."""
    with unavailable():
        return int(await conn.fetchval("SELECT count(*) FROM cron_tasks WHERE deleted_at IS NULL"))


async def due(conn: Executor, *, ahead: timedelta, whatever: bool = False) -> list[UUID]:
    """The schedules with something to decide `ahead` of now, by their next slot; `whatever`: all of them. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT uid FROM cron_tasks WHERE deleted_at IS NULL
               AND ($2 OR next_slot <= now() + $1 OR decided_generation IS DISTINCT FROM generation)
               ORDER BY next_slot NULLS FIRST, uid""",
            ahead,
            whatever,
        )
    return [row["uid"] for row in rows]


async def lock(conn: Connection, uid: UUID) -> Locked | None:
    """Takes the row of a schedule until the transaction ends. None: it is deleted, or another scheduler has it and does the work.

    Raises StoreUnavailable.
    """
    with unavailable():
        await conn.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{HOLD_SECONDS}s'")
        row = await conn.fetchrow(
            """SELECT uid, generation, spec, slots_from, decided_through, now() FROM cron_tasks
               WHERE uid = $1 AND deleted_at IS NULL FOR NO KEY UPDATE SKIP LOCKED""",
            uid,
        )
    return Locked(Schedule(*row[:4]), row[4], row[5]) if row else None


async def lock_named(conn: Connection, name: str) -> Locked | None:
    """Takes the row of the CronTask that has this name now; waits for a scheduler that has it. None: there is none.

    Raises StoreUnavailable.
    """
    with unavailable():
        await conn.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{HOLD_SECONDS}s'")
        row = await conn.fetchrow(
            """SELECT uid, generation, spec, slots_from, decided_through, clock_timestamp() FROM cron_tasks
               WHERE spec ->> 'name' = $1 AND deleted_at IS NULL FOR NO KEY UPDATE""",
            name,
        )
    return Locked(Schedule(*row[:4]), row[4], row[5]) if row else None


async def uids_of(conn: Executor, name: str) -> list[UUID]:
    """The CronTask of this name and its predecessors. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT uid FROM cron_tasks WHERE spec ->> 'name' = $1 ORDER BY uid", name)
    return [row["uid"] for row in rows]


async def named(conn: Executor, *, name: str | None = None, after: str | None = None, limit: int = 1) -> list[Schedule]:
    """The schedules that are not deleted, by name: the one called `name`, or those after a name. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT uid, generation, spec, slots_from FROM cron_tasks WHERE deleted_at IS NULL
               AND ($1::text IS NULL OR spec ->> 'name' = $1) AND ($2::text IS NULL OR (spec ->> 'name') COLLATE "C" > $2)
               ORDER BY (spec ->> 'name') COLLATE "C" LIMIT $3""",
            name,
            after,
            limit,
        )
    return [Schedule(row[0], row[1], row[2], row[3]) for row in rows]


async def note(
    conn: Executor, locked: Locked, *, decided_through: datetime | None, next_slot: datetime | None, settled: bool = True
) -> None:
    """Notes how far a locked schedule is decided, and when there is something to decide again. `settled`: also all of `superseded` is.

    Raises StoreUnavailable.
    """
    with unavailable():
        await conn.execute(
            """UPDATE cron_tasks SET decided_through = greatest(decided_through, $3), decided_generation = $2, next_slot = $4,
                      spec = CASE WHEN $5 THEN spec - 'superseded' ELSE spec END
               WHERE uid = $1 AND (decided_through < $3 OR (decided_through IS NULL AND $3::timestamptz IS NOT NULL)
                                   OR decided_generation IS DISTINCT FROM $2 OR next_slot IS DISTINCT FROM $4
                                   OR ($5 AND spec ? 'superseded'))""",
            locked.schedule.uid,
            locked.schedule.generation,
            decided_through,
            next_slot,
            settled,
        )


async def states(conn: Executor, only: Collection[UUID] | None = None) -> list[TaskState]:
    """What has come of each schedule that is not deleted, or of some. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT t.uid, t.generation, CASE WHEN t.decided_generation = t.generation THEN t.next_slot END, l.slots, l.outcomes,
                      (SELECT r.finished_at FROM slots s JOIN runs r ON r.id = s.run_id
                       WHERE s.task = t.uid AND r.status = 'succeeded' ORDER BY s.slot DESC LIMIT 1),
                      ARRAY (SELECT a.id FROM runs a WHERE a.cron_task = t.uid AND a.status IN ('pending', 'running')
                             ORDER BY a.id LIMIT $1)
               FROM cron_tasks t
               CROSS JOIN LATERAL (
                   SELECT array_agg(n.slot ORDER BY n.slot DESC) AS slots, array_agg(n.outcome ORDER BY n.slot DESC) AS outcomes FROM (
                       SELECT s.slot, CASE WHEN r.status = 'failed' THEN 'failed' ELSE s.outcome END AS outcome
                       FROM slots s LEFT JOIN runs r ON r.id = s.run_id WHERE s.task = t.uid ORDER BY s.slot DESC LIMIT $3) n) l
               WHERE t.deleted_at IS NULL AND ($2::uuid[] IS NULL OR t.uid = ANY ($2))""",
            ACTIVE_SHOWN,
            None if only is None else list(only),
            RECENT_SHOWN,
        )
    return [_state(row) for row in rows]


def _state(row: asyncpg.Record) -> TaskState:
    recent = tuple((slot, SlotOutcome(outcome)) for slot, outcome in zip(row[3] or (), row[4] or (), strict=True))
    last_slot, last_outcome = recent[0] if recent else (None, None)
    return TaskState(row[0], row[1], row[2], last_slot, last_outcome, row[5], tuple(row[6]), recent)


async def lapses(conn: Executor) -> list[Lapse]:
    """Of each schedule that is neither deleted nor suspended. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT t.spec ->> 'name', t.spec, (
                   SELECT count(*) FROM (
                       SELECT FROM slots s WHERE s.task = t.uid AND s.slot > greatest(t.slots_from, newest.success)
                       AND s.outcome <> 'skipped_suspended' LIMIT $1) since),
                   greatest(t.slots_from, t.decided_through, newest.success), now()
               FROM cron_tasks t LEFT JOIN LATERAL (
                   SELECT r.finished_at AS success FROM slots s JOIN runs r ON r.id = s.run_id
                   WHERE s.task = t.uid AND r.status = 'succeeded' ORDER BY s.slot DESC LIMIT 1) newest ON true
               WHERE t.deleted_at IS NULL AND t.spec -> 'suspend' IS DISTINCT FROM 'true'::jsonb ORDER BY t.uid""",
            MOST_COUNTED,
        )
    return [Lapse(row[0], row[1], row[2], row[3], row[4]) for row in rows]
