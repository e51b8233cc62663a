"""What was spent, by day, model, session, user, CronTask or agent: from sums, never from single calls.

Every change of the ledger has written a change of the sums (migration 0004); `fold` adds these up. A report is the sums and the changes
that wait, read in one snapshot, so it is what the ledger says at that moment, whether anybody folds or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import asyncpg

from agentrun.store.pool import Executor, unavailable

FOLD_AT_ONCE = 5_000
FOLD_LOCK_KEY = 0x7573_6167_65  # "usage"
_SUMS = (
    "calls",
    "input_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "audio_input_tokens",
    "audio_output_tokens",
    "cost_usd",
    "unpriced",
    "unmeasured",
    "lost_calls",
    "lost_usd",
)
_DAILY = ("day", "agent", "user_id", "cron_task", "model")
_SESSIONS = ("day", "session_id", "agent", "user_id", "cron_task", "model")


class GroupBy(StrEnum):
    """What a report may be grouped by."""

    DAY = "day"
    MODEL = "model"
    SESSION = "session"
    USER = "user"
    TASK = "task"
    AGENT = "agent"


_NO_TASK = "00000000-0000-0000-0000-000000000000"
_COLUMNS = {
    GroupBy.DAY: "u.day",
    GroupBy.MODEL: 'u.model COLLATE "C"',
    GroupBy.SESSION: "u.session_id",
    GroupBy.USER: 'u.user_id COLLATE "C"',
    GroupBy.TASK: f"(CASE WHEN u.cron_task = '{_NO_TASK}' THEN '' ELSE coalesce(t.spec ->> 'name', u.cron_task::text) END) COLLATE \"C\"",
    GroupBy.AGENT: 'u.agent COLLATE "C"',
}


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over calls. `cost_usd` is of the calls that have a price; `unpriced` counts the others, `unmeasured` estimates.

    `lost_calls` and `lost_usd` are the part of attempts that were lost.
    """

    calls: int
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    audio_input_tokens: int
    audio_output_tokens: int
    cost_usd: Decimal
    unpriced: int
    unmeasured: int
    lost_calls: int
    lost_usd: Decimal


@dataclass(frozen=True, slots=True)
class Group:
    """One group of a report: its values in the order of the grouping (a session by its id), and its sums."""

    values: tuple[str, ...]
    sums: Sums


@dataclass(frozen=True, slots=True)
class Report:
    """Groups in the order of their values, and the sums over all of them."""

    groups: list[Group]
    total: Sums


class TooManyGroups(ValueError):
    """A report would be longer than was asked for at most."""


async def report(
    conn: Executor, by: Sequence[GroupBy], *, agent: str, user: str | None, since: date, until: date, most: int
) -> Report:
    """What was spent from `since` to `until` (days in UTC, both included), by everybody or by one user.

    Raises TooManyGroups for more than `most`, StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(statement(by), agent, user, since, until, most + 2)
    if len(rows) > most + 1:
        raise TooManyGroups
    groups = [Group(tuple(map(str, row[: len(by)])), _sums(row)) for row in rows if not row["is_total"]]
    return Report(groups, next(_sums(row) for row in rows if row["is_total"]))


def statement(by: Sequence[GroupBy]) -> str:
    """The statement of a report; its parameters are agent, user, the first and the last day, and how many rows at most."""
    table = "usage_sessions" if GroupBy.SESSION in by else "usage_daily"
    keys = _SESSIONS if GroupBy.SESSION in by else _DAILY
    columns = ", ".join((*keys, *_SUMS))
    where = "agent = $1 AND ($2::text IS NULL OR user_id = $2) AND day BETWEEN $3 AND $4"
    named = ", ".join(f"{_COLUMNS[one]} AS g{place}" for place, one in enumerate(by))
    groups = ", ".join(f"g{place}" for place in range(len(by)))
    tasks = "LEFT JOIN cron_tasks t ON t.uid = u.cron_task" if GroupBy.TASK in by else ""
    sums = ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMS)
    return f"""
        WITH u AS (
            SELECT {columns} FROM {table} WHERE {where} UNION ALL SELECT {columns} FROM usage_changes WHERE {where}
        ), named AS (
            SELECT {named}, {", ".join(f"u.{name}" for name in _SUMS)} FROM u {tasks}
        )
        SELECT {groups}, {sums}, grouping(g0) = 1 AS is_total FROM named GROUP BY GROUPING SETS (({groups}), ())
        HAVING grouping(g0) = 1 OR sum(calls) <> 0
        ORDER BY is_total DESC, {groups} LIMIT $5"""


async def session_names(conn: Executor, ids: Sequence[UUID]) -> dict[UUID, str]:
    """The names of these sessions; those that are gone have none. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT id, external_id FROM sessions WHERE id = ANY ($1)", list(ids))
    return {row[0]: row[1] for row in rows}


async def fold(conn: Executor, *, at_once: int = FOLD_AT_ONCE) -> int:
    """Adds the oldest changes to the sums; answers how many there were. One at a time does it: another one finds nothing to do.

    Raises StoreUnavailable.
    """
    with unavailable():
        return int(await conn.fetchval(_FOLD, at_once, FOLD_LOCK_KEY))


def _sums(row: asyncpg.Record) -> Sums:
    found: list[Any] = [row[name] if name.endswith("_usd") else int(row[name]) for name in _SUMS]
    return Sums(*found)


def _upsert(table: str, keys: Sequence[str]) -> str:
    columns, grouped = ", ".join((*keys, *_SUMS)), ", ".join(keys)
    added = ", ".join(f"{name} = s.{name} + excluded.{name}" for name in _SUMS)
    return f"""INSERT INTO {table} AS s ({columns})
            SELECT {grouped}, {", ".join(f"sum({name})" for name in _SUMS)} FROM taken GROUP BY {grouped}
            ON CONFLICT ({grouped}) DO UPDATE SET {added}"""


# The lock is taken before the rows are looked at, and released with the transaction, which is this statement alone.
_FOLD = f"""
        WITH mine AS MATERIALIZED (
            SELECT pg_try_advisory_xact_lock($2) AS held
        ), taken AS (
            DELETE FROM usage_changes WHERE (SELECT held FROM mine) AND id IN (SELECT id FROM usage_changes ORDER BY id LIMIT $1)
            RETURNING *
        ), daily AS (
            {_upsert("usage_daily", _DAILY)}
        ), by_session AS (
            {_upsert("usage_sessions", _SESSIONS)}
        )
        SELECT count(*) FROM taken"""
