"""Submissions to sessions that may be busy; the statements are in submissions.sql. Together with store/transitions.py the only code that
moves a run. May be called again after StoreUnavailable: a row that the first call made is found by its id and answered as new.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store.budgets import Budget, Refused
from agentrun.store.pool import Executor, unavailable
from agentrun.store.transitions import (
    Submission,
    Submitted,
    TakenOver,
    closing_events,
    submission_columns,
    submission_row,
    submitted,
)

_GROUP = "SELECT * FROM agentrun_1.submit_group($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
_ONE = "SELECT * FROM agentrun_1.follow_up($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)"


@dataclass(frozen=True, slots=True)
class FollowedUp:
    """What became of one message. `rejected`: nothing was stored, `run` is the unfinished run in its way. `superseded`: the run whose
    inputs the new run holds; its `events` are to be sent to its readers, and its `owner`, if any, is to be told.
    """

    run: Submitted
    rejected: bool
    superseded: TakenOver | None


async def submit(
    conn: Executor, group: Sequence[Submission], policy: Policy, budget: Budget | None = None
) -> list[Submitted | Refused | None]:
    """Stores new submissions and finds the runs of repeated ones, in the order asked. None: the row has left the group, since its session
    is busy; `follow_up` decides it. Refused: a new run does not fit into `budget`; nothing of it is stored. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(_GROUP, *submission_columns(group), policy.value, budget and budget.encoded())
    return [_refused(row) or (None if row["run_id"] is None else submitted(row)) for row in rows]


async def follow_up(
    conn: Executor, item: Submission, policy: Policy, *, window_seconds: float, budget: Budget | None = None
) -> FollowedUp | Refused:
    """Decides one message under its session's lock, in a transaction of its own. Refused: the new run does not fit into `budget`, also with
    what a merged run gives back; nothing has changed. Raises StoreUnavailable.
    """
    with unavailable():
        row = await conn.fetchrow(_ONE, *submission_row(item), policy.value, float(window_seconds), budget and budget.encoded())
    assert row is not None
    if (refused := _refused(row)) is not None:
        return refused
    return FollowedUp(submitted(row), row["rejected"], _superseded(row["superseded"], row) if row["superseded"] else None)


def _refused(row: asyncpg.Record) -> Refused | None:
    return Refused(row["refused"], row["wait"]) if row["refused"] else None


def _superseded(run_id: UUID, row: asyncpg.Record) -> TakenOver:
    return TakenOver(run_id, True, RunStatus.SUPERSEDED, row["epoch"], row["owner"], None, closing_events(row))
