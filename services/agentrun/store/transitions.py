"""The only code that moves a run, with store/follow_ups.py; the statements are in transitions.sql and submissions.sql. Each call takes a
batch; a single one is a batch of one.

Every function may be called again with the same arguments after StoreUnavailable: what was done the first time is read back and
answered as done, not done twice. A group that holds one bad member fails as a whole and changes nothing; callers split it
(store/group.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import asyncpg
import msgspec

from agentrun.domain.events import Event, Kind
from agentrun.domain.states import RunStatus
from agentrun.store.budgets import Budget
from agentrun.store.pool import Executor, unavailable

RESERVE = 128
"""Event numbers reserved at a time: so many may go out before the next flush has committed."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One message for a session, with the ids that its rows will have if it is new."""

    run_id: UUID
    session_id: UUID
    input_id: UUID
    agent: str
    user_id: str
    external_id: str
    session_given: str
    idempotency_key: str
    client_key: str | None
    body_hash: str
    body: str
    content: str


@dataclass(frozen=True, slots=True)
class Submitted:
    """The run that answers a submission: the new one, or the one that was there (`replayed`).

    `reused` means that the client's key belongs to a run with another body: nothing was stored.
    """

    run_id: UUID
    session_id: UUID
    status: RunStatus
    replayed: bool
    reused: bool
    is_head: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A wish to own a pending run: at the epoch that was seen, as an owner made once per delivered entry."""

    run_id: UUID
    seen_epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run that is mine now."""

    run_id: UUID
    epoch: int
    owner: str
    agent: str
    user_id: str
    session_id: UUID
    session_position: int
    seq_reserved: int
    top: int
    checkpoint: str | None
    checkpoint_seq: int
    retries: int


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """One attempt: a run and its epoch."""

    run_id: UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One model call of an attempt, priced: `cost_usd` is None where no price is known."""

    call: int
    model: str
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    audio_input_tokens: int
    audio_output_tokens: int
    cost_usd: Decimal | None
    price_id: str | None
    unmeasured: bool
    provider: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state from which the next attempt can go on, and the seq of the last event that belongs to it."""

    seq: int
    state: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Events of one attempt, the numbers it may give out from now on, and what was spent."""

    run_id: UUID
    epoch: int
    reserve_through: int
    events: Sequence[Event] = ()
    ledger: Sequence[LedgerRow] = ()
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a run by its own attempt; `events` are the last ones, the terminal event included."""

    run_id: UUID
    epoch: int
    status: RunStatus
    result: str | None = None
    error: str | None = None
    events: Sequence[Event] = ()
    ledger: Sequence[LedgerRow] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Whether the attempt still held its run, and the session's next run to publish."""

    run_id: UUID
    epoch: int
    ok: bool
    next_head: UUID | None


class Reason(StrEnum):
    """Why a run is taken from its attempt."""

    LOST = "lost"
    HANDED_BACK = "handed_back"
    RETRYING = "retrying"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A run to take from its attempt.

    `epoch` is the one that was seen, None for whichever (cancel). An attempt that gives back its own run (HANDED_BACK, RETRYING)
    brings its unstored `events` and `last_seq`, the highest number that it gave out. `retry_after` is in seconds.
    """

    run_id: UUID
    reason: Reason
    epoch: int | None = None
    last_seq: int | None = None
    retry_after: float = 0.0
    error: str | None = None
    by: UUID | None = None
    events: Sequence[Event] = ()
    ledger: Sequence[LedgerRow] = ()


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What became of the run. `events` are to be sent to its readers; `owner` is whose attempt it was."""

    run_id: UUID
    ok: bool
    status: RunStatus | None
    epoch: int
    owner: str | None
    next_head: UUID | None
    events: list[Event] = field(default_factory=list)


