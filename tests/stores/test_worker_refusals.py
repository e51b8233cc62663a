"""What Postgres or an agent makes impossible for one run: it costs that run only, as little as possible, and no slot for ever."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fault_proxy import fault_proxy
from processes import Product, ProductProcesses
from waiting import eventually
from worker_bench import LIMITS, Bench, bench, echo, say, worker

from agentrun.agents.base import Context, Result, Usage
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.store import runs as store_runs
from agentrun.worker import attempt, endings
from agentrun.worker import worker as worker_module
from agentrun.worker.attempt import AttemptContext, End


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


# ---------------------------------------------------------------- usage that makes no sense

NONSENSE = [1.5, 2**63, 10**25, -5, float("nan"), float("inf"), None, "12"]


@pytest.mark.parametrize("count", NONSENSE, ids=str)
async def test_an_answer_is_kept_whatever_its_provider_says_of_its_usage(stores: Bench, count: Any) -> None:
    calls = 0

    async def agent(context: Context) -> Result:
        nonlocal calls
        calls += 1
        await say(context, "the answer")
        await context.book(Usage("m", "p", input_tokens=count, output_tokens=3))
        context.book_cut(Usage("m", "p", output_tokens=count))
        await context.checkpoint({"step": 1})
        return Result("the answer")

    async with worker(agent, stores):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert calls == 1 and await stores.text(run) == "the answer"
    rows = await stores.pool.fetch("SELECT input_tokens, output_tokens, unmeasured FROM ledger ORDER BY call")
    kept = 2 if count == 1.5 else 0
    assert [tuple(row) for row in rows] == [(kept, 3, True), (0, kept, True)]


@pytest.mark.parametrize("way", ["event and checkpoint", "finish", "retry"])
async def test_a_ledger_row_that_postgres_refuses_costs_neither_the_answer_nor_other_rows(stores: Bench, way: str) -> None:
    async def agent(context: Context) -> Result:
        await say(context, "the answer")
        context.book_cut(Usage("demo:chat", "demo", input_tokens=7))
        context.book_cut(Usage("demo:chat", "demo", input_tokens=-5, output_tokens=3))
        if way == "event and checkpoint":
            await context.checkpoint({"step": 1})
        elif way == "retry" and context.run.attempt == 1:
            raise TimeoutError
        return Result("the answer")

    async with worker(agent, stores) as (_, executor):
        with patch.object(Usage, "counted", lambda usage: usage):  # as if something had come past the counting
            (run,) = await stores.submit("x")
            if way == "retry":
                await stores.outcomes_are(run, "retrying")
                await stores.sweep_until_published(run)
            assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    rows = await stores.pool.fetch(
        "SELECT model, input_tokens, output_tokens, unmeasured, cost_usd FROM ledger ORDER BY epoch, call"
    )
    expected = [("demo:chat", 7, 0, False), ("demo:chat", 0, 0, True)]
    assert [tuple(row)[:4] for row in rows] == expected * len(executor.started)
    assert [row["cost_usd"] is None for row in rows] == [False, True] * len(executor.started)
    assert await stores.result(run) == {"output": "the answer", "messages": []}


# ---------------------------------------------------------------- one bad member of a group


@pytest.mark.parametrize("code", ["check_violation", "raise_exception"], ids=["a value", "taken for an outage"])
async def test_a_run_that_cannot_be_claimed_holds_up_nobody(stores: Bench, code: str) -> None:
    good = [(await stores.submit("x", session=f"g{n}", publish=False))[0] for n in range(3)]
    (bad,) = await stores.submit("x", session="b", publish=False)
    await stores.pool.execute(
        f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.run_id = '{bad}' THEN RAISE EXCEPTION 'bad member' USING ERRCODE = '{code}'; END IF; RETURN NEW; END $$"""
    )
    await stores.pool.execute("CREATE TRIGGER refuse BEFORE INSERT ON attempts FOR EACH ROW EXECUTE FUNCTION refuse()")
    await stores.work.publish([bad, *good])
    async with worker(echo, stores, limits=replace(LIMITS, capacity=16)) as (_, executor):
        assert await stores.ended(*good) == [RunStatus.SUCCEEDED] * 3
    assert await stores.status(bad) is RunStatus.PENDING and bad not in executor.started


