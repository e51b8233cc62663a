"""Agents that send rubbish, never end, or leave something behind: their own run fails in words, and nobody else's is late for it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Product, ProductProcesses
from waiting import eventually
from worker_bench import LIMITS, Bench, bench, echo, worker

from agentrun.agents.base import Context, Result
from agentrun.agents.generator import GeneratorExecutor
from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.worker.endings import Retries

ONCE = replace(LIMITS, max_run_seconds=1.0, retries=Retries(0, 0.05, lambda: 0.0))


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


RUBBISH: list[tuple[Kind, Any]] = [
    (Kind.TEXT_DELTA, {}),
    (Kind.TEXT_DELTA, {"item": 0, "part": 0}),
    (Kind.TEXT_DELTA, {"item": "0", "text": "x"}),
    (Kind.TEXT_DELTA, {"item": True, "text": "x"}),
    (Kind.TEXT_DELTA, {"item": -1, "text": "x"}),
    (Kind.TEXT_DELTA, {"item": 10**9, "text": "x"}),
    (Kind.TEXT_DONE, {"item": 0, "text": None}),
    (Kind.ITEM_ADDED, {"item": 0, "type": "picture"}),
    (Kind.ITEM_ADDED, {"type": "message"}),
    (Kind.TOOL_ARGUMENTS_DONE, {"item": 0, "arguments": {}}),
    (Kind.ITEM_DONE, {"item": 1.5}),
]


@pytest.mark.parametrize(("kind", "data"), RUBBISH, ids=str)
async def test_an_event_that_no_reader_could_use_is_not_sent_and_fails_its_run_in_words(
    stores: Bench, kind: Kind, data: Any
) -> None:
    async def agent(context: Context) -> Result:
        if context.inputs[0].text == "rubbish":
            await context.emit(kind, data)
        return await echo(context)

    async with worker(agent, stores):
        (bad,), (good,) = await stores.submit("rubbish", session="a"), await stores.submit("hello", session="b")
        assert await stores.ended(bad, good) == [RunStatus.FAILED, RunStatus.SUCCEEDED]
    error = await stores.error(bad)
    assert error["type"] == "invalid_event" and kind.value in error["message"] and "`" in error["message"]
    assert await stores.kinds(bad) == ["created", "started", "failed"]


@pytest.mark.parametrize("way", ["text", "events", "nothing"])
async def test_an_agent_that_never_ends_is_ended_with_a_whole_log_and_its_neighbours_flow(stores: Bench, way: str) -> None:
    """It never waits for anything of its own."""

    async def endless(context: Context) -> Any:
        if context.inputs[0].text == "hello":
            yield "hello"
            return
        number = 0
        while True:
            number += 1
            if way == "text":
                yield "and so on "
            elif way == "events":
                yield (Kind.ITEM_ADDED, {"item": number, "type": "message"})
            else:
                await asyncio.sleep(0)

    executor = GeneratorExecutor(endless)
    async with worker(executor.execute, stores, limits=ONCE):
        (bad,) = await stores.submit("for ever", session="a")
        neighbours = [(await stores.submit("hello", session=f"n{n}"))[0] for n in range(6)]
        assert await stores.ended(*neighbours) == [RunStatus.SUCCEEDED] * 6
        assert await stores.ended(bad, within=20) == [RunStatus.FAILED]
        await stores.nothing_held()
    assert (await stores.error(bad))["type"] == "timeout"
    text = await stores.text(bad)  # looks for holes, too
    assert text == "and so on " * (len(text) // 10)
    assert bool(text) == (way == "text")


async def test_a_thread_that_never_ends_keeps_neither_its_run_nor_the_next_ones(stores: Bench) -> None:
    free = threading.Event()

    async def agent(context: Context) -> Result:
        if context.inputs[0].text == "thread":
            await asyncio.to_thread(free.wait)
        return await echo(context)

    try:
        async with worker(agent, stores, limits=ONCE) as (made, _):
            (bad,) = await stores.submit("thread", session="a")
            assert await stores.ended(bad, within=20) == [RunStatus.FAILED]
            await eventually(lambda: made.active == 0 and not made.left_behind, within=5, what="its slot is free")
            (next_one,) = await stores.submit("hello", session="a")
            assert await stores.ended(next_one) == [RunStatus.SUCCEEDED]
            assert made.cut_short, "the process does not wait for the thread when it ends"
    finally:
        free.set()
    assert (await stores.error(bad))["type"] == "timeout"


async def test_events_of_nearly_a_megabyte_each_arrive_whole_and_hold_up_nobody(stores: Bench) -> None:
    large = "x" * 999_000

    async def agent(context: Context) -> Result:
        if context.inputs[0].text == "large":
            for item in range(20):
                await context.emit(Kind.TEXT_DONE, {"item": item, "part": 0, "text": large})
            return Result("done")
        return await echo(context)

    async with worker(agent, stores):
        (run,) = await stores.submit("large", session="a")
        neighbours = [(await stores.submit("hello", session=f"n{n}"))[0] for n in range(6)]
        assert await stores.ended(run, *neighbours, within=30) == [RunStatus.SUCCEEDED] * 7
    log = await stores.log(run)
    assert [event.seq for event in log] == list(range(23))
    assert all(json.loads(event.data)["text"] == large for event in log if event.kind is Kind.TEXT_DONE)


LEAVING = """
import asyncio, gc

async def source(done):
    try:
        for number in range(1000):
            yield number
    finally:
        await asyncio.sleep(0.2)
        print("the source is closed", flush=True)

async def stream(done):
    numbers = source(done)
    try:
        async for number in numbers:
            yield number
    finally:
        await numbers.aclose()
        print("the stream is closed", flush=True)

async def run(ctx):
    if ctx.inputs[0].text == "collect":
        gc.collect()
    else:  # as an error does whose traceback holds the frame that holds it
        cycle = [stream(None)]
        await anext(cycle[0])
        cycle.append(cycle)
    yield "ok"
"""
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent, namespace: test}
spec:
  agent: {entrypoint: "leaving_agent:run"}
  workers: {drainSeconds: 5}
"""


async def test_generators_that_an_agent_leaves_open_are_closed_in_order(
    stores: Bench, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    """While the worker works, as far as the collector finds them, and the rest when it stops."""
    for name, text in (("agentrun.yaml", MANIFEST), ("leaving_agent.py", LEAVING), ("keys", "")):
        (tmp_path / name).write_text(text)
    product = Product(tmp_path / "agentrun.yaml", stores.database_url, stores.redis_url, tmp_path / "keys", namespace="test")
    started = await product_processes.worker(product)

    def closed() -> tuple[int, int]:
        log = started.log.read_text()
        return log.count("the source is closed"), log.count("the stream is closed")

    for text in ("leave", "collect"):
        (run,) = await stores.submit(text, session=text)
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    await eventually(lambda: closed() == (1, 1), within=5, what="both are closed")
    (run,) = await stores.submit("leave", session="last")
    assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    await stores.nothing_held()
    assert await started.terminate() == 0
    assert closed() == (2, 2)
    assert "already running" not in started.log.read_text()
