"""The worker process: waits for its stores, works, and ends on SIGTERM within its grace period."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis

from agentrun import health
from agentrun.agents.base import Executor, close
from agentrun.agents.loading import load
from agentrun.bus import connection
from agentrun.bus.keys import Keys
from agentrun.control.schema_gate import decide, foreign
from agentrun.domain.errors import BusUnavailable, ManifestError, StoreUnavailable
from agentrun.manifests import AgentRun
from agentrun.settings import Settings
from agentrun.store import migrations
from agentrun.store.pool import Pool, create_pool
from agentrun.worker.generators import Closer
from agentrun.worker.keeper import LeaseKeeper, LeaseStores
from agentrun.worker.patience import Complaint, log
from agentrun.worker.worker import Worker, consumer_name, limits

T = TypeVar("T")

PAUSE_SECONDS = 1.0
CLOSE_SECONDS = 2.0


class _Probes:
    """What the health server is told. Asked from the keeper's thread."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.keeper: LeaseKeeper | None = None
        self.waits_for: str | None = "starting"

    def alive(self) -> str | None:
        if self.worker is None or self.keeper is None or self.keeper.blocked > 1:
            return None  # a blocked loop is the keeper's to judge: it knows how long an agent may take
        return self.worker.stalled()

    def ready(self) -> str | None:
        return self.waits_for


async def run(settings: Settings, manifest: AgentRun) -> None:
    """Works until SIGTERM or SIGINT. Raises ManifestError, BusMisconfigured or ConfigurationError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    executor = _executor(settings, manifest)
    told, bounds, keys = _Probes(), limits(manifest), Keys(settings.namespace, settings.name)
    consumer = consumer_name(settings.pod_name)
    generators = Closer()
    generators.install()
    keeper = LeaseKeeper(
        lambda: LeaseStores(settings.database_url, settings.redis_url, keys, consumer),
        lease_seconds=bounds.lease_seconds,
        beside=lambda: health.serve(host=settings.health_host, port=settings.health_port, alive=told.alive, ready=told.ready),
    )
    await keeper.start()
    try:
        async with _stores(settings, manifest) as (pool, redis):
            if not await _until(stop, lambda: _usable(pool, redis, told, agent=settings.agent)):
                return
            worker = Worker(executor, name=consumer, pool=pool, redis=redis, keys=keys, keeper=keeper, limits=bounds)
            told.keeper, told.worker, told.waits_for = keeper, worker, None
            worker.start()
            log.info("worker started", consumer=consumer, capacity=bounds.capacity)
            await _either(stop, worker.spent)
            log.info("worker stops", active=worker.active)
            told.worker = None
            await worker.stop(manifest.spec.workers.drain_seconds)
    finally:
        await _close(executor, generators)
        await keeper.stop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)
    log.info("worker stopped")
    if worker.cut_short:
        # What an agent started in threads, or an agent that swallowed its cancellation, would keep the process.
        logging.shutdown()
        os._exit(0)


def _executor(settings: Settings, manifest: AgentRun) -> Executor:
    """What the manifest says; its modules may lie beside it. Raises ManifestError that begins with the file."""
    try:
        return load(manifest.spec.agent, search=[settings.manifest.parent] if settings.manifest is not None else [])
    except ManifestError as error:
        raise ManifestError(f"{settings.manifest}: {error}") from error


@contextlib.asynccontextmanager
async def _stores(settings: Settings, manifest: AgentRun) -> AsyncIterator[tuple[Pool, Redis]]:
    """Pool and client; both open their connections when they are needed."""
    pool = await create_pool(settings.database_url, manifest.spec.database.pool_size, name="agentrun-worker")
    redis = await connection.connect(settings.redis_url)
    try:
        yield pool, redis
    finally:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await redis.aclose()
                await pool.close()
        except TimeoutError:
            pool.terminate()


async def _either(*events: asyncio.Event) -> None:
    """Waits for one of them."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _close(executor: Executor, generators: Closer) -> None:
    """Lets the agent end what it has left open and close its connections, for a little while."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await generators.drain(CLOSE_SECONDS / 2)
            await close(executor)
    except Exception as error:
        log.warning("the agent could not be closed", error=f"{type(error).__name__}: {error}")


async def _until(stop: asyncio.Event, what: Callable[[], Awaitable[None]]) -> bool:
    """Does it, unless the stop comes first; whether it was done."""
    doing = asyncio.ensure_future(what())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        await doing
        return True
    finally:
        doing.cancel()
        stopping.cancel()


async def _usable(pool: Pool, redis: Redis, told: _Probes, *, agent: str) -> None:
    """Waits until both stores are there and the schema is one to work on, and `agent`'s; else a pod would crash in a loop.

    Raises BusMisconfigured.
    """
    complaint = Complaint("waits for its stores")
    while True:
        try:
            state = await migrations.check(pool)
            decision = decide(required=state.required, present=state.present, oldest_accepted=state.oldest_accepted)
            wrong = foreign(owner=state.owner, agent=agent) if decision.serves else decision.message
            if wrong is not None:
                raise StoreUnavailable(wrong)
            await connection.check(redis)
        except (StoreUnavailable, BusUnavailable) as error:
            complaint.about(error)
            told.waits_for = str(error)
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            complaint.over()
            return