async def test_a_run_whose_opening_cannot_be_read_fails_alone_and_at_once(stores: Bench) -> None:
    good = [(await stores.submit("x", session=f"g{n}", publish=False))[0] for n in range(3)]
    (bad,) = await stores.submit("x", session="b", publish=False)
    await stores.pool.execute(
        "UPDATE inputs SET content = (repeat('[', 3000) || repeat(']', 3000))::jsonb WHERE run_id = $1", bad
    )
    await stores.work.publish([bad, *good])
    async with worker(echo, stores, limits=replace(LIMITS, capacity=16)) as (made, executor):
        assert await stores.ended(*good, bad) == [*[RunStatus.SUCCEEDED] * 3, RunStatus.FAILED]
        await stores.nothing_held()
        assert made.active == 0
    assert (await stores.error(bad))["type"] == "unreadable"
    assert await stores.outcomes(bad) == ["finished"] and bad not in executor.started


async def test_an_opening_that_postgres_never_gives_holds_up_nobody(stores: Bench) -> None:
    good = [(await stores.submit("x", session=f"g{n}", publish=False))[0] for n in range(3)]
    (bad,) = await stores.submit("x", session="b", publish=False)
    read = store_runs.held_inputs

    async def refuse(conn: Any, run_ids: Any) -> Any:
        if bad in run_ids:
            raise StoreUnavailable("gone each time it is asked")
        return await read(conn, run_ids)

    await stores.work.publish([bad, *good])
    with patch.object(store_runs, "held_inputs", refuse):
        async with worker(echo, stores, limits=replace(LIMITS, capacity=16)):
            assert await stores.ended(*good) == [RunStatus.SUCCEEDED] * 3
    assert await stores.outcomes(bad) == ["handed_back"]


# ---------------------------------------------------------------- claimed, not started, and the worker stops


async def test_a_run_whose_opening_is_on_its_way_when_the_worker_stops_is_handed_back(stores: Bench) -> None:
    async with fault_proxy(stores.database_url) as proxy:
        held = proxy.hold_request("FROM inputs WHERE held_by")
        async with worker(echo, stores, database_url=proxy.url, lease_database_url=stores.database_url) as (made, executor):
            (run,) = await stores.submit("x")
            await held.seen(within=5)
            with patch.object(worker_module, "HAND_BACK_SECONDS", 1.0):
                await made.stop(0.2)
            assert await stores.outcomes(run) == ["handed_back"] and made.active == 0
            held.release()
    assert executor.started == []
    async with worker(echo, stores):
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()
    assert "void" not in await stores.kinds(run)


async def test_a_claim_whose_answer_is_on_its_way_when_the_worker_stops_is_handed_back(stores: Bench) -> None:
    async with fault_proxy(stores.database_url) as proxy:
        held = proxy.hold_request("agentrun_1.claim")
        async with worker(echo, stores, database_url=proxy.url, lease_database_url=stores.database_url) as (made, executor):
            (run,) = await stores.submit("x")
            await held.seen(within=5)
            with patch.object(worker_module, "HAND_BACK_SECONDS", 0.5):
                await made.stop(0.1)
            assert await stores.status(run) is RunStatus.PENDING
            assert made.active == 0
            held.release()
    assert executor.started == []
    assert set(await stores.outcomes(run)) <= {"handed_back"}


# ---------------------------------------------------------------- agents that do not end


