"""A worker on real stores: from an entry to the end of a run, and what an agent may do in between."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from waiting import eventually
from worker_bench import KEYS, LIMITS, Bench, bench, echo, say, worker

from agentrun.agents.base import Context, Result, Usage
from agentrun.agents.failures import AgentFailure
from agentrun.bus.runs import WorkStream
from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.store import ledger
from agentrun.store.ids import new_id
from agentrun.worker.endings import Retries
from agentrun.worker.run_log import FlushLimits


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


async def test_a_run_is_executed_stored_and_acknowledged(stores: Bench) -> None:
    async with worker(echo, stores):
        (run,) = await stores.submit("hello")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()

    assert await stores.result(run) == {"output": "hello", "messages": [{"said": "hello"}]}
    kinds = ["created", "started", "item_added", "text_delta", "text_done", "item_done", "completed"]
    assert await stores.kinds(run) == kinds
    assert await stores.text(run) == "hello"
    assert await stores.streamed(run) == list(range(7))
    assert await stores.outcomes(run) == ["finished"]


async def test_the_runs_of_a_session_follow_each_other_and_know_what_was_said(stores: Bench) -> None:
    heard: list[list[object]] = []

    async def remember(context: Context) -> Result:
        heard.append([([one.text for one in turn.inputs], turn.output, list(turn.messages)) for turn in context.history])
        if context.inputs[0].text == "fail":
            raise AgentFailure("as asked")
        return Result("to " + context.inputs[0].text, [{"n": len(heard)}])

    async with worker(remember, stores):
        runs = await stores.submit("one", "fail", "three")
        assert await stores.ended(*runs) == [RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.SUCCEEDED]
    one, failed = (["one"], "to one", [{"n": 1}]), (["fail"], None, [])
    assert heard == [[], [one], [one, failed]]
    assert await stores.error(runs[1]) == {"type": "agent_error", "message": "as asked"}


async def test_many_runs_share_commits_and_each_is_executed_once(stores: Bench) -> None:
    runs = [(await stores.submit(f"n{n}", session=f"s{n}"))[0] for n in range(120)]
    async with worker(echo, stores, limits=replace(LIMITS, capacity=40)) as (_, executor):
        assert set(await stores.ended(*runs, within=20)) == {RunStatus.SUCCEEDED}
        await stores.nothing_held()
    assert sorted(executor.started) == sorted(runs)
    assert [await stores.text(run) for run in runs] == [f"n{n}" for n in range(120)]


async def test_a_worker_holds_no_more_runs_than_its_capacity(stores: Bench) -> None:
    go, most, active = asyncio.Event(), 0, 0

    async def busy(context: Context) -> Result:
        nonlocal most, active
        active += 1
        most = max(most, active)
        await go.wait()
        active -= 1
        return Result("ok")

    runs = [(await stores.submit("x", session=f"s{n}"))[0] for n in range(7)]
    async with worker(busy, stores) as (_, executor):
        await eventually(lambda: active == LIMITS.capacity, within=5, what="the worker is full")
        pending = await stores.redis.xpending(KEYS.runs, "workers")
        assert pending["pending"] == LIMITS.capacity
        go.set()
        await stores.ended(*runs)
    assert most == LIMITS.capacity and len(executor.started) == 7


async def test_what_an_agent_books_is_in_the_ledger_and_in_the_events(stores: Bench) -> None:
    async def spend(context: Context) -> Result:
        await context.book(Usage("demo:chat", "demo", input_tokens=1_000_000, output_tokens=500_000))
        await context.book(Usage("nobody-knows", input_tokens=7))
        context.book_cut(Usage("demo:chat", "demo", input_tokens=3, measured=False))
        return Result("ok")

    async with worker(spend, stores):
        (run,) = await stores.submit("x")
        await stores.ended(run)
    cost = await ledger.of_run(stores.pool, run)
    assert (cost.calls, cost.unpriced, cost.unmeasured) == (3, 1, 1)
    usages = [json.loads(event.data) for event in await stores.log(run) if event.kind is Kind.USAGE]
    assert [(usage["call"], usage["cost_usd"]) for usage in usages] == [(0, "2"), (1, None)]


async def test_an_agent_cannot_write_what_only_the_worker_writes(stores: Bench) -> None:
    refused: list[Kind] = []

    async def forge(context: Context) -> Result:
        for kind in (Kind.COMPLETED, Kind.RESTART, Kind.VOID, Kind.USAGE, Kind.CREATED):
            with pytest.raises(ValueError, match="cannot emit"):
                await context.emit(kind, {})
            refused.append(kind)
        return Result("ok")

    async with worker(forge, stores):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert len(refused) == 5
    assert await stores.kinds(run) == ["created", "started", "completed"]


async def test_text_that_no_store_can_hold_is_mended_and_a_result_that_is_not_json_fails_the_run(stores: Bench) -> None:
    async def dirty(context: Context) -> Result:
        await say(context, "nul \x00 half \ud800")
        return Result(object() if context.inputs[0].text == "object" else "nul \x00")

    async with worker(dirty, stores):
        (clean,) = await stores.submit("text", session="a")
        (bad,) = await stores.submit("object", session="b")
        assert await stores.ended(clean, bad) == [RunStatus.SUCCEEDED, RunStatus.FAILED]
    assert await stores.text(clean) == "nul \ufffd half \ufffd"
    assert (await stores.result(clean))["output"] == "nul \ufffd"
    assert (await stores.error(bad))["type"] == "invalid_result"


async def test_a_retryable_error_is_tried_again_after_a_while_and_then_fails(stores: Bench) -> None:
    starts: list[float] = []

    async def unlucky(context: Context) -> Result:
        starts.append(asyncio.get_running_loop().time())
        await say(context, f"try {context.run.attempt} ")
        raise AgentFailure("busy", type="rate_limited", retryable=True)

    async with worker(unlucky, stores, limits=replace(LIMITS, retries=Retries(2, 0.2, lambda: 1.0))):
        (run,) = await stores.submit("x")
        for attempt in (1, 2):
            await stores.outcomes_are(run, *["retrying"] * attempt)
            await stores.nothing_held()  # acknowledged: not due yet, so the sweep publishes it
            await stores.sweep_until_published(run)
        assert await stores.ended(run) == [RunStatus.FAILED]
        await stores.nothing_held()
    assert await stores.outcomes(run) == ["retrying", "retrying", "finished"]
    assert starts[1] - starts[0] >= 0.2 and starts[2] - starts[1] >= 0.4
    assert await stores.error(run) == {"type": "rate_limited", "message": "busy"}
    assert await stores.text(run) == "try 3 "
    kinds = await stores.kinds(run)
    assert kinds.count("restart") == 2 and "void" not in kinds and kinds.count("created") == 1


async def test_an_agent_that_ends_the_process_or_itself_only_fails_its_run(stores: Bench) -> None:
    async def leave(context: Context) -> Result:
        if context.inputs[0].text == "exit":
            raise SystemExit(3)
        raise asyncio.CancelledError

    async with worker(leave, stores):
        (first,) = await stores.submit("exit", session="a")
        (second,) = await stores.submit("cancel", session="b")
        assert await stores.ended(first, second) == [RunStatus.FAILED, RunStatus.FAILED]
    assert "tried to end the process" in (await stores.error(first))["message"]
    assert "cancelled itself" in (await stores.error(second))["message"]


async def test_the_next_attempt_goes_on_from_the_checkpoint(stores: Bench) -> None:
    states: list[object] = []

    async def in_steps(context: Context) -> Result:
        states.append(context.state)
        if context.state is None:
            await say(context, "first ", 0)
            await context.checkpoint({"done": 1})
            await say(context, "lost ", 1)
            raise AgentFailure("again", retryable=True)
        await say(context, "second", 1)
        return Result("ok")

    async with worker(in_steps, stores):
        (run,) = await stores.submit("x")
        await stores.outcomes_are(run, "retrying")
        await stores.sweep_until_published(run)
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert states == [None, {"done": 1}]
    assert await stores.text(run) == "first second"


async def test_a_long_stream_never_outruns_the_reserved_numbers(stores: Bench) -> None:
    async def talk(context: Context) -> Result:
        await context.emit(Kind.ITEM_ADDED, {"item": 0, "type": "message"})
        for n in range(1_000):
            await context.emit(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": f"{n} "})
        return Result("ok")

    async with worker(talk, stores, limits=replace(LIMITS, flush=FlushLimits(50, 0.2))):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()
    assert await stores.text(run) == "".join(f"{n} " for n in range(1_000))
    assert await stores.streamed(run) == list(range(1_004))


async def test_entries_that_need_no_work_are_acknowledged(stores: Bench) -> None:
    waits = asyncio.Event()

    async def wait(context: Context) -> Result:
        await waits.wait()
        return await echo(context)

    async with worker(wait, stores) as (_, executor):
        (orphan,) = [new_id()]
        head, blocked = await stores.submit("head", "blocked")
        await eventually(lambda: executor.started == [head], within=5, what="the head runs")
        await stores.work.publish([orphan, blocked])
        await stores.redis.xadd(KEYS.runs, {"nonsense": "x"})
        await stores.redis.xadd(KEYS.runs, {"run": str(head)})  # a duplicate of a run whose lease is alive

        async def only_the_head_is_held() -> bool:
            pending = await stores.redis.xpending(KEYS.runs, "workers")
            groups = await stores.redis.xinfo_groups(KEYS.runs)
            return pending["pending"] == 1 and groups[0]["lag"] == 0

        await eventually(only_the_head_is_held, within=5, what="all but the head's entry are acknowledged")
        waits.set()
        await stores.ended(head, blocked)
        await stores.nothing_held()
    assert executor.started == [head, blocked]


async def test_two_entries_of_a_run_in_one_group_are_one_execution(stores: Bench) -> None:
    (run,) = await stores.submit("x")
    await stores.redis.xadd(KEYS.runs, {"run": str(run)})
    async with worker(echo, stores, limits=replace(LIMITS, capacity=8)) as (_, executor):
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()
    assert executor.started == [run]


async def test_rs_21_a_finished_run_that_is_delivered_again_is_not_executed_again(stores: Bench) -> None:
    runs = [(await stores.submit("x", session=f"s{n}"))[0] for n in range(5)]
    async with worker(echo, stores) as (_, executor):
        await stores.ended(*runs)
        await stores.nothing_held()
        await stores.redis.xgroup_setid(KEYS.runs, "workers", "0")

        async def read_again() -> bool:
            return (await stores.redis.xinfo_groups(KEYS.runs))[0]["lag"] == 0

        await eventually(read_again, within=5, what="the old entries have been read again")
        await stores.nothing_held()
    assert len(executor.started) == 5
    assert [await stores.outcomes(run) for run in runs] == [["finished"]] * 5


async def test_rs_06_a_worker_carries_on_after_redis_has_been_emptied(stores: Bench) -> None:
    async with worker(echo, stores) as (made, executor):
        await stores.redis.flushall()
        runs = [(await stores.submit("x", session=f"s{n}", publish=False))[0] for n in range(5)]
        await stores.redis.flushall()
        await WorkStream(stores.redis, KEYS).publish(runs)
        await stores.ended(*runs)
        assert made.stalled() is None
    assert len(executor.started) == 5


async def test_rs_08_a_lost_group_is_made_anew_at_the_beginning(stores: Bench) -> None:
    async with worker(echo, stores) as (_, executor):
        (old,) = await stores.submit("old", session="a")
        await stores.ended(old)
        await stores.redis.xgroup_destroy(KEYS.runs, "workers")
        (new,) = await stores.submit("new", session="b")
        await stores.ended(new)
        await stores.nothing_held()
    assert executor.started == [old, new]
