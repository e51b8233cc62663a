"""Money over the whole path: real processes against a provider that counts for itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from money import counted, wrong
from processes import ProductProcesses
from waiting import eventually
from whole_path import MANIFEST, System, attempt_is_under_way, system

PRICES = """
  prices:
    - {model: fake-model, inputUsd: "0", outputUsd: "100"}
"""
FOR_TEN = """
  budget: {usdPerRun: "0.1", usdPerDay: "1"}
"""
ONE_RUN = "[[size n=3800 piece=95]] [[slow ms=5]] write"
"""950 output tokens: 0.095 USD."""

CROSSING = "[[slow ms=1]] " + " ".join(['[[tool shout {"text": "%s"}]]' % ("x" * 2600)] * 4)
"""Four calls of 0.065 USD, if it may."""


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        made.product.manifest.write_text(MANIFEST.rstrip() + PRICES.rstrip() + "\n")
        yield made


def limited(whole: System) -> None:
    whole.product.manifest.write_text(whole.product.manifest.read_text().rstrip() + FOR_TEN.rstrip() + "\n")


async def none_unfinished(whole: System) -> bool:
    return await whole.pool.fetchval("SELECT count(*) FROM runs WHERE status IN ('pending', 'running')") == 0


async def test_fifty_runs_at_once_against_a_budget_for_ten_with_a_worker_killed(
    whole: System, proof: Callable[[str], None]
) -> None:
    """Spent and set aside never pass the limit, over 90 % of it is used, and the others are told when to come again."""
    limited(whole)
    await asyncio.gather(whole.gateway(), whole.gateway(), whole.scheduler())
    workers = await asyncio.gather(whole.worker(), whole.worker())
    broken: list[str] = []
    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            reserved, spent = await counted(whole.pool)
            broken.extend([f"{reserved} + {spent}"] if reserved + spent > 1 else [])
            broken.extend(await wrong(whole.pool))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(
        *(whole.post(ONE_RUN, session=f"s{n}", key=f"k{n}", gateway=whole.gateways[n % 2]) for n in range(50))
    )
    codes = [answer.status_code for answer in answers]
    assert (codes.count(202), codes.count(429)) == (10, 40)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "budget_exhausted" and refused.json()["scope"] == "agent"
    assert 1 <= int(refused.headers["Retry-After"]) <= 30

    first = next(UUID(answer.json()["run_id"]) for answer in answers if answer.status_code == 202)
    await attempt_is_under_way(whole, first, events=1)
    (await whole.worker_of(first, list(workers))).kill()
    await eventually(lambda: none_unfinished(whole), within=60, what="the ten have ended")
    assert await whole.pool.fetchval("SELECT count(*) FROM runs WHERE status = 'succeeded'") == 10

    accepted = next(n for n, code in enumerate(codes) if code == 202)
    again = await whole.post(ONE_RUN, session=f"s{accepted}", key=f"k{accepted}")
    assert again.status_code == 202 and again.headers["Idempotency-Replayed"] == "true", "a replay is never refused"
    late = await whole.post(ONE_RUN, session="late")
    assert late.status_code == 429 and int(late.headers["Retry-After"]) >= 1
    over.set()
    await watching
    reserved, spent = await counted(whole.pool)
    proof(f"of 1 USD spent {spent}; {codes.count(202)} of {len(codes)} runs admitted; {whole.provider.counts['calls']} calls")
    assert broken == [] and await wrong(whole.pool) == []
    assert reserved == 0 and Decimal("0.9") < spent <= 1


async def test_runs_that_cross_their_limit_overrun_the_day_by_one_call_each_at_most(
    whole: System, proof: Callable[[str], None]
) -> None:
    """All ten at the same time, with a worker killed in the middle of their calls: the bound of docs/costs.md, and that it is reached."""
    limited(whole)
    await asyncio.gather(whole.gateway(), whole.scheduler())
    workers = await asyncio.gather(whole.worker(), whole.worker())
    answers = await asyncio.gather(*(whole.post(CROSSING, session=f"s{n}") for n in range(20)))
    admitted = [UUID(answer.json()["run_id"]) for answer in answers if answer.status_code == 202]
    assert len(admitted) == 10
    await attempt_is_under_way(whole, admitted[0], events=1)
    (await whole.worker_of(admitted[0], list(workers))).kill()
    await eventually(lambda: none_unfinished(whole), within=90, what="the ten have ended")

    ends = await whole.pool.fetch("SELECT status, error ->> 'type' FROM runs")
    assert {tuple(end) for end in ends} == {("failed", "budget_exceeded")}
    bound = Decimal(1)
    for run in admitted:
        costs = [
            row[0] for row in await whole.pool.fetch("SELECT cost_usd FROM ledger WHERE run_id = $1 ORDER BY epoch, call", run)
        ]
        assert sum(costs[:-1]) < Decimal("0.1") <= sum(costs), "the call that crosses the limit is the last one"
        bound += costs[-1]
    reserved, spent = await counted(whole.pool)
    proof(f"of 1 USD spent {spent} by ten runs that crossed their limit; at most {bound}")
    assert reserved == 0 and 1 < spent <= bound
    assert (await whole.post(CROSSING, session="late")).status_code == 429
    assert await wrong(whole.pool) == []


async def test_totals_match_what_the_provider_counted_over_retries_tools_cuts_cancels_and_parallel_runs(whole: System) -> None:
    await asyncio.gather(whole.gateway(), whole.scheduler())
    await asyncio.gather(whole.worker(), whole.worker())
    tool = '[[tool add {"a": 2, "b": 3}]]'
    texts = [f"{tool} [[reasoning think of {n}]] [[deltas n=40]] number {n}" for n in range(8)]
    texts += [f"[[fail status=500 times=2]] number {n}" for n in range(2)]
    texts += [f"[[cut after={n + 3} times=1]] [[deltas n=20]] cut" for n in range(2)]
    runs = await asyncio.gather(*(whole.submit(text, session=f"s{n}") for n, text in enumerate(texts)))
    stopped = [await whole.submit(f"[[slow ms=40]] [[deltas n=500]] stop {n}", session=f"c{n}") for n in range(2)]
    for run in stopped:
        await attempt_is_under_way(whole, run, events=12)
        url = f"{whole.gateways[-1].base_url}/v1/runs/{run}/cancel"
        assert (await whole.http.post(url, headers=whole.headers)).status_code == 202
    await eventually(lambda: none_unfinished(whole), within=60, what="all have ended")
    assert {await whole.status(run) for run in runs} == {"succeeded"}

    counts = whole.provider.counts

    async def all_booked() -> bool:
        cut = counts["cut_by_client"] + counts["cut"]
        booked = await whole.pool.fetchval("SELECT count(*) FROM ledger WHERE unmeasured")
        assert booked == cut == 4, f"{booked} estimates; the provider counted {dict(counts)}"
        return True

    await eventually(all_booked, within=10, what="each call that was cut is booked as an estimate")
    row = await whole.pool.fetchrow(
        """SELECT count(*), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(reasoning_tokens), sum(cost_usd)
           FROM ledger WHERE NOT unmeasured"""
    )
    names = ("finished", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    assert tuple(row)[:5] == tuple(counts[name] for name in names)
    assert row[5] == Decimal(counts["completion_tokens"]) / 10_000
    estimates = await whole.pool.fetch("SELECT input_tokens, output_tokens, cost_usd, run_id FROM ledger WHERE unmeasured")
    assert all(one["input_tokens"] > 0 and one["output_tokens"] > 0 and one["cost_usd"] > 0 for one in estimates)
    assert set(stopped) <= {one["run_id"] for one in estimates}
    assert await wrong(whole.pool) == []


async def test_co_04_an_answer_without_usage_is_an_estimate_above_zero_linked_to_its_run(whole: System) -> None:
    await asyncio.gather(whole.gateway(), whole.scheduler(), whole.worker())
    run = await whole.submit("[[nousage]] [[deltas n=50]] go")
    await whole.follow(run)
    rows = await whole.pool.fetch("SELECT * FROM ledger")
    assert [(row["run_id"], row["unmeasured"]) for row in rows] == [(run, True)]
    assert rows[0]["input_tokens"] > 0 and rows[0]["output_tokens"] > 0 and rows[0]["cost_usd"] > 0
    usage = (await whole.get(f"/v1/runs/{run}")).json()["usage"]
    assert (usage["unmeasured_calls"], Decimal(usage["cost_usd"])) == (1, rows[0]["cost_usd"])
