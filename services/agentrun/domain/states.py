"""The states of a run and of an attempt, and the one table of allowed transitions.

The same table is enforced in Postgres by the trigger `runs_guard` (store/migrations/0001_tables.sql); a test compares the two.
"""

from enum import StrEnum


class RunStatus(StrEnum):
    """Where a run stands. The last four are final: nothing moves a run out of them."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


class Outcome(StrEnum):
    """How an attempt stands: `running` until exactly one statement ends it.

    finished: it wrote the run's end itself. retrying: a retryable error, its own act. lost: its lease expired and a reaper took the
    run. handed_back: a draining worker gave it back. interrupted: the run was cancelled or superseded under it.
    """

    RUNNING = "running"
    FINISHED = "finished"
    RETRYING = "retrying"
    LOST = "lost"
    HANDED_BACK = "handed_back"
    INTERRUPTED = "interrupted"


FINAL = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.SUPERSEDED})
UNFINISHED = frozenset(RunStatus) - FINAL

TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.PENDING: frozenset({RunStatus.RUNNING, RunStatus.CANCELLED, RunStatus.SUPERSEDED}),
    RunStatus.RUNNING: frozenset(
        {RunStatus.PENDING, RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.SUPERSEDED}
    ),
    RunStatus.SUCCEEDED: frozenset(),
    RunStatus.FAILED: frozenset(),
    RunStatus.CANCELLED: frozenset(),
    RunStatus.SUPERSEDED: frozenset(),
}


def may_move(old: RunStatus, new: RunStatus) -> bool:
    """Whether a run may go from `old` to `new`."""
    return new in TRANSITIONS[old]
