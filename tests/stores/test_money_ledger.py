"""The ledger in Postgres: every call once, estimates replaced, lost attempts apart, prices that come later."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from money import books, budget, counted, ends, paid, wrong
from run_factory import claimed, ledger_row, submission, submitted

from agentrun.costs.pricing import Overrides, Rates
from agentrun.costs.repricing import reprice
from agentrun.domain.follow_ups import Policy
from agentrun.store import follow_ups, ledger, transitions
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Flush, Reason, Submitted, TakeOver

ALWAYS = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 10)
    yield made
    await made.close()


async def running(pool: Pool, *, session: str = "s1") -> UUID:
    run = (await submitted(pool, session=session)).run_id
    await claimed(pool, run)
    return run


async def lost(pool: Pool, run: UUID, epoch: int = 1) -> None:
    await pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE outcome = 'running'")
    assert (await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch=epoch)]))[0].ok


async def priced(pool: Pool, overrides: Overrides, *, batch: int = 500) -> tuple[int, Decimal, dict[str, int]]:
    done = await reprice(pool, overrides, since=ALWAYS, until=datetime.now(UTC) + timedelta(days=1), batch=batch)
    return done.calls, done.cost_usd, dict(done.left)


async def test_co_04_an_estimate_is_replaced_by_the_real_figures_and_not_added_to(pool: Pool) -> None:
    run = await running(pool)
    estimate = replace(paid("0.5"), unmeasured=True, output_tokens=3)
    for rows in ([estimate], [estimate], [paid("0.2")], [paid("0.9")], [replace(estimate, cost_usd=Decimal(7))]):
        await books(pool, run, *rows)
    cost = await ledger.of_run(pool, run)
    assert (cost.calls, cost.cost_usd, cost.unmeasured, cost.output_tokens) == (1, Decimal("0.2"), 0, 10)
    assert await pool.fetchval("SELECT booked_usd FROM attempts") == Decimal("0.2") and await wrong(pool) == []


async def test_co_04_what_replaces_an_estimate_corrects_the_budget(pool: Pool) -> None:
    (run,) = await follow_ups.submit(pool, [submission()], Policy.MERGE, budget("1", day="10"))
    assert isinstance(run, Submitted)
    await claimed(pool, run.run_id)
    await books(pool, run.run_id, replace(paid("0.5"), unmeasured=True))
    await books(pool, run.run_id, paid("0.125"), paid("0.25", 1))
    assert await counted(pool) == (Decimal("0.625"), Decimal("0.375")) and await wrong(pool) == []


async def test_co_08_the_same_report_three_times_is_one_row_and_two_attempts_are_two(pool: Pool) -> None:
    run = await running(pool)
    await asyncio.gather(*(books(pool, run, paid("0.25")) for _ in range(3)))
    assert (await ledger.of_run(pool, run)).calls == 1
    await lost(pool, run)
    await claimed(pool, run)
    await books(pool, run, paid("0.25"), epoch=2)
    await ends(pool, run, paid("0.25"), epoch=2, seq=200)
    cost = await ledger.of_run(pool, run)
    assert (cost.calls, cost.cost_usd, cost.lost_calls, cost.lost_usd) == (2, Decimal("0.5"), 1, Decimal("0.25"))
    assert await wrong(pool) == []


async def test_co_08_one_call_twice_in_one_report_is_one_row_with_the_real_figures(pool: Pool) -> None:
    run = await running(pool)
    await books(pool, run, replace(paid("0.5"), unmeasured=True), paid("0.25"))
    cost = await ledger.of_run(pool, run)
    assert (cost.calls, cost.cost_usd, cost.unmeasured) == (1, Decimal("0.25"), 0) and await wrong(pool) == []


async def test_co_09_sums_are_exact_and_have_no_largest_count(pool: Pool) -> None:
    run = await running(pool)
    await books(pool, run, *(paid("0.0000001", call) for call in range(10)))
    assert (await ledger.of_run(pool, run)).cost_usd == Decimal("0.000001")
    huge = replace(ledger_row(10, cost="1"), input_tokens=2**53 - 1)
    for turn in range(3):
        await books(pool, run, *(replace(huge, call=10 + 500 * turn + n) for n in range(500)))
    assert (await ledger.of_run(pool, run)).input_tokens == 1500 * (2**53 - 1) + 1000
    assert await pool.fetchval("SELECT sum(input_tokens) FROM usage_changes") > 2**63
    assert await wrong(pool) == []


async def test_co_09_a_million_calls_of_one_token_cost_exactly_what_a_million_tokens_cost(pool: Pool) -> None:
    run = await running(pool)
    await pool.execute(
        """INSERT INTO ledger (run_id, epoch, call, agent, user_id, session_id, model, input_tokens, cached_tokens, cache_write_tokens,
               output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd)
           SELECT $1, 1, n, 'a', 'u', $1, 'm', 1, 0, 0, 0, 0, 0, 0, 0.00000015 FROM generate_series(1, 1000000) AS n""",
        run,
        timeout=300,
    )
    assert await pool.fetchval("SELECT sum(cost_usd) FROM usage_changes") == Decimal("0.15")
    assert await pool.fetchval("SELECT sum(cost_usd) FROM ledger") == Decimal("0.15")


async def test_calls_of_lost_attempts_are_told_apart_also_those_that_come_late(pool: Pool) -> None:
    run = await running(pool)
    await books(pool, run, paid("0.25"))
    await lost(pool, run)
    await books(pool, run, paid("0.125", 1))
    await claimed(pool, run)
    await books(pool, run, paid("0.0625", 2))
    await books(pool, run, paid("1"), epoch=2)
    cost = await ledger.of_run(pool, run)
    assert (cost.calls, cost.cost_usd, cost.lost_calls, cost.lost_usd) == (4, Decimal("1.4375"), 3, Decimal("0.4375"))
    assert await wrong(pool) == []


async def test_calls_of_attempts_that_were_retried_handed_back_or_cancelled_are_not_lost(pool: Pool) -> None:
    run = await running(pool)
    for epoch, reason in enumerate((Reason.RETRYING, Reason.HANDED_BACK, Reason.CANCELLED), 1):
        wish = TakeOver(run, reason, epoch=epoch, last_seq=-1 if epoch == 1 else None, ledger=[paid("0.25")])
        await transitions.take_over(pool, [wish])
        if reason is not Reason.CANCELLED:
            await claimed(pool, run)
    cost = await ledger.of_run(pool, run)
    assert (cost.calls, cost.lost_calls) == (3, 0) and await wrong(pool) == []


async def test_co_06_a_price_that_is_added_later_prices_what_had_none_and_nothing_else(pool: Pool) -> None:
    run = await running(pool)
    own = replace(
        ledger_row(cost=None),
        model="own",
        provider="openai",
        input_tokens=1_000_000,
        cached_tokens=0,
        output_tokens=0,
        reasoning_tokens=0,
    )
    cut = replace(own, call=1, unmeasured=True)
    nothing = replace(cut, call=2, input_tokens=0)
    await books(pool, run, own, cut, nothing, replace(own, call=3, model="unknown"), paid("0.5", 4))
    await pool.execute("UPDATE ledger SET at = at - interval '40 days' WHERE call = 1")
    today = datetime.now(UTC).date()
    prices: Overrides = {
        "own": [Rates(Decimal(1), Decimal(1)), Rates(Decimal(2), Decimal(2), since=today - timedelta(days=30))],
        "test:model": [Rates(Decimal(100), Decimal(100))],
    }
    assert await ledger.unpriced_models(pool) == ("own", "unknown"), "of the last day"
    assert await priced(pool, {}, batch=2) == (0, 0, {"openai:own": 3, "openai:unknown": 1})
    assert await priced(pool, prices, batch=2) == (2, 3, {"openai:own": 1, "openai:unknown": 1})
    assert await ledger.unpriced_models(pool) == ("unknown",)
    assert await priced(pool, prices, batch=1) == (0, 0, {"openai:own": 1, "openai:unknown": 1}), "nothing twice"
    costs = {row["call"]: row["cost_usd"] for row in await pool.fetch("SELECT call, cost_usd FROM ledger")}
    assert costs == {0: 2, 1: 1, 2: None, 3: None, 4: Decimal("0.5")}, (
        "by the price of its day; what was measured as nothing stays so"
    )
    assert await wrong(pool) == []


async def test_two_who_price_at_the_same_time_price_each_call_once(pool: Pool) -> None:
    (one,) = await follow_ups.submit(pool, [submission()], Policy.MERGE, budget("1", day="10"))
    assert isinstance(one, Submitted)
    await claimed(pool, one.run_id)
    row = replace(ledger_row(cost=None), model="own", input_tokens=100_000, cached_tokens=0, output_tokens=0, reasoning_tokens=0)
    await books(pool, one.run_id, *(replace(row, call=call) for call in range(20)))
    prices: Overrides = {"own": [Rates(Decimal("0.2"), Decimal(1))]}
    await asyncio.gather(*(priced(pool, prices, batch=3) for _ in range(4)))
    assert await counted(pool) == (Decimal("0.6"), Decimal("0.4")) and await wrong(pool) == []
    await ends(pool, one.run_id)
    assert await counted(pool) == (0, Decimal("0.4")) and await wrong(pool) == []


async def test_a_call_is_priced_while_its_run_is_lost_claimed_and_ended(pool: Pool) -> None:
    found = await follow_ups.submit(pool, [submission(session=f"s{n}") for n in range(6)], Policy.MERGE, budget("1", day="10"))
    row = replace(ledger_row(cost=None), model="own", input_tokens=100_000, cached_tokens=0, output_tokens=0, reasoning_tokens=0)

    async def live(run: UUID) -> None:
        for epoch in (1, 2):
            await claimed(pool, run)
            await books(pool, run, *(replace(row, call=call) for call in range(5)), epoch=epoch)
            if epoch == 1:
                await pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1", run)
                await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch=1)])
        await ends(pool, run, paid("0.01", 9), epoch=2, seq=200)

    async def prices() -> None:
        for _ in range(10):
            await priced(pool, {"own": [Rates(Decimal("0.2"), Decimal(1))]}, batch=4)

    await asyncio.gather(*(live(one.run_id) for one in found if isinstance(one, Submitted)), prices(), prices())
    await prices()
    assert await pool.fetchval("SELECT count(*) FROM ledger WHERE cost_usd IS NULL") == 0
    assert await counted(pool) == (0, Decimal("1.26")) and await wrong(pool) == []


async def test_rows_of_older_code_have_no_provider_and_are_booked_as_before(pool: Pool) -> None:
    run = await running(pool)
    await pool.execute(
        "SELECT agentrun_1.flush($1, $2, $3, $4, $5, '{}', '{}', '{}', '{}', '{}', $6)",
        [run],
        [1],
        [128],
        [None],
        [None],
        f"""[{{"run_id": "{run}", "epoch": 1, "call": 0, "model": "m", "input_tokens": 1, "cached_tokens": 0, "cache_write_tokens": 0,
              "output_tokens": 1, "reasoning_tokens": 0, "audio_input_tokens": 0, "audio_output_tokens": 0, "cost_usd": "0.25",
              "price_id": "x", "unmeasured": false}}]""",
    )
    row = await pool.fetchrow("SELECT provider, cost_usd, lost FROM ledger")
    assert row is not None and tuple(row) == ("", Decimal("0.25"), False) and await wrong(pool) == []


async def test_a_refused_row_does_not_cost_the_others(pool: Pool) -> None:
    run = await running(pool)
    with pytest.raises(Exception, match="input_tokens"):
        await transitions.flush(pool, [Flush(run, 1, 128, ledger=[replace(paid("1"), input_tokens=-1)])])
    await books(pool, run, paid("1"))
    assert (await ledger.of_run(pool, run)).calls == 1


async def test_the_command_prices_by_the_manifests_prices_and_says_what_is_left(
    pool: Pool, database_url: str, tmp_path: Path
) -> None:
    run = await running(pool)
    row = replace(
        ledger_row(cost=None), provider="openai", input_tokens=1_000_000, cached_tokens=0, output_tokens=0, reasoning_tokens=0
    )
    await books(pool, run, *(replace(row, call=call, model="unknown" if call == 1 else "own") for call in range(4)))
    await pool.execute("UPDATE ledger SET at = '2026-01-31T23:59:59.5Z' WHERE call = 2")
    await pool.execute("UPDATE ledger SET at = '2026-01-15T23:59:59.5Z' WHERE call = 3")
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(
        """{apiVersion: agentrun.dev/v1alpha1, kind: AgentRun, metadata: {name: a}, spec: {agent: {model: "demo:chat"},
            prices: [{model: "openai:own", inputUsd: "0.5", outputUsd: "1"}]}}"""
    )
    environment = {**os.environ, "DATABASE_URL": database_url, "AGENTRUN_MANIFEST": str(manifest)}

    async def command(*arguments: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentrun", "costs", "reprice", *arguments),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    without_dashes = await command("--from", "20260115", "--to", "20260115")
    assert without_dashes == (0, "1 calls have a price now: 0.5 USD\n"), "a day all the same"
    assert await command("--from", "2026-01-01", "--to", "2026-01-30") == (0, "0 calls have a price now: 0 USD\n")
    assert await command("--from", "2026-01-31", "--to", "2026-01-31") == (0, "1 calls have a price now: 0.5 USD\n")
    for priced_now in ("1 calls have a price now: 0.5 USD", "0 calls have a price now: 0 USD"):
        assert await command("--from", "2026-01-01") == (0, f"{priced_now}\nstill without a price: 1 calls of openai:unknown\n")
    code, said = await command("--from", "2026-02-01", "--to", "2026-01-01")
    assert code == 2 and "--to comes before --from" in said
    code, said = await command("--from", "yesterday")
    assert code == 2 and "is no day" in said
    assert await wrong(pool) == []
