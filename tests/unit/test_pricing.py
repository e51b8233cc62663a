"""What a model call costs: exact, dated, and unknown rather than guessed."""

from datetime import UTC, date, datetime
from decimal import Decimal
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_ai import RequestUsage

from agentrun.costs.pricing import UNKNOWN, Rates, is_known, price
from agentrun.costs.usage import COUNTS, Usage

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def rates(*prices: str) -> dict[str, list[Rates]]:
    return {"m": [Rates(*(Decimal(it) for it in prices))]}


def cost(usage: Usage, **more: Any) -> Decimal:
    found = price(usage, NOW, **more)
    assert found.cost_usd is not None, found
    return found.cost_usd


def used(provider: str, reply: dict[str, Any], flavor: str = "default", **more: Any) -> Usage:
    """Usage as a driver reads it from a provider's own form."""
    found = RequestUsage.extract(reply, provider=provider, provider_url="", provider_fallback=provider, api_flavor=flavor)
    return Usage(
        model="m",
        input_tokens=found.input_tokens,
        cached_tokens=found.cache_read_tokens,
        cache_write_tokens=found.cache_write_tokens,
        output_tokens=found.output_tokens,
        reasoning_tokens=found.output_reasoning_tokens,
        **more,
    )


def test_co_01_cached_tokens_are_charged_once_whatever_form_the_provider_uses() -> None:
    prices = rates("0.50", "3.00", "0.05")
    total = Usage(model="m", input_tokens=20_212, cached_tokens=16_298, output_tokens=931)
    assert cost(total, overrides=prices) == Decimal("0.0055649")

    chat = {"prompt_tokens": 20_212, "completion_tokens": 931, "prompt_tokens_details": {"cached_tokens": 16_298}}
    inclusive = used("openai", {"model": "gpt-4o", "usage": chat}, "chat")
    apart = {"input_tokens": 20_212 - 16_298, "cache_read_input_tokens": 16_298, "output_tokens": 931}
    exclusive = used("anthropic", {"model": "claude-sonnet-4-5", "usage": apart})
    assert cost(inclusive, overrides=prices) == cost(exclusive, overrides=prices) == Decimal("0.0055649")

    flash = Usage(
        model="gemini-3-flash-preview",
        provider="google-gla",
        input_tokens=20_212,
        cached_tokens=16_298,
        output_tokens=931,
    )
    assert cost(flash) == Decimal("0.0055649")


def test_co_02_tokens_that_write_the_cache_are_charged_at_the_write_price_alone() -> None:
    usage = Usage(model="claude-sonnet-4-5", provider="anthropic", input_tokens=2_000, cached_tokens=500, cache_write_tokens=300)
    assert cost(usage) == Decimal("0.004875")


def test_co_02_parts_above_their_total_leave_nothing_plain_and_nothing_negative() -> None:
    usage = Usage(model="claude-sonnet-4-5", provider="anthropic", input_tokens=100, cached_tokens=90, cache_write_tokens=30)
    assert cost(usage) == (90 * Decimal("0.3") + 30 * Decimal("3.75")) / 1_000_000


def test_co_03_reasoning_is_part_of_the_output_whatever_form_the_provider_uses() -> None:
    within = {"prompt_tokens": 0, "completion_tokens": 266, "completion_tokens_details": {"reasoning_tokens": 261}}
    apart = {"promptTokenCount": 0, "candidatesTokenCount": 5, "thoughtsTokenCount": 261}
    prices = rates("0", "1")
    assert cost(used("openai", {"model": "gpt-5", "usage": within}, "chat"), overrides=prices) == Decimal("0.000266")
    other = used("google", {"modelVersion": "gemini-2.5-flash", "usageMetadata": apart})
    assert cost(other, overrides=prices) == Decimal("0.000266")


def test_co_03_tokens_without_a_price_make_the_call_unpriced() -> None:
    embedding = Usage(model="text-embedding-3-small", provider="openai", input_tokens=10, output_tokens=10)
    assert price(embedding, NOW) == UNKNOWN


@pytest.mark.parametrize(
    "usage",
    [
        Usage(model="my-local-model", provider="openai", input_tokens=10),
        Usage(model="gpt-4o", provider="nobody", input_tokens=10),
        Usage(model="", input_tokens=10),
        Usage(model="function:x:", provider="function", input_tokens=10),
    ],
)
def test_co_06_an_unknown_model_has_no_price_and_never_zero(usage: Usage) -> None:
    assert price(usage, NOW) == UNKNOWN


