"""Dead letters: runs that were put aside with what is known of them, until a person redrives or discards them. The statement that makes a
new run is in dead_letters.sql.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from agentrun.domain.states import RunStatus
from agentrun.store.budgets import Budget, Refused
from agentrun.store.pool import Executor, unavailable


class LetterState(StrEnum):
    """What was decided about a dead letter."""

    OPEN = "open"
    REDRIVEN = "redriven"
    DISCARDED = "discarded"


_STATES = {
    None: "true",
    LetterState.OPEN: "d.redriven_run_id IS NULL AND d.discarded_at IS NULL",
    LetterState.REDRIVEN: "d.redriven_run_id IS NOT NULL",
    LetterState.DISCARDED: "d.discarded_at IS NOT NULL",
}


@dataclass(frozen=True, slots=True)
class Letter:
    """A run that was put aside. `payload` (the body of the submission) and `last_error` (of its last attempt that could say so) are JSON
    text; `attempts` is how many it had.
    """

    run_id: UUID
    user_id: str
    session_id: UUID
    external_id: str
    payload: str
    reason: str
    last_error: str | None
    attempts: int
    created_at: datetime
    redriven_run_id: UUID | None
    redriven_at: datetime | None
    discarded_at: datetime | None

    @property
    def state(self) -> LetterState:
        """What was decided about it."""
        if self.redriven_run_id is not None:
            return LetterState.REDRIVEN
        return LetterState.OPEN if self.discarded_at is None else LetterState.DISCARDED


@dataclass(frozen=True, slots=True)
class Redriven:
    """The run that does a dead letter's work again; `replayed` if an earlier redrive made it. `discarded`: nothing was stored."""

    run_id: UUID
    session_id: UUID
    external_id: str
    status: RunStatus
    replayed: bool
    is_head: bool
    discarded: bool


_LETTER = """SELECT d.run_id, r.user_id, r.session_id, s.external_id, d.payload, d.reason, d.last_error, d.attempts, d.created_at,
    d.redriven_run_id, d.redriven_at, d.discarded_at
    FROM dead_letters d JOIN runs r ON r.id = d.run_id JOIN sessions s ON s.id = r.session_id"""


async def count_open(conn: Executor) -> int:
    """How many runs were put aside and neither redriven nor discarded. Raises StoreUnavailable."""
    with unavailable():
        # The operator asks databases of older versions too: where the table has no such column, the name means the one around it.
        return int(
            await conn.fetchval(
                """SELECT count(*) FROM (SELECT NULL::timestamptz AS discarded_at) older CROSS JOIN LATERAL (
                       SELECT 1 FROM dead_letters WHERE redriven_run_id IS NULL AND discarded_at IS NULL) letters"""
            )
        )


async def list_letters(
    conn: Executor,
    *,
    agent: str,
    user_id: str | None,
    state: LetterState | None = LetterState.OPEN,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Letter]:
    """Those of the newest runs first, ids below `before`; `user_id` None means all users, `state` None all. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            f"""{_LETTER} WHERE r.agent = $1 AND ($2::text IS NULL OR r.user_id = $2) AND {_STATES[state]}
                AND ($3::uuid IS NULL OR d.run_id < $3) ORDER BY d.run_id DESC LIMIT $4""",
            agent,
            user_id,
            before,
            limit,
        )
    return [Letter(*row) for row in rows]


async def get(conn: Executor, run_id: UUID, *, agent: str) -> Letter | None:
    """The dead letter of a run of this agent, or None. Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(f"{_LETTER} WHERE d.run_id = $1 AND r.agent = $2", run_id, agent)
    return Letter(*row) if row else None


async def redrive(
    conn: Executor, letter: UUID, *, run_id: UUID, inputs: Sequence[UUID], budget: Budget | None = None
) -> Redriven | Refused | None:
    """Makes the one run that does the work again, with the given ids, or finds it; None: there is no such dead letter.

    Refused: a new run does not fit into `budget`, and nothing is stored. `inputs` are as many new ids as the dead run holds inputs. May be
    called again with the same ids after StoreUnavailable.
    """
    with unavailable():
        row = await conn.fetchrow(
            "SELECT * FROM agentrun_1.redrive($1, $2, $3, $4)", letter, run_id, sorted(inputs), budget and budget.encoded()
        )
    if row is None:
        return None
    if row["refused"]:
        return Refused(row["refused"], row["wait"])
    return Redriven(
        row["run_id"],
        row["session_id"],
        row["external_id"],
        RunStatus(row["status"]),
        not row["inserted"],
        row["is_head"],
        row["discarded"],
    )


async def discard(conn: Executor, run_id: UUID) -> bool:
    """Closes a dead letter for good; whether it is closed so, now or before: not one that was redriven. Raises StoreUnavailable."""
    with unavailable():
        return bool(
            await conn.fetchval(
                """UPDATE dead_letters SET discarded_at = coalesce(discarded_at, clock_timestamp())
                   WHERE run_id = $1 AND redriven_run_id IS NULL RETURNING true""",
                run_id,
            )
        )
