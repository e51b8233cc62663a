"""Reading sessions."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.store.pool import Executor, unavailable


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A conversation of a user with the agent; `external_id` is the caller's name for it."""

    id: UUID
    user_id: str
    external_id: str
    created_at: datetime


async def find(conn: Executor, *, agent: str, user_id: str, external_id: str) -> SessionRow | None:
    """A user's session by the name that the caller gave it, or None. Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(
            "SELECT id, user_id, external_id, created_at FROM sessions WHERE agent = $1 AND user_id = $2 AND external_id = $3",
            agent,
            user_id,
            external_id,
        )
    return SessionRow(*row) if row else None


async def list_sessions(
    conn: Executor, *, agent: str, user_id: str | None, before: UUID | None = None, limit: int = 50
) -> list[SessionRow]:
    """Newest first, ids below `before`; `user_id` None means all users. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT id, user_id, external_id, created_at FROM sessions
               WHERE agent = $1 AND ($2::text IS NULL OR user_id = $2) AND ($3::uuid IS NULL OR id < $3) ORDER BY id DESC LIMIT $4""",
            agent,
            user_id,
            before,
            limit,
        )
    return [SessionRow(*row) for row in rows]
