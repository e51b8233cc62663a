"""The slots of CronTasks: what became of each, and the run that it started. Written in the transaction that holds the task's row."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.domain.slots import SlotOutcome
from agentrun.domain.states import RunStatus
from agentrun.store.pool import Executor, unavailable

FEWEST = 5
"""So many slots are remembered at least: an alert counts those without success."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A decided slot. `detail` says why it was skipped or what failed, `run_status` where its run stands by now."""

    slot: datetime
    outcome: SlotOutcome
    detail: str | None = None
    run_id: UUID | None = None
    run_status: RunStatus | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The run of a slot; it is not due before `not_before`, None: at once."""

    slot: datetime
    run_id: UUID
    not_before: datetime | None


async def unfinished(conn: Executor, task: UUID) -> list[UUID]:
    """The runs of a CronTask that have not ended, by id. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT id FROM runs WHERE cron_task = $1 AND status IN ('pending', 'running') ORDER BY id", task)
    return [row["id"] for row in rows]


async def record(conn: Executor, task: UUID, decided: Sequence[Slot]) -> set[datetime]:
    """Stores what became of slots; which of them are new: the others were somebody else's. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """INSERT INTO slots (task, slot, outcome, detail)
               SELECT $1, n.slot, n.outcome, n.detail FROM unnest($2::timestamptz[], $3::text[], $4::text[]) AS n (slot, outcome, detail)
               ORDER BY n.slot ON CONFLICT DO NOTHING RETURNING slot""",
            task,
            [one.slot for one in decided],
            [one.outcome.value for one in decided],
            [one.detail for one in decided],
        )
    return {row["slot"] for row in rows}


async def link(conn: Executor, task: UUID, started: Sequence[Started]) -> None:
    """Binds the runs that this transaction has submitted to their slots. Raises StoreUnavailable."""
    columns = ([one.slot for one in started], [one.run_id for one in started], [one.not_before for one in started])
    with unavailable():
        await conn.execute(
            """WITH n AS (SELECT * FROM unnest($2::timestamptz[], $3::uuid[]) AS t (slot, run_id)), bound AS (
                   UPDATE slots s SET run_id = n.run_id FROM n WHERE s.task = $1 AND s.slot = n.slot)
               UPDATE runs r SET cron_task = $1, slot = n.slot, not_before = coalesce(r.not_before, d.not_before)
               FROM n JOIN unnest($3::uuid[], $4::timestamptz[]) AS d (run_id, not_before) USING (run_id)
               WHERE r.id = n.run_id AND r.cron_task IS NULL""",
            task,
            *columns,
        )


async def adopt(conn: Executor, task: UUID, run_ids: Sequence[UUID]) -> None:
    """Makes submitted runs a CronTask's own, though they are of no slot. Raises StoreUnavailable."""
    with unavailable():
        await conn.execute("UPDATE runs SET cron_task = $1 WHERE id = ANY ($2) AND cron_task IS NULL", task, list(run_ids))


async def backfill(conn: Executor, task: UUID, wanted: Sequence[datetime]) -> None:
    """Says of slots that their runs are made up for, whatever was said before. Raises StoreUnavailable."""
    with unavailable():
        await conn.execute(
            """INSERT INTO slots (task, slot, outcome, detail) SELECT $1, n.slot, $3, $4 FROM unnest($2::timestamptz[]) AS n (slot)
               ORDER BY n.slot ON CONFLICT (task, slot) DO UPDATE SET outcome = excluded.outcome, detail = excluded.detail""",
            task,
            list(wanted),
            SlotOutcome.LATE.value,
            "backfilled",
        )


async def fail(
    conn: Executor, task: UUID, failed: Sequence[datetime], detail: str, outcome: SlotOutcome = SlotOutcome.FAILED
) -> None:
    """Says of slots that their runs were not stored, and why. Raises StoreUnavailable."""
    with unavailable():
        await conn.execute(
            "UPDATE slots SET outcome = $3, detail = $4 WHERE task = $1 AND slot = ANY ($2)",
            task,
            list(failed),
            outcome.value,
            detail,
        )


async def prune(conn: Executor, task: UUID, *, keep: int) -> None:
    """Forgets all but the newest `keep` slots of a CronTask, or FEWEST; their runs stay. Raises StoreUnavailable."""
    with unavailable():
        await conn.execute(
            """DELETE FROM slots WHERE task = $1
               AND slot <= (SELECT slot FROM slots WHERE task = $1 ORDER BY slot DESC OFFSET $2 LIMIT 1)""",
            task,
            max(keep, FEWEST),
        )


async def history(conn: Executor, task: UUID, *, limit: int = 100, before: datetime | None = None) -> list[Slot]:
    """The newest slots of a CronTask (that are older than `before`), newest first. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT s.slot, s.outcome, s.detail, s.run_id, r.status FROM slots s LEFT JOIN runs r ON r.id = s.run_id
               WHERE s.task = $1 AND ($3::timestamptz IS NULL OR s.slot < $3) ORDER BY s.slot DESC LIMIT $2""",
            task,
            limit,
            before,
        )
    return [Slot(row[0], SlotOutcome(row[1]), row[2], row[3], RunStatus(row[4]) if row[4] else None) for row in rows]
