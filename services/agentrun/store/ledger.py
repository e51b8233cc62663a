"""Reading the ledger, and pricing calls that have no price yet. Calls are booked in store/transitions.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from agentrun.store.pool import Executor, unavailable


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run has used so far, lost attempts included. `cost_usd` is None if no call had a price; `unpriced` counts such calls.

    `lost_calls` and `lost_usd` are the part of attempts that were lost.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    unpriced: int
    unmeasured: int
    price_ids: tuple[str, ...]
    lost_calls: int
    lost_usd: Decimal


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A call without a cost."""

    at: datetime
    run_id: UUID
    epoch: int
    call: int
    model: str
    provider: str
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    audio_input_tokens: int
    audio_output_tokens: int
    unmeasured: bool


@dataclass(frozen=True, slots=True)
class Priced:
    """A price that was found for a call."""

    run_id: UUID
    epoch: int
    call: int
    cost_usd: Decimal
    price_id: str


async def of_run(conn: Executor, run_id: UUID) -> RunCost:
    """Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(
            """SELECT count(*), coalesce(sum(input_tokens), 0), coalesce(sum(output_tokens), 0), sum(cost_usd),
                      count(*) FILTER (WHERE cost_usd IS NULL), count(*) FILTER (WHERE unmeasured),
                      coalesce(array_agg(DISTINCT price_id) FILTER (WHERE price_id IS NOT NULL), '{}'),
                      count(*) FILTER (WHERE lost), coalesce(sum(cost_usd) FILTER (WHERE lost), 0)
               FROM ledger WHERE run_id = $1""",
            run_id,
        )
    assert row is not None
    return RunCost(row[0], int(row[1]), int(row[2]), row[3], row[4], row[5], tuple(row[6]), row[7], row[8])


UNPRICED_SINCE = 4
"""The schema version from which on there is an index for what has no price."""
_LOOKED_AT, _NAMED = 1000, 5


async def unpriced_models(conn: Executor) -> tuple[str, ...]:
    """Models whose calls of the last 24 hours have tokens but no cost, at most five, by the newest thousand. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT DISTINCT model FROM (
                   SELECT model FROM ledger WHERE cost_usd IS NULL AND NOT unmeasured AND at > now() - interval '24 hours'
                   ORDER BY at DESC LIMIT $1) x
               ORDER BY model LIMIT $2""",
            _LOOKED_AT,
            _NAMED,
        )
    return tuple(row[0] for row in rows)


async def unpriced(conn: Executor, *, since: datetime, until: datetime, after: Unpriced | None, limit: int) -> list[Unpriced]:
    """Calls without a cost from `since` to before `until` that come after `after`, oldest first. Raises StoreUnavailable."""
    last = (after.at, after.run_id, after.epoch, after.call) if after is not None else (None,) * 4
    with unavailable():
        rows = await conn.fetch(
            """SELECT at, run_id, epoch, call, model, provider, input_tokens, cached_tokens, cache_write_tokens, output_tokens,
                      reasoning_tokens, audio_input_tokens, audio_output_tokens, unmeasured
               FROM ledger WHERE cost_usd IS NULL AND at >= $1 AND at < $2
                 AND ($3::timestamptz IS NULL OR (at, run_id, epoch, call) > ($3, $4::uuid, $5::integer, $6::integer))
               ORDER BY at, run_id, epoch, call LIMIT $7""",
            since,
            until,
            *last,
            limit,
        )
    return [Unpriced(*row) for row in rows]


async def reprice(conn: Executor, priced: Sequence[Priced]) -> tuple[int, Decimal]:
    """Sets the cost of calls that have none, with everything that counts it; how many, and what they cost. Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(
            "SELECT * FROM agentrun_1.reprice($1, $2, $3, $4, $5)",
            [one.run_id for one in priced],
            [one.epoch for one in priced],
            [one.call for one in priced],
            [one.cost_usd for one in priced],
            [one.price_id for one in priced],
        )
    assert row is not None
    return row[0], row[1]
