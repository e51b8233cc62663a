"""A run whose workers died under it gets its last chance alone, so that it can take nobody with it and nobody takes it along."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from processes import Product, ProductProcesses
from run_factory import claimed, submission
from waiting import eventually
from worker_bench import KEYS, LIMITS, Bench, bench, echo, worker

from agentrun.agents.base import Context, Result
from agentrun.domain.states import RunStatus
from agentrun.store import transitions
from agentrun.store.transitions import Reason, TakeOver

LAST = LIMITS.max_lost_attempts - 1


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


class Doors:
    """An agent whose runs each wait behind a door named like their message."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self.active = 0
        self.most_beside_last = 0
        self._doors: dict[str, asyncio.Event] = {}

    def open(self, name: str) -> None:
        self._doors.setdefault(name, asyncio.Event()).set()

    async def __call__(self, context: Context) -> Result:
        name = context.inputs[0].text
        self.inside.add(name)
        self.active += 1
        if "last" in self.inside:
            self.most_beside_last = max(self.most_beside_last, self.active - 1)
        await self._doors.setdefault(name, asyncio.Event()).wait()
        await asyncio.sleep(0.05)
        self.active -= 1
        self.inside.discard(name)
        return Result(name)

    async def are(self, *names: str) -> None:
        await eventually(lambda: self.inside == set(names), within=5, what=f"{names} run")


async def often_lost(stores: Bench, text: str, *, session: str, times: int = LAST) -> UUID:
    """A run that has lost attempts behind it and waits; nobody knows of it yet."""
    (run,) = await stores.submit(text, session=session, publish=False)
    for _ in range(times):
        attempt = await claimed(stores.pool, run, owner="dead/n")
        await stores.lease_runs_out(run)
        (taken,) = await transitions.take_over(stores.pool, [TakeOver(run, Reason.LOST, epoch=attempt.epoch)])
        assert taken.status is RunStatus.PENDING
    return run


async def held(stores: Bench) -> int:
    return int((await stores.redis.xpending(KEYS.runs, "workers"))["pending"])


async def delivered(stores: Bench, count: int) -> None:
    async def they_are() -> bool:
        return await held(stores) == count

    await eventually(they_are, within=5, what=f"{count} entries are delivered")


async def test_a_run_at_its_last_chance_waits_for_an_empty_worker_and_has_it_for_itself(stores: Bench) -> None:
    doors = Doors()
    async with worker(doors, stores) as (made, executor):
        await stores.submit("busy", session="a")
        await doors.are("busy")
        last = await often_lost(stores, "last", session="b")
        await stores.work.publish([last])
        await delivered(stores, 2)
        await eventually(lambda: made._consumer.waits_to_be_empty, within=5, what="the last chance waits")
        await asyncio.sleep(0.3)  # the read that was on its way then is the last one
        others = [(await stores.submit(f"other {n}", session=f"o{n}"))[0] for n in range(3)]
        until = time.monotonic() + 1.5 * LIMITS.lease_seconds
        while time.monotonic() < until:  # its entry is kept, so no reaper finds it; nothing more is read
            pending = await stores.redis.xpending_range(KEYS.runs, "workers", "-", "+", 10)
            assert len(pending) == 2
            assert max(one["time_since_delivered"] for one in pending) < LIMITS.lease_seconds * 1000
            await asyncio.sleep(0.1)
        assert doors.inside == {"busy"} and await stores.status(last) is RunStatus.PENDING
        doors.open("busy")
        await doors.are("last")
        await asyncio.sleep(0.5)
        assert doors.inside == {"last"} and await held(stores) == 1
        doors.open("last")
        await doors.are("other 0", "other 1", "other 2")
        assert made.stalled() is None
        for n in range(3):
            doors.open(f"other {n}")
        await stores.ended(last, *others)
        await stores.nothing_held()
    assert doors.most_beside_last == 0
    assert executor.started[1] == last and len(executor.started) == 5


@pytest.mark.parametrize(("lost", "most"), [(LAST - 1, LIMITS.max_lost_attempts), (0, 1)])
async def test_a_run_with_chances_left_or_with_only_one_at_all_runs_beside_others(stores: Bench, lost: int, most: int) -> None:
    doors = Doors()
    async with worker(doors, stores, limits=replace(LIMITS, max_lost_attempts=most)):
        await stores.submit("busy", session="a")
        await doors.are("busy")
        await stores.work.publish([await often_lost(stores, "once", session="b", times=lost)])
        await doors.are("busy", "once")


