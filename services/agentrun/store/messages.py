"""Reading a run's event log."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from agentrun.domain.events import Event, Kind
from agentrun.domain.folding import OUTLINE, Fold, Mark
from agentrun.domain.states import RunStatus
from agentrun.store.pool import Executor, unavailable


@dataclass(frozen=True, slots=True)
class Top:
    """How far a run's log goes: the last stored seq (-1: none) and the highest number that may have gone out."""

    run_id: UUID
    status: RunStatus
    top: int
    seq_reserved: int

    @property
    def cursor_limit(self) -> int:
        """The highest cursor that a client can honestly hold."""
        return self.top if self.status not in (RunStatus.PENDING, RunStatus.RUNNING) else max(self.top, self.seq_reserved)


async def after(conn: Executor, run_id: UUID, *, after: int, limit: int = 1000) -> list[Event]:
    """Events with a seq above `after`, in order. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT seq, epoch, kind, data::text FROM messages WHERE run_id = $1 AND seq > $2 ORDER BY seq LIMIT $3",
            run_id,
            after,
            limit,
        )
    return [Event(seq, epoch, Kind(kind), data.encode()) for seq, epoch, kind, data in rows]


async def page(conn: Executor, run_id: UUID, *, after: int, limit: int, most_bytes: int) -> list[Event]:
    """The events right after `after`, in order and without a hole: at most `limit`, and none more once they have `most_bytes` together.

    It walks from number to number, so that not even Postgres reads what is too much. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            """WITH RECURSIVE page (seq, epoch, kind, body, weight, place) AS (
                   SELECT seq, epoch, kind, body, octet_length(body), 1
                   FROM (SELECT seq, epoch, kind, data::text AS body FROM messages WHERE run_id = $1 AND seq = $2 + 1 OFFSET 0) first
                   UNION ALL
                   SELECT m.seq, m.epoch, m.kind, m.body, p.weight + octet_length(m.body), p.place + 1
                   FROM page p CROSS JOIN LATERAL (
                       SELECT seq, epoch, kind, data::text AS body FROM messages WHERE run_id = $1 AND seq = p.seq + 1 LIMIT 1) m
                   WHERE p.place < $3 AND p.weight < $4)
               SELECT seq, epoch, kind, body FROM page ORDER BY seq""",
            run_id,
            after,
            limit,
            most_bytes,
        )
    return [Event(seq, epoch, Kind(kind), body.encode()) for seq, epoch, kind, body in rows]


async def outline(conn: Executor, run_id: UUID) -> tuple[list[Mark], int]:
    """Where the messages of a run begin and end, and the seq of the checkpoint that a restart would go back to (-1: none).

    The checkpoint is read after the events: an event that is seen here is never above a checkpoint that is not. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            """SELECT seq, kind, data ->> 'item', data ->> 'type', CASE kind WHEN 'restart' THEN (data ->> 'keep')::integer END
               FROM messages WHERE run_id = $1 AND kind = ANY ($2) ORDER BY seq""",
            run_id,
            list(OUTLINE),
        )
        checkpoint = await conn.fetchval(
            "SELECT a.checkpoint_seq FROM runs r JOIN attempts a ON a.run_id = r.id AND a.epoch = r.epoch WHERE r.id = $1", run_id
        )
    marks = [Mark(seq, Kind(kind), item, type, keep) for seq, kind, item, type, keep in rows]
    return marks, -1 if checkpoint is None else checkpoint


async def spoken(conn: Executor, run_id: UUID, wanted: Fold) -> list[Event]:
    """The events that carry the text of a fold: whole texts, deltas where there is no other, and what opens and takes back.

    Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            """SELECT seq, epoch, kind, data::text FROM messages
               WHERE run_id = $1 AND seq <= $2 AND (kind IN ('item_added', 'text_done', 'restart')
                   OR kind = 'text_delta' AND data ->> 'item' = ANY ($3)) ORDER BY seq""",
            run_id,
            wanted.through,
            list(wanted.loose),
        )
    return [Event(seq, epoch, Kind(kind), data.encode()) for seq, epoch, kind, data in rows]


async def tops(conn: Executor, run_ids: Sequence[UUID]) -> dict[UUID, Top]:
    """The tops of many runs in one query. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT r.id, r.status, coalesce((SELECT max(m.seq) FROM messages m WHERE m.run_id = r.id), -1),
                      coalesce((SELECT a.seq_reserved FROM attempts a WHERE a.run_id = r.id AND a.epoch = r.epoch), -1)
               FROM runs r WHERE r.id = ANY ($1)""",
            list(run_ids),
        )
    return {row[0]: Top(row[0], RunStatus(row[1]), row[2], row[3]) for row in rows}
