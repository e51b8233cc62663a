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


async def expired(conn: Executor, *, limit: int = 100) -> list[AttemptRef]:
    """Attempts that are running past their lease, longest first. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT run_id, epoch FROM attempts WHERE outcome = 'running' AND lease_expires_at < now()
               ORDER BY lease_expires_at LIMIT $1""",
            limit,
        )
    return [AttemptRef(*row) for row in rows]


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


async def postmaster_started(conn: Executor) -> datetime:
    """Since when Postgres runs. Raises StoreUnavailable."""
    return (await clock(conn)).started
