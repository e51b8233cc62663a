"""A worker and money: a run stops at its limit and keeps what it said; odd counts cost neither the run nor a wrong figure."""

from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from money import budget, counted, wrong
from run_factory import submission
from structlog.testing import capture_logs
from worker_bench import LIMITS, Bench, bench, say, worker

from agentrun.agents.base import Context, Result, Usage
from agentrun.agents.failures import AgentFailure
from agentrun.costs.pricing import Rates
from agentrun.costs.rules import Rules
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import follow_ups, ledger
from agentrun.store.transitions import Submitted
from agentrun.telemetry import REGISTRY

MILLION = 1_000_000
PRICES = {"m": [Rates(Decimal("0.25"), Decimal(1))], "free": [Rates(Decimal(0), Decimal(0))]}


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


def limited(run: str | None, **more: Any) -> Any:
    return replace(LIMITS, money=Rules(PRICES, None if run is None else Decimal(run), **more))


def stops(kind: str) -> float:
    return REGISTRY.get_sample_value("agentrun_budget_stops_total", {"type": kind}) or 0.0


async def spender(context: Context) -> Result:
    """Ten steps of 0.25 USD, each seen and saved."""
    for step in range(context.state or 0, 10):
        await context.ready()
        await say(context, f"{step} ", step)
        await context.book(Usage("m", input_tokens=MILLION))
        await context.checkpoint(step + 1)
    return Result("all")


async def test_a_run_over_its_limit_stops_at_the_next_step_and_keeps_what_it_said(stores: Bench) -> None:
    before = stops("budget_exceeded")
    async with worker(spender, stores, limits=limited("0.6")):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.FAILED]
    error = await stores.error(run)
    assert error["type"] == "budget_exceeded" and "0.75 USD of the 0.6 USD" in error["message"]
    assert await stores.text(run) == "0 1 2 " and await stores.outcomes(run) == ["finished"]
    assert (await ledger.of_run(stores.pool, run)).cost_usd == Decimal("0.75")
    assert stops("budget_exceeded") == before + 1


async def test_a_run_that_ends_exactly_at_its_limit_succeeds(stores: Bench) -> None:
    async with worker(spender, stores, limits=limited("2.5")):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]


async def test_the_limit_holds_over_all_attempts(stores: Bench) -> None:
    async def failing(context: Context) -> Result:
        await context.ready()
        await context.book(Usage("m", input_tokens=MILLION))
        raise AgentFailure("again", retryable=True)

    async with worker(failing, stores, limits=limited("0.5")) as (_, executor):
        (run,) = await stores.submit("x")
        await stores.outcomes_are(run, "retrying")
        await stores.sweep_until_published(run)
        await stores.outcomes_are(run, "retrying", "retrying")
        await stores.sweep_until_published(run)
        assert await stores.ended(run) == [RunStatus.FAILED]
    assert (await stores.error(run))["type"] == "budget_exceeded" and len(executor.started) == 3
    assert (await ledger.of_run(stores.pool, run)).calls == 2, "nothing was called in the third"


async def test_what_was_set_aside_at_admission_is_the_limit(stores: Bench) -> None:
    (found,) = await follow_ups.submit(stores.pool, [submission()], Policy.MERGE, budget("0.4", day="5"))
    assert isinstance(found, Submitted)
    async with worker(spender, stores, limits=limited("100")):
        await stores.work.publish([found.run_id])
        assert await stores.ended(found.run_id) == [RunStatus.FAILED]
    assert (await ledger.of_run(stores.pool, found.run_id)).cost_usd == Decimal("0.5")
    assert await counted(stores.pool) == (0, Decimal("0.5")) and await wrong(stores.pool) == []


async def test_an_agent_that_swallows_the_stop_gets_it_again(stores: Bench) -> None:
    seen: list[str] = []

    async def stubborn(context: Context) -> Result:
        await context.book(Usage("m", input_tokens=4 * MILLION))
        for _ in range(3):
            try:
                await context.ready()
            except AgentFailure as failure:
                seen.append(failure.type)
        await context.ready()
        return Result("never")

    async with worker(stubborn, stores, limits=limited("0.5")):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.FAILED]
    assert seen == ["budget_exceeded"] * 3


async def test_without_a_limit_nothing_stops(stores: Bench) -> None:
    async with worker(spender, stores, limits=limited(None)):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]


async def test_co_06_where_unknown_prices_are_refused_the_manifests_model_is_not_even_asked(stores: Bench) -> None:
    async with worker(spender, stores, limits=limited("5", refuse_unknown=True, model="own:nobody-knows")):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.FAILED]
    error = await stores.error(run)
    assert error["type"] == "price_unknown" and "own:nobody-knows" in error["message"]
    assert (await ledger.of_run(stores.pool, run)).calls == 0


@pytest.mark.parametrize(("refuse", "ends"), [(True, RunStatus.FAILED), (False, RunStatus.SUCCEEDED)])
async def test_co_06_a_call_without_a_price_is_marked_counted_and_stops_the_run_where_it_is_refused(
    stores: Bench, refuse: bool, ends: RunStatus
) -> None:
    async def agent(context: Context) -> Result:
        await context.ready()
        await context.book(Usage("nobody-knows", "own", input_tokens=5))
        await context.ready()
        await context.book(Usage("free", input_tokens=5))
        return Result("ok")

    before = REGISTRY.get_sample_value("agentrun_unknown_prices_total") or 0
    async with worker(agent, stores, limits=limited("5", refuse_unknown=refuse)):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [ends]
    rows = await stores.pool.fetch("SELECT model, provider, cost_usd, price_id FROM ledger ORDER BY call")
    free = ("free", "", Decimal(0), "override/free")
    assert [tuple(row) for row in rows] == [("nobody-knows", "own", None, None), *([] if refuse else [free])]
    assert REGISTRY.get_sample_value("agentrun_unknown_prices_total") == before + 1


async def test_co_02_parts_above_their_whole_are_paid_as_they_are_with_a_warning(stores: Bench) -> None:
    async def agent(context: Context) -> Result:
        await context.book(Usage("m", input_tokens=MILLION, cached_tokens=MILLION, cache_write_tokens=MILLION))
        return Result("ok")

    with capture_logs() as logs:
        async with worker(agent, stores, limits=limited("5")):
            (run,) = await stores.submit("x")
            await stores.ended(run)
    assert (await ledger.of_run(stores.pool, run)).cost_usd == Decimal("0.5"), "nothing plain, nothing negative"
    assert [one["log_level"] for one in logs if "contradict" in one["event"]] == ["warning"]


@pytest.mark.parametrize("odd", [None, -1, float("nan"), float("inf"), 10**30, "7", []])
async def test_odd_counts_of_tokens_are_unmeasured_and_never_lose_the_run(stores: Bench, odd: Any) -> None:
    async def agent(context: Context) -> Result:
        await context.book(Usage("m", input_tokens=odd, output_tokens=odd))
        await context.book(Usage("m", input_tokens=MILLION, output_tokens=odd))
        return Result("ok")

    async with worker(agent, stores, limits=limited("5", refuse_unknown=True)):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    rows = await stores.pool.fetch("SELECT input_tokens, output_tokens, cost_usd, unmeasured FROM ledger ORDER BY call")
    assert [tuple(row) for row in rows] == [(0, 0, None, True), (MILLION, 0, Decimal("0.25"), True)]
    assert await wrong(stores.pool) == []
