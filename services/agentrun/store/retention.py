"""Old rows go, in bounded batches; the statements are in retention.sql. All may be repeated, and run side by side."""

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from agentrun.store.pool import Executor, unavailable


@dataclass(frozen=True, slots=True)
class Archived:
    """What one batch did: events removed, runs of which nothing more is to be removed."""

    events: int
    runs: int


@dataclass(frozen=True, slots=True)
class Place:
    """How far a pass over old runs has come: the end and the id of the last run that it has done with."""

    ended: datetime
    run_id: UUID


BEGINNING = Place(datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))


@dataclass(frozen=True, slots=True)
class Deleted:
    """What one batch did; `place` is None at the end of the pass."""

    runs: int
    place: Place | None


async def archive(conn: Executor, *, age_seconds: float, runs: int, events: int) -> Archived:
    """Thins out the events of runs that ended `age_seconds` ago: at most so many events of so many runs, and no more runs than had so many
    events in all, but at least one. Nothing is left to do if both numbers of the answer are 0. Raises StoreUnavailable.
    """
    with unavailable():
        row = await conn.fetchrow("SELECT * FROM agentrun_1.archive($1, $2, $3)", float(age_seconds), runs, events)
    assert row is not None
    return Archived(row["removed"], row["archived"])


async def delete_runs(conn: Executor, *, age_seconds: float, after: Place, runs: int) -> Deleted:
    """Deletes what may go among the next `runs` archived runs after a place that ended `age_seconds` ago. No more runs than had 10,000
    events in all are looked at, but at least one; a run that still has more loses its first 10,000. Raises StoreUnavailable.
    """
    with unavailable():
        row = await conn.fetchrow(
            "SELECT * FROM agentrun_1.delete_runs($1, $2, $3, $4)", float(age_seconds), after.ended, after.run_id, runs
        )
    assert row is not None
    return Deleted(row["deleted"], Place(row["ended"], row["run"]) if row["seen"] == runs else None)


async def delete_slots(conn: Executor, *, age_seconds: float, rows: int) -> int:
    """Deletes at most `rows` slots of CronTasks that were deleted `age_seconds` ago; how many. Raises StoreUnavailable."""
    with unavailable():
        return int(await conn.fetchval("SELECT agentrun_1.delete_slots($1, $2)", float(age_seconds), rows))


async def delete_ledger(conn: Executor, *, age_seconds: float, rows: int) -> int:
    """Deletes at most `rows` calls that were booked `age_seconds` ago; how many. Raises StoreUnavailable."""
    with unavailable():
        return int(await conn.fetchval("SELECT agentrun_1.delete_ledger($1, $2)", float(age_seconds), rows))
