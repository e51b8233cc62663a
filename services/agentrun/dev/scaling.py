"""Workers of one machine that follow demand, which is measured and judged as in a cluster."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import structlog
from redis.asyncio import Redis

from agentrun.bus import connection, lag
from agentrun.bus.keys import Keys
from agentrun.control.scaling import Bounds, Memory, desired_workers
from agentrun.dev.conversation import Screen
from agentrun.dev.workers import Workers
from agentrun.domain.errors import BusUnavailable
from agentrun.maintenance.supervise import Supervisor
from agentrun.manifests import AgentRun
from agentrun.settings import Settings

SCALE_SECONDS = 0.25
READY_PAUSE_SECONDS = 0.05

_log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def scaled(
    workers: Workers, settings: Settings, agent_run: AgentRun, screen: Screen, *, at_once: asyncio.Event
) -> AsyncIterator[asyncio.Event]:
    """Scales while the block runs; yields an event that is set once the first worker takes work. `at_once` ends without grace."""
    spec = agent_run.spec
    bounds = Bounds(
        spec.workers.min_replicas,
        spec.workers.max_replicas,
        spec.scaling.target_per_worker,
        spec.scaling.scale_down_stabilization_seconds,
        spec.scaling.cooldown_seconds,
    )
    redis = await connection.connect(settings.redis_url)
    keys = Keys(settings.namespace, settings.name)
    memory, told = Memory(), -1

    async def scale() -> None:
        nonlocal memory, told
        demand = await lag.sample(redis, keys, spec.reaper.idle_seconds * 1000)
        decision = desired_workers(
            demand.total if demand else None, current=workers.running, bounds=bounds, now=time.monotonic(), memory=memory
        )
        memory = decision.memory
        workers.scale(decision.workers)
        if workers.running != told:
            told = workers.running
            _log.info("workers", running=told, why=decision.why)

    async def note_first() -> None:
        await _listening(redis, keys.control(f"{workers.name}-*"))
        screen.step("worker", "ready")
        ready.set()

    ready = asyncio.Event()
    supervisor = Supervisor()
    supervisor.every("scale", SCALE_SECONDS, scale)
    workers.scale(max(1, bounds.min_replicas))  # one is warm when the first message comes; it leaves after the cooldown
    screen.step("workers", f"{bounds.min_replicas} to {bounds.max_replicas}, as work comes; the first is starting")
    noting = asyncio.create_task(note_first())
    try:
        yield ready
    finally:
        noting.cancel()
        await asyncio.gather(noting, return_exceptions=True)
        await supervisor.stop()
        await workers.stop(at_once=at_once)
        await redis.aclose()


async def _listening(redis: Redis, channels: str) -> None:
    """Waits until a worker has opened its control channel, which it does when it starts to take work."""
    while True:
        with contextlib.suppress(BusUnavailable):
            async with connection.answering(redis.connection_pool):
                if await redis.pubsub_channels(channels):
                    return
        await asyncio.sleep(READY_PAUSE_SECONDS)
