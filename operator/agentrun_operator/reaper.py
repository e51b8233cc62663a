"""Looks after stuck work of all AgentRuns where their own scheduler may not: the operator's part of reaping.

It works only with cause: an AgentRun's sample shows entries that nobody has touched for long, or its scheduler has been unavailable for a
while. Then its database is opened, over a bounded number of connections for all of them, and closed when the cause is gone.
What is done is decided in `agentrun.maintenance.reaper`; conditions in Postgres and scripts in Redis make it harmless if several do it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis

from agentrun.bus import connection
from agentrun.bus.events import EventStream
from agentrun.bus.runs import WorkStream
from agentrun.domain.errors import AgentrunError
from agentrun.maintenance.reaper import Reaper
from agentrun.store.pool import Pool, create_pool
from agentrun_operator.cache import ObjectCache
from agentrun_operator.metrics import REAPED
from agentrun_operator.resources import Key
from agentrun_operator.sampler import Sample
from agentrun_operator.targets import Target

CONNECTIONS = 8
SCHEDULER_GRACE_SECONDS = 30.0
"""A scheduler may be away for so long, as in a roll-out, before the operator stands in for it."""
MARGIN_SECONDS = 10.0
TICK_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 30.0
TICKS_PER_SECOND = 20
"""Of all visits together: where many schedulers are away at once, each AgentRun is looked at less often."""
_CLOSE_SECONDS = 2.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _State:
    target: Target
    stuck_until: float = float("-inf")
    scheduler_away_since: float | None = None
    visit: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Client:
    redis: Redis
    users: int = 0


@dataclass(slots=True)
class _Places:
    """Connections to Postgres that may be open at the same time. Whoever keeps one gives it up when others wait."""

    free: asyncio.Semaphore
    waiting: int = field(default=0)

    async def take(self) -> None:
        self.waiting += 1
        try:
            await self.free.acquire()
        finally:
            self.waiting -= 1


class FleetReaper:
    """The reaper of all AgentRuns. `on_sample` is called for each sample and returns at once; visits are tasks of their own."""

    def __init__(
        self,
        cache: ObjectCache,
        *,
        identity: str,
        connections: int = CONNECTIONS,
        scheduler_grace_seconds: float = SCHEDULER_GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity` names this process among the consumers. `clock` is the one of the samples."""
        self._cache = cache
        self._consumer = f"reaper-{identity}-{secrets.token_hex(4)}"
        self._grace = scheduler_grace_seconds
        self._clock = clock
        self._places = _Places(asyncio.Semaphore(connections))
        self._states: dict[Key, _State] = {}
        self._clients: dict[str, _Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, target: Target) -> None:
        """Looks after this AgentRun from now on; a visit under way goes on only if nothing that it depends on has changed."""
        state = self._states.get(target.key)
        if state is None:
            self._states[target.key] = _State(target)
            return
        if _depends(state.target) != _depends(target):
            self._break_off(state)
        state.target = target

    def forget(self, key: Key) -> None:
        """Looks after it no more."""
        state = self._states.pop(key, None)
        if state is not None:
            self._break_off(state)

    @property
    def visits(self) -> int:
        """How many AgentRuns are being looked after right now."""
        return len(self._tasks)

    def on_sample(self, key: Key, sample: Sample) -> None:
        """Begins a visit where there is cause."""
        state = self._states.get(key)
        if state is None or not state.target.schema_ready:
            return
        limits = state.target.limits
        if sample.demand is not None and sample.demand.reclaimable:
            # A dead attempt is taken over only after a whole lease of contact, and its entry shows again after idleSeconds.
            state.stuck_until = sample.at + limits.idle_seconds + limits.lease_seconds + MARGIN_SECONDS
        if self._scheduler_is_available(state.target):
            state.scheduler_away_since = None
        elif state.scheduler_away_since is None:
            state.scheduler_away_since = sample.at
        if state.visit is None and self._has_cause(state, sample.at):
            visit = state.visit = asyncio.create_task(self._visit(state, state.target), name="reap")
            self._tasks.add(visit)
            visit.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Ends all visits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _scheduler_is_available(self, target: Target) -> bool:
        found = self._cache.get(target.scheduler)
        return found is not None and int((found.get("status") or {}).get("availableReplicas", 0)) > 0

    def _has_cause(self, state: _State, now: float) -> bool:
        away = state.scheduler_away_since
        return now < state.stuck_until or (away is not None and now - away >= self._grace)

    def _break_off(self, state: _State) -> None:
        if state.visit is not None:
            state.visit.cancel()
            state.visit = None

    async def _visit(self, state: _State, target: Target) -> None:
        try:
            client = self._borrow(target.redis_url)
        except AgentrunError as error:
            _log.warning("stuck work cannot be looked after", agentrun=str(target.key), error=str(error))
            await asyncio.sleep(LONGEST_PAUSE_SECONDS)
            self._visited(state)
            return
        keys = target.question.keys
        stream = WorkStream(client.redis, keys)
        pool: Pool | None = None
        try:
            pool = await create_pool(target.database_url, 1, name="agentrun-operator")
            events = EventStream(client.redis, keys)
            reaper = Reaper(pool, stream, events, consumer=self._consumer, limits=target.limits)
            await self._work(state, reaper, pool)
        except AgentrunError as error:
            _log.warning("stuck work cannot be looked after", agentrun=str(target.key), error=str(error))
        except Exception:
            _log.exception("stuck work cannot be looked after", agentrun=str(target.key))
            await asyncio.sleep(LONGEST_PAUSE_SECONDS)
        finally:
            if pool is not None:
                await _close(pool)
            await stream.aclose()
            await self._give_back(target.redis_url, client)
            self._visited(state)

    def _visited(self, state: _State) -> None:
        if state.visit is asyncio.current_task():
            state.visit = None

    async def _work(self, state: _State, reaper: Reaper, pool: Pool) -> None:
        """Ticks until the cause is gone. Between two ticks the connection stays open only if nobody else waits for one."""
        failures = 0
        has_place = False
        try:
            while self._has_cause(state, self._clock()):
                if not has_place:
                    await self._places.take()
                    has_place = True
                failures = 0 if await self._tick(state.target, reaper) else failures + 1
                if self._places.waiting or failures:
                    await _hang_up(pool)
                    self._places.free.release()
                    has_place = False
                await asyncio.sleep(self._pause(reaper.limits.interval_seconds, failures))
        finally:
            if has_place:
                self._places.free.release()

    def _pause(self, interval: float, failures: int) -> float:
        pause = min(interval * 2.0 ** min(failures, 10), max(LONGEST_PAUSE_SECONDS, interval))
        return max(pause, self.visits / TICKS_PER_SECOND)

    async def _tick(self, target: Target, reaper: Reaper) -> bool:
        """Both inputs, each for itself: Redis may be away while leases run out. Whether both could be worked on."""
        good = True
        for look in (reaper.reap_leases, reaper.reap_entries):
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await look()
            except (AgentrunError, TimeoutError) as error:
                good = False
                _log.warning("stuck work cannot be looked after", agentrun=str(target.key), error=str(error) or "timeout")
        REAPED.labels("done" if good else "failed").inc()
        return good

    def _borrow(self, url: str) -> _Client:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = _Client(Redis.from_pool(connection.pool(url, size=2)))
        client.users += 1
        return client

    async def _give_back(self, url: str, client: _Client) -> None:
        client.users -= 1
        if not client.users and self._clients.get(url) is client:
            del self._clients[url]
            await client.redis.aclose()


def _depends(target: Target) -> tuple[object, ...]:
    return target.uid, target.redis_url, target.database_url, target.limits, target.schema_ready


async def _hang_up(pool: Pool) -> None:
    """Closes the pool's connection; the pool opens it again when it is needed."""
    if not pool.get_size():
        return
    try:
        async with asyncio.timeout(_CLOSE_SECONDS), pool.acquire() as conn:
            await conn.close()
    except Exception as error:  # it is broken already
        _log.debug("a connection could not be closed in order", error=str(error))


async def _close(pool: Pool) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await pool.close()
    except TimeoutError:
        pool.terminate()
