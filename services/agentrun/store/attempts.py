"""Reading attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.domain.states import Outcome
from agentrun.store.pool import Executor, unavailable
from agentrun.store.transitions import AttemptRef


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One try at a run."""

    epoch: int
    owner: str
    outcome: Outcome
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Clock:
    """Postgres' time, and since when it runs."""

    now: datetime
    started: datetime


@dataclass(frozen=True, slots=True)
class Expired:
    """Attempts that are running past their lease at `clock.now`, longest first."""

    clock: Clock
    refs: list[AttemptRef]


async def expired(conn: Executor, *, limit: int = 100) -> Expired:
    """The time and what is past its lease at it, in one statement: between two, time may pass. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT now(), pg_postmaster_start_time(), a.run_id, a.epoch FROM (SELECT) AS once LEFT JOIN (
                   SELECT run_id, epoch, lease_expires_at FROM attempts WHERE outcome = 'running' AND lease_expires_at < now()
                   ORDER BY lease_expires_at LIMIT $1
               ) AS a ON true ORDER BY a.lease_expires_at""",
            limit,
        )
    return Expired(Clock(rows[0][0], rows[0][1]), [AttemptRef(row[2], row[3]) for row in rows if row[2] is not None])


async def of_run(conn: Executor, run_id: UUID) -> Sequence[AttemptRow]:
    """All attempts of a run, first one first. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT epoch, owner, outcome, started_at, ended_at FROM attempts WHERE run_id = $1 ORDER BY epoch", run_id
        )
    return [AttemptRow(row[0], row[1], Outcome(row[2]), row[3], row[4]) for row in rows]


async def clock(conn: Executor) -> Clock:
    """Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow("SELECT now(), pg_postmaster_start_time()")
    assert row is not None
    return Clock(row[0], row[1])
