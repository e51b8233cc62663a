"""Budgets: what may be spent in a day and in a run, and how it stands. The statements that reserve and settle are in money.sql."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Literal
from uuid import UUID

import msgspec

from agentrun.store.pool import Executor, unavailable

AGENT = "agent"
"""The scope of all runs of an AgentRun. That of a user is `user:<id>`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What new runs reserve (`run_usd`), and against which limits: per day and per day and user, in USD; None: no limit.

    `zone` is the IANA name of the zone whose midnight begins a day.
    """

    run_usd: Decimal
    day_usd: Decimal | None
    user_day_usd: Decimal | None
    zone: str

    def encoded(self) -> str:
        """As the functions of the database take it."""
        amounts = {"run": self.run_usd, "day": self.day_usd, "user_day": self.user_day_usd}
        return msgspec.json.encode(
            {name: None if usd is None else str(usd) for name, usd in amounts.items()} | {"zone": self.zone}
        ).decode()


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a run was not stored: the day's limit of `scope` would not hold. `wait_seconds`: when to ask again."""

    scope: Literal["agent", "user"]
    wait_seconds: int


@dataclass(frozen=True, slots=True)
class Counter:
    """What a scope has spent and reserved of a day, in USD."""

    scope: str
    day: date
    reserved: Decimal
    spent: Decimal


@dataclass(frozen=True, slots=True)
class Purse:
    """What a run may spend (None: no limit was set when it was admitted) and what all its attempts have spent, in USD."""

    reserved_usd: Decimal | None
    booked_usd: Decimal


async def counters(conn: Executor, day: date) -> list[Counter]:
    """How a day's budgets stand, by scope. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch("SELECT scope, day, reserved, spent FROM budget_counters WHERE day = $1 ORDER BY scope", day)
    return [Counter(*row) for row in rows]


async def spent_lately(conn: Executor) -> dict[date, Decimal]:
    """What the days around now have spent, in any time zone. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT day, spent FROM budget_counters WHERE scope = $1 AND day BETWEEN current_date - 1 AND current_date + 1 ORDER BY day",
            AGENT,
        )
    return {row[0]: row[1] for row in rows}


async def purses(conn: Executor, run_ids: Sequence[UUID]) -> dict[UUID, Purse]:
    """What these runs may spend and have spent. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT r.id, r.reserved_usd, coalesce(a.booked_usd, 0) FROM runs r
               LEFT JOIN LATERAL (SELECT booked_usd FROM attempts x WHERE x.run_id = r.id ORDER BY x.epoch DESC LIMIT 1) a ON true
               WHERE r.id = ANY ($1)""",
            list(run_ids),
        )
    return {row[0]: Purse(row[1], row[2]) for row in rows}
