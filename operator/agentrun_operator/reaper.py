"""Looks after stuck work of all AgentRuns where their own scheduler may not: the operator's part of reaping.

It works only with cause: an AgentRun's sample shows entries that nobody has touched for long, or its scheduler has been unavailable for a
while. Then its database is opened, over a bounded number of connections for all of them, and closed when the cause is gone.
What is done is decided in `agentrun.maintenance.reaper`; conditions in Postgres and scripts in Redis make it harmless if several do it.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
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
from agentrun_operator.hanging_up import CLOSE_SECONDS, close
from agentrun_operator.metrics import REAPED
from agentrun_operator.resources import Key
from agentrun_operator.sampler import Sample
from agentrun_operator.targets import Target
from agentrun_operator.turns import Turns

CONNECTIONS = 8
RETRY_CONNECTIONS = 4
"""Databases that did not answer last time have places of their own, so that those that hang do not keep others waiting."""
SCHEDULER_GRACE_SECONDS = 30.0
"""A scheduler may be away for so long, as in a roll-out, before the operator stands in for it."""
MARGIN_SECONDS = 10.0
TICK_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 30.0
TICKS_PER_SECOND = 20
"""Of all visits together. Where many schedulers are away at once the AgentRuns take turns: a look counts only if the one before it was
less than half a lease ago, so to look at all of them less often would be to take over nothing.
"""
_TICKS_PER_LEASE = 4
_LONGEST_TURN_LEASES = 3

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _State:
    target: Target
    stuck_until: float = float("-inf")
    scheduler_away_since: float | None = None
    visit: asyncio.Task[None] | None = None
    failures: int = 0
    """How often in a row Postgres did not answer."""
    redis_failures: int = 0
    redis_after: float = float("-inf")


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
        self._retry_places = asyncio.Semaphore(RETRY_CONNECTIONS)
        self._turns = Turns(TICKS_PER_SECOND)
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
            state.failures = state.redis_failures = 0
            state.redis_after = float("-inf")
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
                await close(pool)
            await stream.aclose()
            await self._give_back(target.redis_url, client)
            self._visited(state)

    def _visited(self, state: _State) -> None:
        if state.visit is asyncio.current_task():
            state.visit = None

    async def _work(self, state: _State, reaper: Reaper, pool: Pool) -> None:
        """Takes turns until the cause is gone. A database that failed is tried again with growing pauses, until it answers."""
        lease = reaper.limits.lease_seconds
        while self._has_cause(state, self._clock()):
            if state.failures:
                await asyncio.sleep(_pause(reaper, state.failures))
                async with self._retry_places:
                    await self._tick(state, reaper)
                    await _hang_up(pool)
            else:
                async with self._turns.turn(_TICKS_PER_LEASE / lease):
                    await self._turn(state, reaper, pool)

    async def _turn(self, state: _State, reaper: Reaper, pool: Pool) -> None:
        """Ticks until the cause is gone, Postgres fails, or others wait and this AgentRun was looked at long enough to take runs over.

        Between two ticks the connection stays open only if nobody else waits for one.
        """
        lease = reaper.limits.lease_seconds
        longest = self._clock() + _LONGEST_TURN_LEASES * lease
        has_place = over = False
        try:
            while not over and self._has_cause(state, self._clock()):
                if not has_place:
                    await self._places.take()
                    has_place = True
                await self._tick(state, reaper)
                done = reaper.steady or self._clock() > longest
                over = bool(state.failures or (done and self._turns.waiting))
                if over or self._places.waiting:
                    await _hang_up(pool)
                    self._places.free.release()
                    has_place = False
                if not over:
                    pace = max(reaper.limits.interval_seconds, self._turns.active / TICKS_PER_SECOND)
                    await asyncio.sleep(min(pace, lease / _TICKS_PER_LEASE))
        finally:
            if has_place:
                self._places.free.release()

    async def _tick(self, state: _State, reaper: Reaper) -> None:
        """Both inputs. Without Postgres there is nothing to be done for either; a Redis that fails has pauses of its own, since the first
        input goes on without it.
        """
        good = await self._look(state, reaper.reap_leases)
        state.failures = 0 if good else state.failures + 1
        if good and self._clock() >= state.redis_after:
            good = await self._look(state, reaper.reap_entries)
            state.redis_failures = 0 if good else state.redis_failures + 1
            state.redis_after = float("-inf") if good else self._clock() + _pause(reaper, state.redis_failures)
        REAPED.labels("done" if good else "failed").inc()

    async def _look(self, state: _State, look: Callable[[], Awaitable[None]]) -> bool:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await look()
        except (AgentrunError, TimeoutError) as error:
            _log.warning("stuck work cannot be looked after", agentrun=str(state.target.key), error=str(error) or "timeout")
            return False
        return True

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


def _pause(reaper: Reaper, failures: int) -> float:
    return min(reaper.limits.interval_seconds * 2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS)


async def _hang_up(pool: Pool) -> None:
    """Closes the pool's connection; the pool opens it again when it is needed."""
    if not pool.get_size():
        return
    try:
        async with asyncio.timeout(CLOSE_SECONDS), pool.acquire() as conn:
            await conn.close()
    except Exception as error:  # it is broken already
        _log.debug("a connection could not be closed in order", error=str(error))
