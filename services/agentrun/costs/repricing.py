"""Gives calls a price that had none when they were booked: a price was added, or a newer version knows the model.

Only rows without a cost are touched, in small batches, each a transaction: it may be stopped, repeated, and run twice at the same time.
A call of which nothing was measured stays without a cost.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from agentrun.costs.pricing import Overrides, price
from agentrun.costs.usage import Usage
from agentrun.store import ledger
from agentrun.store.ledger import Priced, Unpriced
from agentrun.store.pool import Pool

BATCH = 500


@dataclass
class Repriced:
    """What has been done: calls that have a price now and what they cost, and by model how many still have none."""

    calls: int = 0
    cost_usd: Decimal = Decimal(0)
    left: Counter[str] = field(default_factory=Counter)


async def reprice(pool: Pool, overrides: Overrides, *, since: datetime, until: datetime, batch: int = BATCH) -> Repriced:
    """Prices calls from `since` to before `until`, oldest first, by the prices of their own times. Raises StoreUnavailable."""
    done = Repriced()
    after = None
    while found := await ledger.unpriced(pool, since=since, until=until, after=after, limit=batch):
        prices = [(one, _price(one, overrides)) for one in found]
        priced = [known for _, known in prices if known is not None]
        count, cost = await ledger.reprice(pool, priced) if priced else (0, Decimal(0))
        done.calls += count
        done.cost_usd += cost
        done.left.update(f"{one.provider}:{one.model}".removeprefix(":") for one, known in prices if known is None)
        after = found[-1]
    return done


def _price(one: Unpriced, overrides: Overrides) -> Priced | None:
    usage = Usage(
        one.model,
        one.provider,
        one.input_tokens,
        one.cached_tokens,
        one.cache_write_tokens,
        one.output_tokens,
        one.reasoning_tokens,
        one.audio_input_tokens,
        one.audio_output_tokens,
        measured=not one.unmeasured,
    )
    found = price(usage, one.at, overrides=overrides)
    if found.cost_usd is None or found.price_id is None:
        return None
    return Priced(one.run_id, one.epoch, one.call, found.cost_usd, found.price_id)
