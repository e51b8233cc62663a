"""Reading the ledger."""

from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

from agentrun.store.pool import Executor, unavailable


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run has used so far, lost attempts included. `cost_usd` is None if no call had a price; `unpriced` counts such calls."""

    calls: int
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    unpriced: int
    unmeasured: int
    price_ids: tuple[str, ...]


async def of_run(conn: Executor, run_id: UUID) -> RunCost:
    """Raises StoreUnavailable."""
    with unavailable():
        row = await conn.fetchrow(
            """SELECT count(*), coalesce(sum(input_tokens), 0)::bigint, coalesce(sum(output_tokens), 0)::bigint, sum(cost_usd),
                      count(*) FILTER (WHERE cost_usd IS NULL), count(*) FILTER (WHERE unmeasured),
                      coalesce(array_agg(DISTINCT price_id) FILTER (WHERE price_id IS NOT NULL), '{}')
               FROM ledger WHERE run_id = $1""",
            run_id,
        )
    assert row is not None
    return RunCost(row[0], row[1], row[2], row[3], row[4], row[5], tuple(row[6]))