async def test_several_last_chances_run_one_after_the_other(stores: Bench) -> None:
    doors = Doors()
    runs = [await often_lost(stores, "last", session=f"s{n}") for n in range(3)]
    await stores.work.publish(runs)
    doors.open("last")
    async with worker(doors, stores, limits=replace(LIMITS, capacity=16)) as (_, executor):
        assert await stores.ended(*runs) == [RunStatus.SUCCEEDED] * 3
        await stores.nothing_held()
    assert sorted(executor.started) == sorted(runs) and doors.most_beside_last == 0


async def test_a_worker_that_stops_gives_back_the_last_chances_that_wait_in_it(stores: Bench) -> None:
    doors = Doors()
    async with worker(doors, stores) as (made, executor):
        (busy,) = await stores.submit("busy", session="a")
        await doors.are("busy")
        last = await often_lost(stores, "last", session="b")
        await stores.work.publish([last])
        await delivered(stores, 2)
        stopping = asyncio.create_task(made.stop(5.0))
        async with worker(echo, stores) as (_, other):
            assert await stores.ended(last) == [RunStatus.SUCCEEDED]
            doors.open("busy")
            await stopping
        assert other.started == [last] and executor.started == [busy]
    await stores.nothing_held()


async def test_a_run_that_is_cancelled_while_it_waits_for_its_last_chance_is_not_executed(stores: Bench) -> None:
    doors = Doors()
    async with worker(doors, stores) as (_, executor):
        (busy,) = await stores.submit("busy", session="a")
        await doors.are("busy")
        last = await often_lost(stores, "last", session="b")
        await stores.work.publish([last])
        await delivered(stores, 2)
        await transitions.take_over(stores.pool, [TakeOver(last, Reason.CANCELLED)])
        doors.open("busy")
        await stores.ended(busy)
        await stores.nothing_held()
        (later,) = await stores.submit("later", session="c")
        doors.open("later")
        await stores.ended(later)
    assert executor.started == [busy, later]


MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent, namespace: default}
spec:
  agent: {entrypoint: "last_chance_agent:run"}
  workers: {leaseSeconds: 2, drainSeconds: 1, concurrency: 4}
  reaper: {idleSeconds: 2, intervalSeconds: 1}
"""
AGENT = """
import asyncio, os, pathlib

async def run(ctx):
    if ctx.inputs[0].text == "die":
        with pathlib.Path(__file__).with_name("calls").open("a") as calls:
            calls.write("a call of the model\\n")
        await asyncio.sleep(0.5)
        os._exit(9)
    await asyncio.sleep(2)
    yield "heard " + ctx.inputs[0].text
"""


async def test_rs_15_a_run_that_kills_every_worker_is_put_aside_alone(
    stores: Bench, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    """Three healthy runs share each worker with it, and all of them end well."""
    for name, text in (("agentrun.yaml", MANIFEST), ("last_chance_agent.py", AGENT), ("keys", "")):
        (tmp_path / name).write_text(text)
    product = Product(tmp_path / "agentrun.yaml", stores.database_url, stores.redis_url, tmp_path / "keys", namespace="default")
    await product_processes.scheduler(product)
    texts = ["die", "good", "good", "good"]
    group = [replace(submission(text, session=f"s{n}"), agent="default/agent") for n, text in enumerate(texts)]
    bad, *good = [one.run_id for one in await transitions.submit(stores.pool, group)]

    async def keep_a_worker() -> None:
        while True:
            one = await product_processes.worker(product, ready=False)
            await one.wait(within=60)

    keeping = asyncio.create_task(keep_a_worker())
    try:
        assert await stores.ended(bad, *good, within=60) == [RunStatus.FAILED, *[RunStatus.SUCCEEDED] * 3]
        await stores.nothing_held(within=30)
    finally:
        keeping.cancel()
    assert await stores.outcomes(bad) == ["lost"] * 3
    assert (tmp_path / "calls").read_text().count("a call") == 3
    assert (await stores.error(bad))["type"] == "lost_too_often"
    assert await stores.pool.fetchval("SELECT count(*) FROM dead_letters") == 1