async def submit(conn: Executor, group: Sequence[Submission]) -> list[Submitted]:
    """Stores new submissions and finds the runs of repeated ones, in the order asked: each the next run of its session, as with the
    policy Enqueue. Others are in store/follow_ups.py. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.submit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)", *submission_columns(group)
        )
    return [submitted(row) for row in rows]


def submission_columns(group: Sequence[Submission]) -> list[list[object]]:
    """The arguments of the functions that submit a group, in their order."""
    return [list(column) for column in zip(*(submission_row(item) for item in group), strict=True)]


def submitted(row: asyncpg.Record) -> Submitted:
    """What one of these functions answers for a submission."""
    return Submitted(
        row["run_id"], row["session_id"], RunStatus(row["status"]), not row["inserted"], row["reused"], row["is_head"]
    )


def submission_row(item: Submission) -> tuple[object, ...]:
    """The same for one."""
    return (
        item.run_id,
        item.session_id,
        item.input_id,
        item.agent,
        item.user_id,
        item.external_id,
        item.session_given,
        item.idempotency_key,
        item.client_key,
        item.body_hash,
        item.body,
        item.content,
    )


async def hold_sessions(conn: Executor, group: Sequence[Submission], run_ids: Sequence[UUID]) -> None:
    """Locks the sessions of submissions and of runs that are to be taken over, for a transaction that does both: without it the second
    would lock sessions after the first has locked the counters of budgets. Raises StoreUnavailable.
    """
    columns = [[item.session_id, item.agent, item.user_id, item.external_id] for item in group]
    with unavailable():
        await conn.execute(
            "SELECT agentrun_1.hold_sessions($1, $2, $3, $4, $5)",
            *(list(column) for column in zip(*columns, strict=True)),
            list(run_ids),
        )


async def hold_replaced(conn: Executor, run_ids: Sequence[UUID], user: str, budget: Budget) -> None:
    """Locks runs that are to be taken over for new ones of a user, and the counters of budgets of both. The caller holds their sessions.

    Raises StoreUnavailable.
    """
    with unavailable():
        await conn.execute("SELECT agentrun_1.hold_replaced($1, $2, $3)", list(run_ids), user, budget.encoded())


async def claim(conn: Executor, group: Sequence[Claim], *, lease_seconds: float) -> list[Claimed]:
    """Claims runs; answers only those that are mine, fresh or by an earlier call whose reply was lost.

    A group holds each run once. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.claim($1, $2, $3, $4, $5)",
            [item.run_id for item in group],
            [item.seen_epoch for item in group],
            [item.owner for item in group],
            float(lease_seconds),
            RESERVE,
        )
    return [Claimed(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class Renewal:
    """Which attempts have a new lease, and which own their runs no more. One in neither is held by somebody's transaction just now."""

    renewed: frozenset[AttemptRef]
    lost: frozenset[AttemptRef]


async def renew(conn: Executor, group: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
    """Renews leases. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.renew($1, $2, $3)",
            [item.run_id for item in group],
            [item.epoch for item in group],
            float(lease_seconds),
        )
    owned = {AttemptRef(row["run_id"], row["epoch"]): row["renewed"] for row in rows}
    return Renewal(frozenset(ref for ref, renewed in owned.items() if renewed), frozenset(group) - frozenset(owned))


async def flush(conn: Executor, group: Sequence[Flush]) -> set[AttemptRef]:
    """Stores events, reservations and checkpoints of the attempts that still own their runs, and answers which those are.

    Ledger rows are stored in any case. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.flush($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            [item.run_id for item in group],
            [item.epoch for item in group],
            [item.reserve_through for item in group],
            [item.checkpoint.seq if item.checkpoint else None for item in group],
            [item.checkpoint.state if item.checkpoint else None for item in group],
            *_event_columns(group),
            _ledger(group),
        )
    return {AttemptRef(*row) for row in rows}


async def finish(conn: Executor, group: Sequence[Finish]) -> list[Finished]:
    """Ends runs by their own attempts: events, status, result, fates and ledger in one transaction. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.finish($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            [item.run_id for item in group],
            [item.epoch for item in group],
            [item.status.value for item in group],
            [item.result for item in group],
            [item.error for item in group],
            *_event_columns(group),
            _ledger(group),
        )
    return [Finished(*row) for row in rows]


async def take_over(
    conn: Executor, group: Sequence[TakeOver], *, max_lost_attempts: int = 3, until: datetime | None = None
) -> list[TakenOver]:
    """Takes runs from their attempts, in the order asked; see `TakeOver` and transitions.sql.

    A run whose `max_lost_attempts`th attempt is lost fails and is put aside as a dead letter. After `until`, by Postgres' clock,
    no attempt is lost: the request came too late (control/contact.py). Raises StoreUnavailable.
    """
    columns = (
        [item.run_id for item in group],
        [item.reason.value for item in group],
        [item.epoch for item in group],
        [item.last_seq for item in group],
        [float(item.retry_after) for item in group],
        [item.error for item in group],
        [item.by for item in group],
        max_lost_attempts,
        until,
    )
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.take_over($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
            *columns,
            *_event_columns(group),
            _ledger(group, default_epoch=0),
        )
    return [_taken_over(row) for row in rows]


def _taken_over(row: asyncpg.Record) -> TakenOver:
    status = RunStatus(row["status"]) if row["status"] else None
    events = closing_events(row) if row["ok"] else []
    return TakenOver(row["run_id"], row["ok"], status, row["epoch"] or 0, row["owner"], row["next_head"], events)


def closing_events(row: asyncpg.Record) -> list[Event]:
    """The events with which a log was closed, of the columns epoch, event_seq, event_kind and event_data."""
    columns = zip(row["event_seq"] or (), row["event_kind"] or (), row["event_data"] or (), strict=True)
    return [Event(seq, row["epoch"], Kind(kind), data.encode()) for seq, kind, data in columns]


def _event_columns(
    group: Sequence[Flush | Finish | TakeOver],
) -> tuple[list[UUID], list[int], list[int], list[str], list[str]]:
    pairs = [(item.run_id, event) for item in group for event in item.events]
    return (
        [run_id for run_id, _ in pairs],
        [event.epoch for _, event in pairs],
        [event.seq for _, event in pairs],
        [event.kind.value for _, event in pairs],
        [event.data.decode() for _, event in pairs],
    )


def _ledger(group: Sequence[Flush | Finish | TakeOver], default_epoch: int | None = None) -> str | None:
    rows = [
        {
            "run_id": str(item.run_id),
            "epoch": item.epoch if item.epoch is not None else default_epoch,
            "call": row.call,
            "model": row.model,
            "provider": row.provider,
            "input_tokens": row.input_tokens,
            "cached_tokens": row.cached_tokens,
            "cache_write_tokens": row.cache_write_tokens,
            "output_tokens": row.output_tokens,
            "reasoning_tokens": row.reasoning_tokens,
            "audio_input_tokens": row.audio_input_tokens,
            "audio_output_tokens": row.audio_output_tokens,
            "cost_usd": None if row.cost_usd is None else str(row.cost_usd),
            "price_id": row.price_id,
            "unmeasured": row.unmeasured,
        }
        for item in group
        for row in item.ledger
    ]
    return msgspec.json.encode(rows).decode() if rows else None
