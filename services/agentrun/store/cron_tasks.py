"""The schedules of an AgentRun, as the cluster's CronTasks say it. Written by the operator, read by the scheduler."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.store.pool import Connection, Executor, unavailable


@dataclass(frozen=True, slots=True)
class Schedule:
    """One generation of a CronTask. `spec` is JSON: the CronTask's spec and its `name`. Slots before `slots_from` are the
    generation's before it, or nobody's.
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


_UPSERT = """
INSERT INTO cron_tasks AS known (uid, generation, spec, slots_from)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::jsonb[], $4::timestamptz[]) AS new (uid, generation, spec, slots_from) ORDER BY uid
ON CONFLICT (uid) DO UPDATE SET
    slots_from = CASE WHEN known.generation < excluded.generation THEN excluded.slots_from ELSE known.slots_from END,
    generation = excluded.generation,
    spec = excluded.spec,
    deleted_at = NULL
WHERE known.generation < excluded.generation
   OR (known.generation = excluded.generation AND known.deleted_at IS NOT NULL)
"""
# An older generation never replaces a newer one, so a writer that is late changes nothing. One that was marked as deleted and is there
# after all goes on from its own slots_from.

_DELETE = "UPDATE cron_tasks SET deleted_at = now() WHERE deleted_at IS NULL AND NOT uid = ANY ($1)"


async def replace(conn: Connection, schedules: Sequence[Schedule], *, keep: Collection[UUID] = ()) -> None:
    """Makes these the schedules: newer generations are stored, all others are marked as deleted, except `keep`, which stay as they are.

    One transaction. Rows stay, since slots refer to them. Raises StoreUnavailable.
    """
    with unavailable():
        async with conn.transaction():
            if schedules:
                await conn.execute(
                    _UPSERT,
                    [one.uid for one in schedules],
                    [one.generation for one in schedules],
                    [one.spec for one in schedules],
                    [one.slots_from for one in schedules],
                )
            await conn.execute(_DELETE, [*(one.uid for one in schedules), *keep])


async def all_of(conn: Executor) -> list[Stored]:
    """All schedules, deleted ones included. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT uid, generation, spec, slots_from, deleted_at FROM cron_tasks ORDER BY uid")
    return [Stored(Schedule(row[0], row[1], row[2], row[3]), row[4]) for row in rows]


async def count_live(conn: Executor) -> int:
    """How many schedules are not deleted. Raises StoreUnavailable."""
    with unavailable():
        return int(await conn.fetchval("SELECT count(*) FROM cron_tasks WHERE deleted_at IS NULL"))
