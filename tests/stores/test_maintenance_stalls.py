"""Postgres stalls, and a reaper is there: no living attempt is taken for a dead one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from fault_proxy import FaultProxy, fault_proxy
from processes import ProductProcesses
from run_factory import claimed, submitted
from store_servers import PrivateServer
from waiting import eventually
from whole_path import System, attempt_is_under_way, system

from agentrun.bus.connection import connect
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.domain.states import Outcome, RunStatus
from agentrun.maintenance.reaper import Limits, Reaper
from agentrun.store import attempts, runs, transitions
from agentrun.store.migrations import migrate
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import AttemptRef

KEYS = Keys("test", "agent")
LEASE_SECONDS = 2
LIMITS = Limits(lease_seconds=LEASE_SECONDS, idle_seconds=0.0, interval_seconds=1, max_lost_attempts=3)


@contextlib.asynccontextmanager
async def reaping(database_url: str, redis_url: str, limits: Limits = LIMITS) -> AsyncIterator[tuple[Reaper, WorkStream]]:
    pool = await create_pool(database_url, 4)
    redis = await connect(redis_url)
    stream = WorkStream(redis, KEYS)
    await stream.ensure_group()
    try:
        yield Reaper(pool, stream, EventStream(redis, KEYS), consumer="reaper-1", limits=limits), stream
    finally:
        await stream.aclose()
        await redis.aclose()
        pool.terminate()


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 3)
    yield made
    await made.close()


async def expired(pool: Pool, run_id: UUID) -> None:
    """As after a stall: nobody could renew."""
    await pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 ms' WHERE run_id = $1", run_id)


async def outcomes(pool: Pool, run_id: UUID) -> list[Outcome]:
    return [row.outcome for row in await attempts.of_run(pool, run_id)]


async def in_touch(reaper: Reaper, pool: Pool, stream: WorkStream) -> None:
    """Ticks until the reaper would take a dead attempt over."""
    probe = await submitted(pool, session="probe")
    await claimed(pool, probe.run_id, lease=0.001)

    async def taken() -> bool:
        await reaper.tick()
        return await outcomes(pool, probe.run_id) == [Outcome.LOST]

    await eventually(taken, within=20, what="the reaper has been in touch for one lease")
    await stream.read("w-probe", count=10, block_ms=0)


@pytest.mark.parametrize(
    ("loop", "statement"),
    [
        ("reap_leases", "lease_expires_at < now()"),
        ("reap_leases", "agentrun_1.take_over("),
        ("reap_entries", "lease_expires_at >= now()"),
        ("reap_entries", "agentrun_1.take_over("),
    ],
)
async def test_a_stall_between_the_reapers_contact_and_its_act_ends_no_living_attempt(
    loop: str, statement: str, pool: Pool, database_proxy: FaultProxy, redis_url: str
) -> None:
    async with reaping(database_proxy.url, redis_url) as (reaper, stream):
        run = await submitted(pool)
        await stream.publish([run.run_id])
        await stream.read("w-1", count=1, block_ms=0)
        claim = await claimed(pool, run.run_id, owner="w-1/n", lease=60)
        await in_touch(reaper, pool, stream)
        await expired(pool, run.run_id)

        held = database_proxy.hold_request(statement)
        act = asyncio.create_task(getattr(reaper, loop)())
        await held.seen(within=10)
        await asyncio.sleep(0.75 * LEASE_SECONDS)
        held.release()
        await act

        assert await outcomes(pool, run.run_id) == [Outcome.RUNNING]
        mine = AttemptRef(run.run_id, claim.epoch)
        assert mine in (await transitions.renew(pool, [mine], lease_seconds=30)).renewed


async def test_after_a_stall_a_dead_attempt_is_still_taken_over(pool: Pool, database_proxy: FaultProxy, redis_url: str) -> None:
    async with reaping(database_proxy.url, redis_url) as (reaper, stream):
        await in_touch(reaper, pool, stream)
        run = await submitted(pool)
        await claimed(pool, run.run_id, lease=0.001)
        held = database_proxy.hold_request("agentrun_1.take_over(")
        act = asyncio.create_task(reaper.reap_leases())
        await held.seen(within=10)
        await asyncio.sleep(0.75 * LEASE_SECONDS)
        held.release()
        await act

        async def taken() -> bool:
            await reaper.tick()
            return (await runs.look(pool, [run.run_id]))[run.run_id].status is RunStatus.PENDING

        await eventually(taken, within=20, what="the dead attempt is taken over")


async def test_two_loops_that_ask_at_the_same_time_do_not_break_each_others_contact(
    pool: Pool, database_url: str, redis_url: str
) -> None:
    async with reaping(database_url, redis_url) as (reaper, _):
        run = await submitted(pool)
        await claimed(pool, run.run_id, lease=0.001)

        async def taken() -> bool:
            await asyncio.gather(reaper.reap_leases(), reaper.reap_entries())
            return await outcomes(pool, run.run_id) == [Outcome.LOST]

        asked = asyncio.get_running_loop().time()
        while not await taken():
            assert asyncio.get_running_loop().time() - asked < 3 * LEASE_SECONDS, "one lease of contact is enough"


async def test_a_reaper_that_looks_seldom_notices_a_stall_all_the_same(pool: Pool, database_url: str, redis_url: str) -> None:
    """With a long intervalSeconds a stall of more than a lease would fit between two looks."""
    limits = Limits(lease_seconds=LEASE_SECONDS, idle_seconds=0.0, interval_seconds=60, max_lost_attempts=3)
    async with reaping(database_url, redis_url, limits) as (reaper, stream):
        assert reaper.limits.interval_seconds <= LEASE_SECONDS / 2
        run = await submitted(pool)
        await claimed(pool, run.run_id, owner="w-1/n", lease=60)
        await in_touch(reaper, pool, stream)
        await expired(pool, run.run_id)
        await asyncio.sleep(1.25 * LEASE_SECONDS)
        await reaper.reap_leases()

        assert await outcomes(pool, run.run_id) == [Outcome.RUNNING]


WHOLE_LEASE_SECONDS = 4
STALLS = ((0.35, False), (1.3, True), (1.3, False))
"""How many leases long, and whether the workers' connections are cut: then no renewal waits in Postgres when it goes on."""


