"""What a Redis can do to a whole data plane without going away for good: fail over, lose everything, be cut, refuse."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest
import redis.asyncio
from fault_proxy import fault_proxy
from processes import ProductProcess, ProductProcesses
from store_servers import PrivateServer
from waiting import eventually, holds
from whole_path import LEASE_SECONDS, System, system

from agentrun.bus.keys import Keys

KEYS = Keys("default", "agent")
GROUP = "workers"


@pytest.fixture
async def client(private_redis: PrivateServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(private_redis.url) as made:
        yield made


@pytest.fixture
async def whole(
    database_url: str, private_redis: PrivateServer, product_processes: ProductProcesses, tmp_path: Path
) -> AsyncIterator[System]:
    async with system(database_url, private_redis.url, product_processes, tmp_path) as made:
        patient(made)
        yield made


def patient(whole: System) -> None:
    """Leases that a slow machine does not lose, so that each attempt here is the only one."""
    manifest = whole.product.manifest
    text = manifest.read_text()
    for name in ("leaseSeconds", "idleSeconds"):
        assert f"{name}: {LEASE_SECONDS}" in text
        text = text.replace(f"{name}: {LEASE_SECONDS}", f"{name}: 15")
    manifest.write_text(text)


async def running(whole: System, workers: int = 2) -> list[ProductProcess]:
    """Gateway, scheduler and workers; answers the workers."""
    _, _, *started = await asyncio.gather(whole.gateway(), whole.scheduler(), *(whole.worker() for _ in range(workers)))
    return started


async def all_succeed(whole: System, runs: list[UUID], *, within: float) -> None:
    async def they_have() -> bool:
        return all([await whole.status(one) == "succeeded" for one in runs])

    await eventually(they_have, within=within, what=f"{len(runs)} runs are done")


def troubles(process: ProductProcess) -> list[str]:
    """The warnings and errors that it has logged."""
    lines = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
    return [line["event"] for line in lines if line["level"] in ("warning", "error")]


def clock(seconds: float) -> Callable[[], Awaitable[bool]]:
    """True once so many seconds have passed from now."""
    over = time.monotonic() + seconds

    async def is_over() -> bool:
        return time.monotonic() > over

    return is_over


@pytest.mark.slow
async def test_rs_09_a_minute_without_work_is_one_blocked_read_after_the_other_and_no_complaint(
    whole: System, client: redis.asyncio.Redis, product_processes: ProductProcesses
) -> None:
    """No connection is made anew, and each read lasts its whole second. (That one may last longer than the client library's own limit is
    tested with the stream's functions.)
    """
    workers = await running(whole)

    async def reading() -> int:
        return len([one for one in await client.client_list() if one["cmd"] == "xreadgroup" and "b" in one["flags"]])

    async def one_each() -> bool:
        return await reading() == len(workers)

    async def no_more() -> bool:
        return await reading() <= len(workers)

    async def reads() -> int:
        return int((await client.info("commandstats"))["cmdstat_xreadgroup"]["calls"])

    async def connections() -> int:
        return int((await client.info("stats"))["total_connections_received"])

    await eventually(one_each, within=20, what="each worker waits")
    await holds(no_more, until=clock(5), within=30, what="one read per worker, and all that is made once is made")
    made, began, first = await connections(), time.monotonic(), await reads()
    await holds(no_more, until=clock(60), within=120, what="one read per worker")
    seconds, count = time.monotonic() - began, await reads() - first
    assert await connections() == made
    assert seconds / 3 <= count / len(workers) <= seconds + 2
    await eventually(one_each, within=20, what="each worker still waits")
    assert [troubles(process) for process in product_processes.started] == [[]] * len(product_processes.started)
    await all_succeed(whole, [await whole.submit("x")], within=20)


@pytest.mark.parametrize("seconds", [6, pytest.param(20, marks=pytest.mark.slow)])
async def test_rs_22_a_demoted_redis_loses_nothing_and_nobody_needs_a_restart(
    whole: System, client: redis.asyncio.Redis, product_processes: ProductProcesses, seconds: float
) -> None:
    """As after a fail-over: the old primary answers and refuses every write, for some seconds; then it is the primary again."""
    workers = await running(whole)
    before = await whole.submit("[[slow ms=30]] [[deltas n=150]]", session="before")
    following = asyncio.create_task(whole.follow(before))

    async def under_way() -> bool:
        return await whole.stored(before, kinds=("text_delta",)) > 2

    await eventually(under_way, within=20, what="a run is under way")
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    meanwhile: list[UUID] = []

    async def accepted() -> bool:
        meanwhile.append(await whole.submit("x", session=f"m{len(meanwhile)}"))
        return True

    await holds(accepted, until=clock(seconds), within=90, what="messages are accepted")
    assert len(meanwhile) > 3
    await client.execute_command("REPLICAOF", "NO", "ONE")

    after = await whole.submit("y", session="after")
    await all_succeed(whole, [before, *meanwhile, after], within=60)
    seen = await following
    assert seen.transcript.text == await whole.log_text(before)
    assert await whole.has_no_holes()
    assert [await whole.outcomes(one) for one in (*meanwhile, after)] == [["finished"]] * (len(meanwhile) + 1)
    assert all(process.returncode is None for process in product_processes.started)
    assert [(await worker.get("/healthz")).status_code for worker in workers] == [200, 200]


async def test_rs_06_after_a_flush_the_group_is_there_again_and_all_that_waited_is_done_once(
    whole: System, client: redis.asyncio.Redis
) -> None:
    workers = await running(whole)
    began = time.monotonic()
    runs = []
    for number in range(5):
        runs.append(await whole.submit("x", session=f"s{number}"))
        await client.flushall()
    await all_succeed(whole, runs, within=30)

    async def group_is_there() -> bool:
        return [one["name"] for one in await client.xinfo_groups(KEYS.runs)] == [GROUP.encode()]

    await eventually(group_is_there, within=30, what="the group is there again")
    assert [await whole.outcomes(run) for run in runs] == [["finished"]] * 5
    assert whole.provider.counts["calls"] == 5
    for worker in workers:
        assert len(troubles(worker)) <= 1 + time.monotonic() - began, troubles(worker)


async def test_rs_06_an_error_that_stays_is_neither_asked_for_nor_said_all_the_time(
    whole: System, client: redis.asyncio.Redis
) -> None:
    workers = await running(whole)
    await client.execute_command("ACL", "SETUSER", "default", "-xreadgroup")
    run = await whole.submit("x")

    async def refused() -> int:
        stats = await client.info("commandstats")
        return int(stats.get("cmdstat_xreadgroup", {}).get("rejected_calls", 0))

    await eventually(refused, within=10, what="reads are refused")
    before, began = await refused(), time.monotonic()

    async def waits() -> bool:
        return await whole.status(run) == "pending"

    await holds(waits, until=clock(5), within=30, what="the run waits")
    seconds = time.monotonic() - began
    assert await refused() - before <= 5 * len(workers) * seconds
    for worker in workers:
        assert 1 <= len(troubles(worker)) <= 2 + seconds, troubles(worker)
    await client.execute_command("ACL", "SETUSER", "default", "+xreadgroup")
    await all_succeed(whole, [run], within=30)


@pytest.mark.parametrize("seconds", [5, pytest.param(10, marks=pytest.mark.slow)])
async def test_rs_23_reading_goes_on_after_each_of_two_outages(
    database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path, seconds: float
) -> None:
    async with fault_proxy(redis_url) as proxy, system(database_url, proxy.url, product_processes, tmp_path) as whole:
        patient(whole)
        (worker,) = await running(whole, workers=1)
        for outage in range(2):
            async with proxy.outage():
                run = await whole.submit("x", session=f"s{outage}")

                async def lives_and_waits(run: UUID = run) -> bool:
                    return (await worker.get("/healthz")).status_code == 200 and await whole.status(run) == "pending"

                await holds(lives_and_waits, until=clock(seconds), within=60, what="the worker lives, the run waits")
            await all_succeed(whole, [run], within=15)
        assert worker.returncode is None
        assert whole.provider.counts["calls"] == 2
