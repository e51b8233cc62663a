"""The price of a model call, from the dated table that genai-prices carries along: no network, never updated while running.

All arithmetic is in exact decimals. A model without a price has none: `cost_usd` is None, never 0 and never a guess. Nor has a call of
which nothing was measured and nothing could be estimated. Prices of one's own (`overrides`) win over the table, each from its day on.
Where nobody tells which of a call's tokens have which price, it costs the most that it can.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib.metadata import version
from itertools import permutations

from genai_prices import calc_price
from genai_prices.types import ModelPrice
from genai_prices.types import Usage as PricedUsage

from agentrun.costs.usage import Usage

DEMO = "demo"
_TABLE = f"genai-prices-{version('genai-prices')}"
_DATE = re.compile(r"[-@](20\d{2}-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01]))(-v\d+(:\d+)?)?$")
_REGION = re.compile(r"^(us|eu|apac|ap|global|us-gov|jp|au|ca)\.")


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices in USD per million tokens, for calls from the day `since` (UTC) on. Zero is a price.

    Without a price of their own, cached and cache-write tokens cost what input costs. Audio costs what text costs.
    """

    input: Decimal
    output: Decimal
    cached: Decimal | None = None
    cache_write: Decimal | None = None
    since: date = date.min


Overrides = Mapping[str, Sequence[Rates]]
"""Prices of one's own by `provider:model` or `model`, in any order of their days."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a call cost and which table says so; both None if no table knows the model."""

    cost_usd: Decimal | None
    price_id: str | None


UNKNOWN = Price(None, None)
DEMO_RATES = Rates(input=Decimal("1"), output=Decimal("2"))
"""The pretend price of `demo:` models."""


def price(usage: Usage, at: datetime, *, overrides: Overrides | None = None) -> Price:
    """The price of `usage` at the time `at`."""
    if not usage.measured and not (usage.input_tokens or usage.output_tokens or usage.reasoning_tokens):
        return UNKNOWN
    if usage.provider == DEMO or usage.model.startswith(f"{DEMO}:"):
        return _by_rates(usage, DEMO_RATES, DEMO)
    for name in _names(usage) if overrides else ():
        if (rates := _on(at, (overrides or {}).get(name, ()))) is not None:
            return _by_rates(usage, rates, f"override/{name}" + (f"@{rates.since}" if rates.since > date.min else ""))
    return _by_table(usage, at)


def is_known(model: str, at: datetime, *, overrides: Overrides | None = None) -> bool:
    """Whether a call of `provider:name` would have a price."""
    provider, _, name = model.partition(":")
    usage = Usage(name, provider, input_tokens=1, output_tokens=1)
    return price(usage, at, overrides=overrides) != UNKNOWN


def _on(at: datetime, found: Sequence[Rates]) -> Rates | None:
    """The rates of the day: the newest that have begun."""
    day = at.astimezone(UTC).date()
    return max((rates for rates in found if rates.since <= day), key=lambda rates: rates.since, default=None)


def _by_rates(usage: Usage, rates: Rates, price_id: str) -> Price:
    prices = ModelPrice(
        input_mtok=rates.input,
        output_mtok=rates.output,
        cache_read_mtok=rates.cached,
        cache_write_mtok=rates.cache_write,
    )
    return Price(prices.calc_price(PricedUsage(**_totals(usage)))["total_price"], price_id)


def _by_table(usage: Usage, at: datetime) -> Price:
    try:
        found = [
            calc_price(counts, usage.model, provider_id=usage.provider or None, genai_request_timestamp=at)
            for counts in _possible(usage)
        ]
    except (LookupError, ValueError):
        return UNKNOWN
    dearest = max(found, key=lambda one: one.total_price)
    if _is_unpriced(usage, dearest.model_price, dearest.model.id):
        return UNKNOWN
    return Price(dearest.total_price, f"{_TABLE}/{dearest.provider.id}/{dearest.model.id}")


def _is_unpriced(usage: Usage, prices: ModelPrice, model: str) -> bool:
    """Whether tokens of the call have no price in an entry that exists; a model that says it is free costs 0."""
    if model.endswith(":free"):
        return False
    return any(
        count > 0 and rate is None
        for count, rate in (
            (usage.input_tokens, prices.input_mtok),
            (usage.output_tokens, prices.output_mtok),
            (usage.audio_input_tokens, prices.input_audio_mtok),
            (usage.audio_output_tokens, prices.output_audio_mtok),
        )
    )


def _totals(usage: Usage) -> dict[str, int]:
    """The counts as totals with their parts. Parts above their total raise the total, so that nothing is counted negative."""
    cached, written = max(usage.cached_tokens, 0), max(usage.cache_write_tokens, 0)
    return {
        "input_tokens": max(usage.input_tokens, cached + written, usage.audio_input_tokens, 0),
        "cache_read_tokens": cached,
        "cache_write_tokens": written,
        "output_tokens": max(usage.output_tokens, max(usage.reasoning_tokens, 0) + max(usage.audio_output_tokens, 0)),
    }


def _possible(usage: Usage) -> Iterator[PricedUsage]:
    """What may have been used, with audio: nobody tells how much of it was read from the cache or written to it. Among these are the
    dearest and the cheapest case: audio fills the cached, the written and the other input in each order.
    """
    totals = _totals(usage)
    heard, spoken = max(usage.audio_input_tokens, 0), max(usage.audio_output_tokens, 0)
    cached, written = totals["cache_read_tokens"], totals["cache_write_tokens"]
    places = {
        "cache_audio_read_tokens": cached,
        "cache_audio_write_tokens": written,
        "": totals["input_tokens"] - cached - written,
    }
    cases: set[tuple[int, int]] = set()
    for order in permutations(places):
        left, filled = heard, dict.fromkeys(places, 0)
        for place in order:
            filled[place] = min(left, places[place])
            left -= filled[place]
        cases.add((filled["cache_audio_read_tokens"], filled["cache_audio_write_tokens"]))
    for read, write in sorted(cases):
        audio = {"input_audio_tokens": heard, "cache_audio_read_tokens": read, "cache_audio_write_tokens": write}
        yield PricedUsage(**totals, **audio, output_audio_tokens=spoken)


def _names(usage: Usage) -> list[str]:
    """The names that an override may use for the model, most exact first: with and without region prefix and date."""
    exact = usage.model
    regionless = _REGION.sub("", exact)
    forms = dict.fromkeys((exact, regionless, _DATE.sub("", exact), _DATE.sub("", regionless)))
    return [name for form in forms for name in ((f"{usage.provider}:{form}", form) if usage.provider else (form,))]
