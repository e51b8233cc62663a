"""The scheduler: fires CronTasks and looks after stuck and forgotten work. Any number of them may run; constraints decide."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Coroutine
from typing import Any

import structlog

from agentrun import health
from agentrun.bus.connection import connect
from agentrun.bus.control import Control
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.costs.rules import budget_of
from agentrun.maintenance.reaper import Limits, Reaper
from agentrun.maintenance.retention import Ages, Retention
from agentrun.maintenance.schema import SchemaWatch
from agentrun.maintenance.supervise import Supervisor
from agentrun.maintenance.sweep import Sweep
from agentrun.maintenance.tidying import Tidying
from agentrun.manifests import AgentRun
from agentrun.scheduler.announcing import BusAnnouncer
from agentrun.scheduler.loop import Firing
from agentrun.scheduler.watching import Watching
from agentrun.settings import Settings
from agentrun.store import usage
from agentrun.store.pool import Pool, create_pool

SWEEP_SECONDS = 1.0
TIDY_SECONDS = 30.0
WATCH_SECONDS = 15.0
USAGE_SECONDS = 10.0
RETENTION_SECONDS = 10.0
CLOSE_SECONDS = 5.0

_log = structlog.get_logger(__name__)


async def run(settings: Settings, manifest: AgentRun, *, stop: asyncio.Event | None = None) -> None:
    """Runs until SIGTERM or SIGINT, or until `stop` is set by whoever runs it as a part of a larger process.

    Starts while the stores are away, and waits for them. Raises ConfigurationError if its health port is taken.
    """
    stop = _stopped_by_signals() if stop is None else stop
    pool = await create_pool(settings.database_url, manifest.spec.database.pool_size, name="agentrun-scheduler")
    redis = await connect(settings.redis_url)
    supervisor = Supervisor()
    schema = SchemaWatch(pool, agent=settings.agent)
    try:
        async with health.serve(
            host=settings.health_host, port=settings.health_port, alive=supervisor.stalled, ready=schema.wrong
        ) as port:
            _log.info("scheduler started", health_port=port)
            supervisor.run("schema", schema.watch, stale_after=120.0)
            if await _first(schema.opened(), stop):
                keys = Keys(settings.namespace, settings.name)
                stream = WorkStream(redis, keys)
                events = EventStream(redis, keys)
                reaper = Reaper(
                    pool, stream, events, consumer=f"reaper-{settings.pod_name}-{secrets.token_hex(4)}", limits=_limits(manifest)
                )
                maintain(supervisor, reaper, Sweep(pool, redis, stream, idle_seconds=_limits(manifest).idle_seconds), stream)
                firing = Firing(
                    pool,
                    BusAnnouncer(stream, events, Control(redis, keys)),
                    namespace=settings.namespace,
                    name=settings.name,
                    suspended=manifest.spec.suspend,
                    budget=budget_of(manifest.spec),
                )
                supervisor.run("slots", firing.keep_looking)
                watching = Watching(pool, namespace=settings.namespace, suspended=manifest.spec.suspend)
                supervisor.every("watch-cron-tasks", WATCH_SECONDS, watching.tick)
                supervisor.every("usage", USAGE_SECONDS, lambda: _fold(pool))
                supervisor.every("retention", RETENTION_SECONDS, Retention(pool, _ages(manifest)).tick)
                await stop.wait()
                await supervisor.stop()
                await stream.aclose()
    finally:
        await supervisor.stop()
        await redis.aclose()
        await _close(pool)
    _log.info("scheduler stopped")


async def _fold(pool: Pool) -> None:
    """Adds what was spent since the last time to the sums that reports read."""
    while await usage.fold(pool) >= usage.FOLD_AT_ONCE:
        pass


def maintain(supervisor: Supervisor, reaper: Reaper, sweep: Sweep, stream: WorkStream) -> None:
    """Starts the loops that look after one AgentRun. Each that needs Redis checks it first, and again after it was away."""
    limits = reaper.limits
    tidying = Tidying(stream, idle_seconds=limits.idle_seconds, grace_seconds=2 * limits.idle_seconds)
    supervisor.every("reap-leases", limits.interval_seconds, reaper.reap_leases)
    supervisor.every("reap-entries", limits.interval_seconds, reaper.reap_entries, before=stream.ensure_group)
    supervisor.every("sweep", SWEEP_SECONDS, sweep.tick, before=stream.ensure_group)
    supervisor.every("tidy", TIDY_SECONDS, tidying.tick, before=stream.ensure_group)


def _limits(manifest: AgentRun) -> Limits:
    reaper = manifest.spec.reaper
    return Limits(manifest.spec.workers.lease_seconds, reaper.idle_seconds, reaper.interval_seconds, reaper.max_lost_attempts)


def _ages(manifest: AgentRun) -> Ages:
    spec = manifest.spec
    return Ages(spec.streaming.event_retention_seconds, spec.retention.runs, spec.retention.ledger)


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _first(wanted: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Waits for one of the two; whether the wanted one came."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(wanted), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return not stop.is_set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(pool: Pool) -> None:
    """Closes the pool; a connection that does not answer any more is cut."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await pool.close()
            return
    pool.terminate()