@pytest.fixture
async def whole(
    private_postgres: PrivateServer, redis_url: str, product_processes: ProductProcesses, tmp_path: Path
) -> AsyncIterator[System]:
    await migrate(private_postgres.url, say=lambda _: None)
    async with system(private_postgres.url, redis_url, product_processes, tmp_path) as made:
        text = made.product.manifest.read_text()
        changed = text.replace("leaseSeconds: 2", f"leaseSeconds: {WHOLE_LEASE_SECONDS}")
        made.product.manifest.write_text(changed.replace("idleSeconds: 2", f"idleSeconds: {WHOLE_LEASE_SECONDS}"))
        yield made


@pytest.mark.slow
async def test_stalls_of_postgres_lose_no_attempt_of_a_healthy_worker(whole: System, private_postgres: PrivateServer) -> None:
    async with fault_proxy(private_postgres.url) as proxy:
        await asyncio.gather(whole.gateway(), whole.scheduler(), *(whole.worker(database_url=proxy.url) for _ in range(2)))
        ids = [await whole.submit("[[slow ms=100]] [[deltas n=200]]", session=f"s{number}") for number in range(6)]
        for run_id in ids:
            await attempt_is_under_way(whole, run_id, events=2)
        for leases, cut in STALLS:
            await private_postgres.pause()
            async with proxy.outage() if cut else contextlib.nullcontext():
                await asyncio.sleep(leases * WHOLE_LEASE_SECONDS)
                await private_postgres.resume()
            for run_id in ids:
                stored = await whole.stored(run_id)
                await attempt_is_under_way(whole, run_id, events=stored + 1)

        for run_id in ids:
            assert (await whole.follow(run_id)).transcript.end == "completed"
            assert await whole.outcomes(run_id) == ["finished"]
    assert await whole.has_no_holes()
