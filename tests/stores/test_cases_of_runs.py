"""Failures of systems like this one, retold: writers beside writers, cancels beside claims, entries before their rows or without a body."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from run_factory import claimed, event, submission, submitted
from waiting import eventually
from worker_bench import KEYS, LIMITS, Bench, bench, echo, say, worker

from agentrun.agents.base import Context, Result, Usage
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.maintenance.reaper import Limits, Reaper
from agentrun.maintenance.sweep import Sweep
from agentrun.store import runs, transitions
from agentrun.store.transitions import Claim, Finish, Reason, TakeOver
from agentrun.telemetry import REGISTRY
from agentrun.worker.endings import Retries


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


# One run, many writers


@pytest.mark.parametrize("case", ["pg_03", "pg_07"])
async def test_pg_03_pg_07_eight_writers_of_one_run_share_its_numbers_without_a_hole(stores: Bench, case: str) -> None:
    """As tools that run side by side: ten events each, and a checkpoint and a booking between them (pg_03)."""

    async def write(context: Context, item: int) -> None:
        for number in range(10):
            await context.emit(Kind.TEXT_DELTA, {"item": item, "part": 0, "text": f"{number} "})
            if case == "pg_03":
                await context.book(Usage("m", "p", input_tokens=1, output_tokens=1))
                await context.checkpoint({"item": item, "number": number})
            await asyncio.sleep(0)

    async def agent(context: Context) -> Result:
        await asyncio.gather(*(write(context, item) for item in range(8)))
        return Result("done")

    async with worker(agent, stores):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    log = await stores.log(run)
    assert [one.seq for one in log] == list(range(len(log)))
    written = [json.loads(one.data) for one in log if one.kind is Kind.TEXT_DELTA]
    assert len(written) == 80
    for item in range(8):
        assert [one["text"] for one in written if one["item"] == item] == [f"{number} " for number in range(10)]
    assert await stores.pool.fetchval("SELECT count(*) FROM ledger") == (80 if case == "pg_03" else 0)


BAD = [
    ("nul \x00 in it", "nul \ufffd in it"),
    ("high \ud83d alone", "high \ufffd alone"),
    ("low \ude00 alone", "low \ufffd alone"),
    ("an emoji 😀", "an emoji 😀"),
    ("literal \\u0000 stays", "literal \\u0000 stays"),
]


async def test_pg_05_what_cannot_be_stored_is_replaced_visibly_and_alike_everywhere(stores: Bench) -> None:
    async def agent(context: Context) -> Result:
        await context.emit(Kind.ITEM_ADDED, {"item": 0, "type": "message"})
        for text, _ in BAD:
            await context.emit(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": text})
        content = {text: [text, float("nan"), float("inf")] for text, _ in BAD}
        await context.emit(Kind.TOOL_RESULT, {"item": 1, "call_id": "c", "name": "t", "content": content, "is_error": False})
        await context.checkpoint({text: text for text, _ in BAD})
        return Result([text for text, _ in BAD], [{"said": text} for text, _ in BAD])

    async with worker(agent, stores):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()  # the last event goes out after the end is stored
        streamed = [fields for _, fields in await stores.redis.xrange(KEYS.run(run))]
    log = await stores.log(run)
    told = [json.loads(one.data)["text"] for one in log if one.kind is Kind.TEXT_DELTA]
    assert told == [mended for _, mended in BAD]
    (result,) = [json.loads(one.data)["content"] for one in log if one.kind is Kind.TOOL_RESULT]
    assert result == {mended: [mended, "nan", "inf"] for _, mended in BAD}
    stored = json.loads(await stores.pool.fetchval("SELECT result FROM runs WHERE id = $1", run))
    assert stored["output"] == told and [one["said"] for one in stored["messages"]] == told
    assert [one.encode() for one in log] == [next(iter(fields.values())) for fields in streamed], "stream and log say the same"


# Cancel


async def test_st_05_of_a_cancel_and_a_claim_or_an_end_at_once_what_is_answered_stays(stores: Bench) -> None:
    for number in range(200):
        run = (await submitted(stores.pool, session=f"s{number}")).run_id
        cancel, claim = TakeOver(run, Reason.CANCELLED), Claim(run, 0, "w/n")
        if number % 2:
            (cancelled,), mine = await asyncio.gather(
                transitions.take_over(stores.pool, [cancel]), transitions.claim(stores.pool, [claim], lease_seconds=30)
            )
            assert cancelled.ok
            ended = []
            if mine:
                ended = await transitions.finish(stores.pool, [Finish(run, 1, RunStatus.SUCCEEDED, result="{}")])
        else:
            await claimed(stores.pool, run)
            (cancelled,), ended = await asyncio.gather(
                transitions.take_over(stores.pool, [cancel]),
                transitions.finish(
                    stores.pool, [Finish(run, 1, RunStatus.SUCCEEDED, result="{}", events=[event(0, Kind.COMPLETED)])]
                ),
            )
        assert not (cancelled.ok and any(one.ok for one in ended)), "both were told that they won"
        assert await stores.status(run) is (RunStatus.CANCELLED if cancelled.ok else RunStatus.SUCCEEDED)
        (now,) = (await runs.look(stores.pool, [run])).values()
        assert now.owner is None, "no attempt runs on"


async def test_st_06_a_cancel_amid_three_tools_ends_them_all_and_nothing_is_added_later(stores: Bench) -> None:
    working, ended = set(), set()

    async def tool(context: Context, number: int) -> None:
        working.add(number)
        try:
            await asyncio.sleep(60)
            await context.emit(Kind.TEXT_DELTA, {"item": number, "part": 0, "text": "late"})
        finally:
            ended.add(number)

    async def agent(context: Context) -> Result:
        await context.book(Usage("m", "p", input_tokens=10, output_tokens=5))
        await asyncio.gather(*(tool(context, number) for number in range(3)))
        await context.book(Usage("m", "p", input_tokens=10, output_tokens=5))
        return Result("done")

    async with worker(agent, stores) as (made, _):
        (run,) = await stores.submit("x")
        await eventually(lambda: working == {0, 1, 2}, within=5, what="three tools work")
        (taken,) = await transitions.take_over(stores.pool, [TakeOver(run, Reason.CANCELLED)])
        assert taken.ok and taken.owner
        before = await stores.log(run)
        control = Control(stores.redis, KEYS)
        await control.send(taken.owner.rpartition("/")[0], ControlMessage(run, taken.epoch, ControlAction.CANCEL))
        await eventually(lambda: ended == {0, 1, 2} and made.active == 0, within=5, what="all tools have ended")
        await stores.nothing_held()
    assert await stores.log(run) == before
    assert await stores.outcomes(run) == ["interrupted"]
    assert await stores.pool.fetchval("SELECT count(*) FROM runs WHERE status IN ('pending', 'running')") == 0
    rows = await stores.pool.fetch("SELECT input_tokens, output_tokens FROM ledger")
    assert [tuple(row) for row in rows] == [(10, 5)], "what was spent is booked, once"


# Entries and rows


async def test_st_02_an_entry_that_comes_before_its_row_is_no_run_and_the_run_comes_all_the_same(stores: Bench) -> None:
    """The product publishes after the commit; whoever does not is forgiven."""
    sweep = Sweep(stores.pool, stores.redis, stores.work, idle_seconds=2)
    async with worker(echo, stores) as (_, executor):
        async with stores.pool.acquire() as conn:
            transaction = conn.transaction()
            await transaction.start()
            (early,) = await transitions.submit(conn, [submission("early")])
            await stores.work.publish([early.run_id])
            await stores.nothing_held()
            assert executor.started == []
            await transaction.commit()
        await sweep.tick()
        assert await stores.ended(early.run_id) == [RunStatus.SUCCEEDED]

        async with stores.pool.acquire() as conn:
            transaction = conn.transaction()
            await transaction.start()
            (never,) = await transitions.submit(conn, [submission("never", session="s2")])
            await stores.work.publish([never.run_id])
            await transaction.rollback()
        await stores.nothing_held()
        await sweep.tick()
    assert executor.started == [early.run_id]
    assert await runs.look(stores.pool, [never.run_id]) == {}


# The queue


async def test_rs_03_the_run_of_an_entry_without_a_body_is_done_with_its_neighbours(stores: Bench) -> None:
    """A worker has read three entries and is gone; one of them is trimmed away meanwhile."""

    def deleted() -> float:
        return REGISTRY.get_sample_value("agentrun_entries_total", {"action": "deleted"}) or 0.0

    three = [(await stores.submit("x", session=f"s{number}"))[0] for number in range(3)]
    _, second, _ = await stores.work.read("gone", count=3, block_ms=0)
    await stores.redis.xdel(KEYS.runs, second.entry_id)
    before = deleted()
    limits = Limits(lease_seconds=2, idle_seconds=0.0, interval_seconds=1, max_lost_attempts=3)
    reaper = Reaper(stores.pool, stores.work, EventStream(stores.redis, KEYS), consumer="reaper", limits=limits)
    sweep = Sweep(stores.pool, stores.redis, stores.work, idle_seconds=0)
    async with worker(echo, stores) as (made, executor):

        async def kept_house() -> bool:
            await reaper.reap_entries()
            await sweep.tick()
            return {await stores.status(run) for run in three} == {RunStatus.SUCCEEDED}

        await eventually(kept_house, within=20, what="all three are done")
        await stores.nothing_held()
        assert made.stalled() is None
    assert sorted(executor.started) == sorted(three)
    assert deleted() == before + 1


async def test_qw_07_runs_that_always_fail_hold_up_no_good_one(stores: Bench) -> None:
    """They come first and would be tried again at once, if retries did not wait."""
    tries: list[Any] = []

    async def agent(context: Context) -> Result:
        if context.inputs[0].text == "bad":
            tries.append(context.run.id)
            raise ConnectionError("the provider is away")
        await say(context, "ok")
        return Result("ok")

    patient = replace(LIMITS, retries=Retries(3, 600.0, lambda: 1.0))
    bad = [(await stores.submit("bad", session=f"b{n}", publish=False))[0] for n in range(20)]
    good = [(await stores.submit("good", session=f"g{n}", publish=False))[0] for n in range(100)]
    await stores.work.publish([*bad, *good])
    async with worker(agent, stores, limits=patient):
        assert await stores.ended(*good, within=60) == [RunStatus.SUCCEEDED] * 100
        assert sorted(tries) == sorted(bad), "each was tried once and waits"
        rows = await stores.pool.fetch("SELECT status, not_before IS NOT NULL AS waits FROM runs WHERE id = ANY ($1)", bad)
        assert {(row["status"], row["waits"]) for row in rows} == {("pending", True)}