async def test_an_agent_that_does_not_end_keeps_its_slot_and_too_many_of_them_end_the_worker(stores: Bench) -> None:
    hears = False

    async def deaf(context: Context) -> Result:
        while not hears:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                assert context.cancelled
        return Result("at last")

    limits = replace(LIMITS, capacity=2, max_run_seconds=0.1, retries=replace(LIMITS.retries, most=0))
    with patch.object(attempt, "CANCEL_SECONDS", 0.05), patch.object(worker_module, "REPLACE_SECONDS", 0.1):
        try:
            async with worker(deaf, stores, limits=limits) as (made, executor):
                for n in range(6):
                    await stores.submit("x", session=f"s{n}")
                await asyncio.wait_for(made.spent.wait(), 5)
                await eventually(lambda: len(made.left_behind) == 2, within=5, what="the worker is full of them")
                await asyncio.sleep(0.5)
                assert len(executor.started) == 2 == len(made.left_behind)
                hears = True
                for task in made.left_behind:
                    task.cancel()
                await eventually(lambda: len(executor.started) > 2, within=5, what="slots that are free again are used")
        finally:
            hears = True


MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {entrypoint: "deaf_agent:run"}
  workers: {leaseSeconds: 2, drainSeconds: 1, concurrency: 2, maxRunSeconds: 1, retries: 0}
  reaper: {idleSeconds: 2}
"""
AGENT = """
import asyncio

async def run(ctx):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    yield ""
"""


async def test_a_worker_full_of_agents_that_do_not_end_ends_itself_in_order(
    stores: Bench, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    for name, text in (("agentrun.yaml", MANIFEST), ("deaf_agent.py", AGENT), ("keys", "")):
        (tmp_path / name).write_text(text)
    product = Product(tmp_path / "agentrun.yaml", stores.database_url, stores.redis_url, tmp_path / "keys", namespace="test")
    started = await product_processes.worker(product)
    for n in range(2):
        await stores.submit("x", session=f"s{n}")
    assert await started.wait(within=25) == 0
    assert "so that it is replaced" in started.log_tail()


# ---------------------------------------------------------------- sizes


async def test_an_event_or_a_state_that_is_too_large_fails_its_run_in_words(stores: Bench) -> None:
    async def agent(context: Context) -> Result:
        match context.inputs[0].text:
            case "event":
                await context.emit(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": "x" * 1_100_000})
            case "state":
                await context.checkpoint({"all": "x" * 40_000_000})
            case "result":
                return Result("x" * 40_000_000)
        return Result("ok")

    async with worker(agent, stores) as (_, executor):
        runs = [(await stores.submit(text, session=text))[0] for text in ("event", "state", "result")]
        assert await stores.ended(*runs) == [RunStatus.FAILED] * 3
    for run in runs:
        error = await stores.error(run)
        assert error["type"] == "too_large" and "bytes" in error["message"]
    assert len(executor.started) == 3


async def test_the_history_of_a_session_is_bounded_in_bytes_and_its_last_turn_always_there(stores: Bench) -> None:
    said: list[int] = []

    async def agent(context: Context) -> Result:
        said.append(len(context.history))
        return Result("x" * 1_000)

    with patch.object(store_runs, "HISTORY_BYTES", 10):
        async with worker(agent, stores):
            assert await stores.ended(*await stores.submit("a", "b", "c")) == [RunStatus.SUCCEEDED] * 3
    assert said == [0, 1, 1]


# ---------------------------------------------------------------- a result in the last moment


@pytest.mark.parametrize("end", [End.TIMEOUT, End.HANDED_BACK])
async def test_a_result_that_comes_with_the_order_to_end_is_kept(stores: Bench, end: End) -> None:
    async def agent(context: Context) -> Result:
        assert isinstance(context, AttemptContext)
        context._asked.set_result(end)
        return Result("paid")

    async with worker(agent, stores):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert (await stores.result(run))["output"] == "paid"


async def test_a_buffer_that_postgres_refuses_ends_its_run_instead_of_losing_it(stores: Bench) -> None:
    async def agent(context: Context) -> Result:
        await say(context, "x")
        raise TimeoutError

    real = endings.Writer.give_back

    async def refuse(self: Any, item: Any) -> Any:
        if item.events:
            raise ValueError("cannot be stored")
        return await real(self, item)

    with patch.object(endings.Writer, "give_back", refuse):
        async with worker(agent, stores, limits=replace(LIMITS, flush=replace(LIMITS.flush, seconds=30.0))):
            (run,) = await stores.submit("x")
            assert await stores.ended(run) == [RunStatus.FAILED]
    assert (await stores.error(run))["type"] == "unstorable"
