"""A reaper as a process that looks at forgotten entries and at nothing else: what it leaves behind, no scan of leases mends."""

import asyncio
import multiprocessing
from multiprocessing.context import ForkServerProcess

from waiting import eventually

IDLE_MS = 1


async def reap_entries_until_killed(database_url: str, redis_url: str, *, failpoints: str) -> None:
    """Starts it and waits until it has killed itself at the failpoint."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_main, args=(database_url, redis_url, failpoints), daemon=True
    )
    process.start()
    try:
        await eventually(lambda: process.exitcode is not None, within=20, what=f"the reaper dies at {failpoints}")
        assert process.exitcode == -9, f"{failpoints}: {process.exitcode}"
    finally:
        _end(process)


def _end(process: ForkServerProcess) -> None:
    if process.exitcode is None:
        process.kill()
        process.join()


def _main(database_url: str, redis_url: str, points: str) -> None:
    from agentrun import failpoints

    failpoints.configure(points)
    asyncio.run(_reap(database_url, redis_url))


async def _reap(database_url: str, redis_url: str) -> None:
    from agentrun.bus.connection import connect
    from agentrun.bus.events import EventStream
    from agentrun.bus.keys import Keys
    from agentrun.bus.runs import WorkStream
    from agentrun.maintenance.reaper import Limits, Reaper
    from agentrun.store.pool import create_pool

    keys = Keys("default", "agent")
    pool, redis = await create_pool(database_url, 2), await connect(redis_url)
    limits = Limits(lease_seconds=0, idle_seconds=IDLE_MS / 1000, interval_seconds=1, max_lost_attempts=3)
    reaper = Reaper(pool, WorkStream(redis, keys), EventStream(redis, keys), consumer="reaper-dying", limits=limits)
    while True:
        await reaper.reap_entries()
        await asyncio.sleep(0.01)
