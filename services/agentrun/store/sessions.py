"""Reading sessions."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agentrun.store.pool import Executor, unavailable

ANYBODYS = "hashtextextended(external_id, 0) = hashtextextended($2, 0)"
"""Finds a session by its name alone (the index sessions_by_name)."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A conversation of a user with the agent; `external_id` is the caller's name for it."""

    id: UUID
    user_id: str
    external_id: str
    created_at: datetime


async def named(conn: Executor, *, agent: str, user_id: str | None, external_id: str, limit: int = 2) -> list[SessionRow]:
    """The sessions to which callers gave that name; `user_id` None means all users, each of whom may have one. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            f"""SELECT id, user_id, external_id, created_at FROM sessions
                WHERE agent = $1 AND external_id = $2 AND {ANYBODYS if user_id is None else "user_id = $4"} ORDER BY id LIMIT $3""",
            agent,
            external_id,
            limit,
            *([] if user_id is None else [user_id]),
        )
    return [SessionRow(*row) for row in rows]


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
