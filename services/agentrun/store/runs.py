"""Reading runs: what a worker must know before it acts on an entry, what the sweep publishes, what clients see."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.domain.states import RunStatus
from agentrun.store.pool import Executor, unavailable

HISTORY_BYTES = 16_000_000
"""How much a session's history may weigh, as stored: older turns are left out beyond that."""

_HEAD = """NOT EXISTS (SELECT 1 FROM runs b WHERE b.session_id = r.session_id AND b.session_position < r.session_position
           AND b.status IN ('pending', 'running'))"""
_INPUT = "id, held_by, content, run_id, created_at, fate, fate_run"
_DUE = "(r.not_before IS NULL OR r.not_before <= now())"


@dataclass(frozen=True, slots=True)
class RunLook:
    """The facts on which an entry's fate depends (docs/architecture.md, "What happens to an entry")."""

    run_id: UUID
    status: RunStatus
    epoch: int
    head: bool
    due: bool
    lease_alive: bool
    owner: str | None
    lost: int
    """How many of its attempts were lost."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as its owner may see it. `result` and `error` are JSON text."""

    id: UUID
    agent: str
    user_id: str
    session_id: UUID
    external_id: str
    session_position: int
    status: RunStatus
    epoch: int
    input: str
    result: str | None
    error: str | None
    not_before: datetime | None
    superseded_by: UUID | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    head: bool
    due: bool
    lease_alive: bool


@dataclass(frozen=True, slots=True)
class KeyedRun:
    """A run that a client's own key found; `idempotency_key` tells whether the body was the same too."""

    id: UUID
    session_id: UUID
    external_id: str
    status: RunStatus
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class DueHead:
    """A pending run that should have an entry on the work stream."""

    run_id: UUID


@dataclass(frozen=True, slots=True)
class HeldInput:
    """A user message and the run that holds it; `content` is JSON text. `sent_with` is the run that was made for it."""

    id: UUID
    run_id: UUID
    content: str
    sent_with: UUID
    created_at: datetime
    fate: str | None
    fate_run: UUID | None


@dataclass(frozen=True, slots=True)
class PastRun:
    """An earlier run of a session, for the history. `result` is JSON text, None unless it succeeded."""

    run_id: UUID
    status: RunStatus
    result: str | None


async def look(conn: Executor, run_ids: Sequence[UUID]) -> dict[UUID, RunLook]:
    """The facts for each run that exists. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            f"""SELECT r.id, r.status, r.epoch, {_HEAD}, {_DUE}, coalesce(a.lease_expires_at >= now(), false), a.owner,
                       (SELECT count(*)::integer FROM attempts l WHERE l.run_id = r.id AND l.outcome = 'lost')
                FROM runs r LEFT JOIN attempts a ON a.run_id = r.id AND a.epoch = r.epoch AND a.outcome = 'running'
                WHERE r.id = ANY ($1)""",
            list(run_ids),
        )
    return {row[0]: RunLook(row[0], RunStatus(row[1]), *row[2:]) for row in (tuple(record) for record in rows)}


async def due_heads(conn: Executor, *, after: UUID | None = None, limit: int = 500) -> list[DueHead]:
    """Pending, due heads with an id above `after`, by id. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            f"""SELECT r.id FROM runs r WHERE r.status = 'pending' AND r.id > $1 AND {_DUE} AND {_HEAD}
                ORDER BY r.id LIMIT $2""",
            after or UUID(int=0),
            limit,
        )
    return [DueHead(row["id"]) for row in rows]


_ROW = f"""SELECT r.id, r.agent, r.user_id, r.session_id, s.external_id, r.session_position, r.status, r.epoch, r.input, r.result,
    r.error, r.not_before, r.superseded_by, r.created_at, r.started_at, r.finished_at, {_HEAD} AS head, {_DUE} AS due,
    coalesce((SELECT a.lease_expires_at >= now() FROM attempts a
              WHERE a.run_id = r.id AND a.epoch = r.epoch AND a.outcome = 'running'), false) AS lease_alive
    FROM runs r JOIN sessions s ON s.id = r.session_id"""