@pytest.mark.parametrize(
    ("provider", "name", "base"),
    [
        ("openai", "gpt-4o-2024-08-06", "gpt-4o"),
        ("openai", "gpt-4o-20240806", "gpt-4o"),
        ("openai", "GPT-4o", "gpt-4o"),
        ("anthropic", "claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
        ("bedrock", "us.anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic.claude-sonnet-4-5-20250929-v1:0"),
        ("bedrock", "eu.anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic.claude-sonnet-4-5-20250929-v1:0"),
    ],
)
def test_co_07_a_dated_or_regional_name_costs_what_its_base_name_costs(provider: str, name: str, base: str) -> None:
    counts = {"provider": provider, "input_tokens": 1000, "output_tokens": 10}
    assert cost(Usage(model=name, **counts)) == cost(Usage(model=base, **counts)) > 0


@pytest.mark.parametrize("name", ["gpt-4onsense", "gpt-4o-minimal", "gpt-4o-mini-something", "claude-sonnet-45x"])
def test_co_07_a_name_that_only_shares_a_beginning_is_not_matched(name: str) -> None:
    for provider in ("openai", "anthropic"):
        assert price(Usage(model=name, provider=provider, input_tokens=10), NOW) == UNKNOWN


@pytest.mark.parametrize("name", ["m", "m-2026-01-02", "m-20260102", "us.m-20260102-v1:0", "eu.m"])
def test_co_07_an_override_holds_for_dated_and_regional_names_too(name: str) -> None:
    found = price(Usage(model=name, provider="own", input_tokens=1_000_000), NOW, overrides=rates("0.25", "1"))
    assert (found.cost_usd, found.price_id) == (Decimal("0.25"), "override/m")


def test_an_override_wins_over_the_table_and_may_name_the_provider() -> None:
    usage = Usage(model="gpt-4o", provider="openai", input_tokens=1_000_000)
    table = {"openai:gpt-4o": [Rates(Decimal(7), Decimal(7))], "gpt-4o": [Rates(Decimal(8), Decimal(8))]}
    assert cost(usage, overrides=table) == 7
    assert price(usage, NOW).price_id == f"genai-prices-{version('genai-prices')}/openai/gpt-4o"


def test_a_price_is_that_of_its_day() -> None:
    usage = Usage(model="o3", provider="openai", input_tokens=1_000_000)
    before, after = (price(usage, datetime(2025, month, 1, tzinfo=UTC)).cost_usd for month in (5, 7))
    assert (before, after) == (10, 2)


def test_co_09_prices_are_exact_decimals() -> None:
    one = cost(Usage(model="m", input_tokens=1), overrides=rates("0.15", "1"))
    assert one == Decimal("0.00000015")
    assert sum([one] * 1000) * 1000 == Decimal("0.15")
    huge = Usage(model="m", input_tokens=3_000_000_000)
    assert cost(huge, overrides=rates("0.15", "1")) == 450


def test_audio_is_charged_at_its_own_price_where_there_is_one() -> None:
    usage = Usage(model="gemini-2.5-flash", provider="google", input_tokens=2_000_000, audio_input_tokens=1_000_000)
    plain = Usage(model="gemini-2.5-flash", provider="google", input_tokens=2_000_000)
    assert cost(usage) > cost(plain)


def heard(model: str, provider: str, **counts: int) -> Decimal:
    """In micro-dollars."""
    return cost(Usage(model=model, provider=provider, **counts)) * 1_000_000


def test_co_03_audio_above_its_total_raises_the_total_rather_than_being_priced_as_text() -> None:
    assert heard("gemini-2.5-flash", "google", input_tokens=1000, audio_input_tokens=1000) == 1000
    assert heard("gemini-2.5-flash", "google", input_tokens=999, audio_input_tokens=1000) == 1000
    assert heard("gpt-realtime", "openai", output_tokens=1000, audio_output_tokens=900) == 900 * 64 + 100 * 16
    assert heard("gpt-realtime", "openai", output_tokens=1000, audio_output_tokens=1001) == 1001 * 64
    assert heard("gpt-realtime", "openai", output_tokens=100, reasoning_tokens=60, audio_output_tokens=50) == 60 * 16 + 50 * 64


def test_co_03_audio_that_may_be_cached_costs_the_most_that_it_can() -> None:
    """How much of the cached input was audio is not told: at least 300 of these, if the others are all text."""
    counts = {"input_tokens": 1000, "audio_input_tokens": 800, "cached_tokens": 500}
    assert heard("gemini-2.5-flash", "google", **counts) == 500 + 300 * Decimal("0.1") + 200 * Decimal("0.03")
    assert heard("gpt-realtime", "openai", **counts) == 500 * 32 + 500 * Decimal("0.4")


def test_co_03_audio_without_a_price_of_its_own_makes_the_call_unpriced() -> None:
    for counts in ({"audio_input_tokens": 1}, {"audio_output_tokens": 1}):
        assert price(Usage("gpt-4o-audio-preview", "openai", input_tokens=10, output_tokens=10, **counts), NOW) == UNKNOWN
    assert price(Usage("gemini-2.5-flash", "google", input_tokens=1, output_tokens=9, audio_output_tokens=9), NOW) == UNKNOWN


def test_co_03_a_price_of_ones_own_holds_for_audio_too() -> None:
    usage = Usage("m", input_tokens=10, audio_input_tokens=20, output_tokens=1, audio_output_tokens=3)
    assert cost(usage, overrides=rates("1000000", "100000000")) == 320


SPOKEN = ("gpt-realtime", "openai"), ("gemini-2.5-flash", "google"), ("amazon.nova-sonic-v1:0", "aws"), ("gpt-4o", "openai")


@given(st.sampled_from(SPOKEN), st.fixed_dictionaries({name: st.integers(0, 20) for name in COUNTS}))
def test_co_03_audio_never_makes_a_call_cheaper(model: tuple[str, str], counts: dict[str, int]) -> None:
    found = price(Usage(*model, **counts), NOW)
    silent = price(Usage(*model, **{**counts, "audio_input_tokens": 0, "audio_output_tokens": 0}), NOW)
    assert found == UNKNOWN or (found.cost_usd is not None and found.cost_usd >= (silent.cost_usd or 0))
    assert found != UNKNOWN or counts["audio_input_tokens"] or counts["audio_output_tokens"]


def test_a_demo_model_has_a_fixed_pretend_price_labelled_so() -> None:
    usage = Usage(model="demo:chat", provider="demo", input_tokens=1_000_000, output_tokens=1_000_000)
    found = price(usage, NOW)
    assert (found.cost_usd, found.price_id) == (3, "demo")


def test_a_price_of_zero_is_a_price() -> None:
    found = price(Usage(model="m", input_tokens=10, output_tokens=10), NOW, overrides=rates("0", "0"))
    assert (found.cost_usd, found.price_id) == (0, "override/m")
    assert is_known("own:m", NOW, overrides=rates("0", "0")) and not is_known("own:m", NOW)


def test_an_override_holds_from_its_day_on() -> None:
    one, two = Rates(Decimal(1), Decimal(1), since=date(2026, 2, 1)), Rates(Decimal(2), Decimal(2), since=date(2026, 6, 1))
    usage = Usage(model="gpt-4o", provider="openai", input_tokens=1_000_000)
    found = {
        day: price(usage, datetime.fromisoformat(f"{day}T00:00:00+00:00"), overrides={"gpt-4o": [two, one]})
        for day in ("2026-01-31", "2026-02-01", "2026-05-31", "2026-06-01")
    }
    assert [one.cost_usd for one in found.values()] == [Decimal("2.5"), 1, 1, 2]
    assert [str(one.price_id).partition("/")[0] for one in found.values()] == ["genai-prices-" + version("genai-prices")] + [
        "override"
    ] * 3
    late = datetime.fromisoformat("2026-06-01T01:00:00+02:00")  # still May in UTC
    assert price(usage, late, overrides={"gpt-4o": [one, two]}).price_id == "override/gpt-4o@2026-02-01"


@pytest.mark.parametrize("provider", ["demo", "openai", ""])
def test_a_call_of_which_nothing_was_measured_has_no_price_rather_than_zero(provider: str) -> None:
    cut = Usage(model="gpt-4o", provider=provider, measured=False)
    assert price(cut, NOW, overrides={"gpt-4o": [Rates(Decimal(1), Decimal(1))]}) == UNKNOWN
    assert price(Usage(model="gpt-4o", provider="openai"), NOW).cost_usd == 0, "measured, and it was nothing"


@given(st.dictionaries(st.sampled_from(COUNTS), st.one_of(st.integers(), st.floats(), st.none(), st.text())))
def test_whatever_a_provider_counts_the_price_is_no_error_and_not_negative(counts: dict[str, Any]) -> None:
    usage = Usage("claude-sonnet-4-5", "anthropic", **counts).counted()
    found = price(usage, NOW)
    assert found == UNKNOWN or (found.cost_usd is not None and found.cost_usd >= 0)
    assert found != UNKNOWN or not usage.measured or usage.audio_input_tokens or usage.audio_output_tokens
