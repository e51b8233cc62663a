"""Workers beside each other, and none at all: who gets what, and that nothing is dropped while nobody reads."""

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes import Product, ProductProcess, ProductProcesses
from waiting import eventually, holds
from worker_bench import KEYS, Bench, bench

from agentrun.bus.keys import GROUP
from agentrun.domain.states import RunStatus

MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {entrypoint: "neighbours_agent:run"}
  workers: {leaseSeconds: 2, drainSeconds: 1, concurrency: 50}
  reaper: {idleSeconds: 2, intervalSeconds: 1}
"""
AGENT = """
import asyncio, os
from pathlib import Path

async def run(ctx):
    word = ctx.inputs[0].text
    with open(Path(__file__).with_name("started"), "a") as file:
        file.write(f"{os.getpid()} {word}\\n")
    if word == "slow":
        while not Path(__file__).with_name("go").exists():
            await asyncio.sleep(0.05)
    yield "heard " + word
"""
MANY = 1500
"""More than a page of the sweep, a read, a trim or a look of the sampler takes at once."""


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


@pytest.fixture
def product(stores: Bench, tmp_path: Path) -> Product:
    for name, text in (("agentrun.yaml", MANIFEST), ("neighbours_agent.py", AGENT), ("keys", "")):
        (tmp_path / name).write_text(text)
    return Product(tmp_path / "agentrun.yaml", stores.database_url, stores.redis_url, tmp_path / "keys", namespace="test")


def started(product: Product) -> list[tuple[int, str]]:
    """The executions that have begun: process and message."""
    file = product.manifest.with_name("started")
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(process), word) for process, _, word in (line.partition(" ") for line in lines)]


async def test_rs_17_whatever_waits_while_there_is_no_worker_is_kept_and_done(
    stores: Bench, product: Product, product_processes: ProductProcesses
) -> None:
    await product_processes.scheduler(product)  # it publishes, and trims
    await stores.pool.execute(
        """WITH s AS (
               INSERT INTO sessions (id, agent, user_id, external_id)
               SELECT gen_random_uuid(), 'test/agent', 'alice', n::text FROM generate_series(1, $1) n RETURNING id
           ), r AS (
               INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, idempotency_key, body_hash, input)
               SELECT gen_random_uuid(), 'test/agent', 'alice', id, '', 0, id::text, '', '{}' FROM s RETURNING id, session_id
           )
           INSERT INTO inputs (id, run_id, held_by, session_id, position, content)
           SELECT gen_random_uuid(), id, id, session_id, 0, '"quick"' FROM r""",
        MANY,
    )

    async def all_wait() -> bool:
        return int(await stores.redis.xlen(KEYS.runs)) == MANY

    await eventually(all_wait, within=60, what="all of them are on the stream, though nobody reads")
    over = time.monotonic() + 4

    async def several_turns_of_the_scheduler() -> bool:
        return time.monotonic() > over

    await holds(all_wait, until=several_turns_of_the_scheduler, within=30, what="none is trimmed")
    worker = await product_processes.worker(product)

    async def unfinished() -> bool:
        return not await stores.pool.fetchval("SELECT count(*) FROM runs WHERE status <> 'succeeded'")

    await eventually(unfinished, within=120, what="all of them are done")
    assert len(started(product)) == MANY
    assert await worker.terminate() == 0


def consumers(worker: ProductProcess) -> list[str]:
    """What a worker calls itself on the bus. Redis 7.0 itself knows a consumer only once it was given something."""
    return re.findall(r'"consumer": "([^"]+)"', worker.log.read_text())


async def test_rs_19_two_workers_of_one_name_are_two_consumers_and_neither_does_the_others_work(
    stores: Bench, product: Product, product_processes: ProductProcesses
) -> None:
    same = {"AGENTRUN_POD_NAME": "worker-0"}
    first = await product_processes.worker(product, environment=same)
    (slow,) = await stores.submit("slow", session="a")
    await eventually(lambda: started(product) == [(first.pid, "slow")], within=20, what="the first one works")
    second = await product_processes.worker(product, environment=same)

    await eventually(lambda: len({*consumers(first), *consumers(second)}) == 2, within=20, what="each has a name of its own")
    quick = [run for number in range(40) for run in await stores.submit(f"quick {number}", session=f"s{number}")]
    assert set(await stores.ended(*quick, within=30)) == {RunStatus.SUCCEEDED}
    assert await stores.status(slow) is RunStatus.RUNNING
    seen = {one["name"].decode() for one in await stores.redis.xinfo_consumers(KEYS.runs, GROUP)}
    assert seen <= {*consumers(first), *consumers(second)}
    product.manifest.with_name("go").touch()

    assert await stores.ended(slow, within=20) == [RunStatus.SUCCEEDED]
    assert await stores.outcomes(slow) == ["finished"]
    assert [word for _, word in started(product)].count("slow") == 1
    assert len(started(product)) == 41
    assert [await process.terminate() for process in (first, second)] == [0, 0]
