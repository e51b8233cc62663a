"""AGENTRUN_SCALE_ROWS event rows (`make test-scale`) age through retention while submissions go on: the table stops growing."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from run_factory import submission
from scale_data import add_finished
from store_servers import PrivateServer
from waiting import eventually, rests

from agentrun.domain.follow_ups import Policy
from agentrun.maintenance.retention import Ages, Retention
from agentrun.store import follow_ups, migrations
from agentrun.store.pool import Pool, create_pool

ROWS = int(os.environ.get("AGENTRUN_SCALE_ROWS", "1000000"))
pytestmark = pytest.mark.scale

ROUNDS = 10
PIECES = 100
PAUSE_SECONDS = 0.005
QUIET_SECONDS = 6  # of each round, with the tables as full as at the beginning of its removals


async def submit_until(pool: Pool, stop: asyncio.Event) -> list[float]:
    """One message after the other, and how long each took, in seconds."""
    took = []
    while not stop.is_set():
        began = time.perf_counter()
        (done,) = await follow_ups.submit(pool, [submission(session=f"s{len(took)}-{began}")], Policy.MERGE)
        took.append(time.perf_counter() - began)
        assert done is not None
        await asyncio.sleep(PAUSE_SECONDS)
    return took


async def beside(pool: Pool, work: Callable[[], Awaitable[None]]) -> list[float]:
    """Submissions while something else is done."""
    stop = asyncio.Event()
    submitting = asyncio.create_task(submit_until(pool, stop))
    await work()
    stop.set()
    return await submitting


def p99(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99)] * 1000


async def size(pool: Pool) -> int:
    """In bytes, with its indexes."""
    return int(await pool.fetchval("SELECT pg_total_relation_size('messages')"))


async def test_event_rows_age_through_retention_while_submissions_go_on(private_postgres: PrivateServer) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    loader = await asyncpg.connect(private_postgres.url)
    await loader.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    await loader.execute("SELECT pg_reload_conf()")
    pool = await create_pool(private_postgres.url, 4)
    housekeeper = await create_pool(private_postgres.url, 1)
    ticking = Retention(housekeeper, Ages(60, 1, 1))
    runs = max(ROWS // ROUNDS // PIECES, 1)
    sizes, quiet, busy, full = [], [], [], 0

    async def clear() -> None:
        while await pool.fetchval("SELECT EXISTS (SELECT 1 FROM runs WHERE finished_at < now() - interval '1 hour')"):
            await ticking.tick()

    async def vacuums() -> int:
        """Of all tables so far, none at work; else not an answer."""
        assert not await pool.fetchval("SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE query LIKE 'autovacuum: %')")
        return int(await pool.fetchval("SELECT sum(autovacuum_count + autoanalyze_count) FROM pg_stat_user_tables"))

    async def naptimes() -> float:
        """Of autovacuum, a second each."""
        return time.monotonic()

    async def vacuumed() -> None:
        """Autovacuum has been here after the last removal, or the half minute is over: a busy machine may be late."""
        count = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'messages'"
        before = await pool.fetchval(count)

        async def again() -> bool:
            return bool(await pool.fetchval(count) > before)

        with contextlib.suppress(AssertionError):
            await eventually(again, within=30, what="autovacuum has been here")

    try:
        await beside(pool, lambda: asyncio.sleep(2))  # what is slow only once
        for number in range(ROUNDS):
            await add_finished(loader, first=1 + number * runs, runs=runs, events=PIECES, age="2 days")
            full = full or await size(pool)
            await rests(vacuums, turns=naptimes, count=3, within=60, what="autovacuum has done with what was loaded")
            quiet += await beside(pool, lambda: asyncio.sleep(QUIET_SECONDS))
            busy += await beside(pool, clear)
            await vacuumed()
            sizes.append(await size(pool))
        left = await pool.fetchval("SELECT count(*) FROM messages")
    finally:
        await loader.close()
        await pool.close()
        await housekeeper.close()
    print(
        f"\n{runs * ROUNDS * (PIECES + 2)} event rows in {ROUNDS} rounds; table in MB after each: {[one // 1_000_000 for one in sizes]}"
        f"\nsubmissions: {len(quiet)} quiet, p99 {p99(quiet):.1f} ms; {len(busy)} beside retention, p99 {p99(busy):.1f} ms;"
        f" ratio {p99(busy) / p99(quiet):.2f}"
    )
    assert left == 0, "all runs were older than a day"
    assert max(sizes) <= 2 * full, "the room of removed rows is used again"