def _run(record: Sequence[object]) -> RunRow:
    values = list(record)
    values[6] = RunStatus(str(values[6]))
    return RunRow(*values)  # type: ignore[arg-type]


async def get(conn: Executor, run_id: UUID, *, agent: str) -> RunRow | None:
    """One run of this agent, or None. Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(f"{_ROW} WHERE r.id = $1 AND r.agent = $2", run_id, agent)
    return _run(tuple(row)) if row else None


async def by_client_key(conn: Executor, *, agent: str, user_id: str, session_given: str, client_key: str) -> KeyedRun | None:
    """The run of an earlier submission with that Idempotency-Key, or None. Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(
            """SELECT r.id, r.session_id, s.external_id, r.status, r.idempotency_key
               FROM runs r JOIN sessions s ON s.id = r.session_id
               WHERE r.agent = $1 AND r.user_id = $2 AND r.session_given = $3 AND r.client_key = $4""",
            agent,
            user_id,
            session_given,
            client_key,
        )
    return KeyedRun(row[0], row[1], row[2], RunStatus(row[3]), row[4]) if row else None


async def by_keys(conn: Executor, keys: Sequence[str]) -> dict[str, UUID]:
    """Which of these idempotency keys have a run. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT idempotency_key, id FROM runs WHERE idempotency_key = ANY ($1)", list(keys))
    return {row[0]: row[1] for row in rows}


async def list_runs(
    conn: Executor,
    *,
    agent: str,
    user_id: str | None,
    status: RunStatus | None = None,
    session: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[RunRow]:
    """Newest first, ids below `before`; `user_id` None means all users (scope admin). Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            f"""{_ROW} WHERE r.agent = $1 AND ($2::text IS NULL OR r.user_id = $2) AND ($3::text IS NULL OR r.status = $3)
                AND ($4::text IS NULL OR s.external_id = $4 AND s.agent = $1) AND ($5::uuid IS NULL OR r.id < $5)
                AND ($4::text IS NULL OR s.user_id = $2 OR $2::text IS NULL
                     AND hashtextextended(s.external_id, 0) = hashtextextended($4, 0))
                ORDER BY r.id DESC LIMIT $6""",
            agent,
            user_id,
            status.value if status else None,
            session,
            before,
            limit,
        )
    return [_run(tuple(row)) for row in rows]


async def held_inputs(conn: Executor, run_ids: Sequence[UUID]) -> list[HeldInput]:
    """The user messages that these runs hold, in the order of the session. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(f"SELECT {_INPUT} FROM inputs WHERE held_by = ANY ($1) ORDER BY position, id", list(run_ids))
    return [HeldInput(*row) for row in rows]


async def inputs_of(conn: Executor, run_id: UUID) -> list[HeldInput]:
    """The user messages that the run holds and those that it was made for, whoever holds them now. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(f"SELECT {_INPUT} FROM inputs WHERE held_by = $1 OR run_id = $1 ORDER BY position, id", run_id)
    return [HeldInput(*row) for row in rows]


async def history(conn: Executor, session_id: UUID, *, before_position: int, limit: int = 200) -> list[PastRun]:
    """The last `limit` finished runs of the session below a position, oldest first; superseded ones are left out since their inputs
    moved on. Fewer, but at least one, where their results weigh more than HISTORY_BYTES. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            """SELECT id, status, result FROM (
                   SELECT last.*, sum(coalesce(pg_column_size(result), 0)) OVER w AS weight, row_number() OVER w AS place FROM (
                       SELECT id, status, CASE WHEN status = 'succeeded' THEN result END AS result, session_position FROM runs
                       WHERE session_id = $1 AND session_position < $2 AND status IN ('succeeded', 'failed', 'cancelled')
                       ORDER BY session_position DESC LIMIT $3) last
                   WINDOW w AS (ORDER BY session_position DESC)) weighed
               WHERE weight <= $4 OR place = 1 ORDER BY session_position""",
            session_id,
            before_position,
            limit,
            HISTORY_BYTES,
        )
    return [PastRun(row["id"], RunStatus(row["status"]), row["result"]) for row in rows]
