"""What the operator knows about the stores themselves: may this database and this Redis be used?

An answer is kept for a while. Asking never waits for a store: an unknown URL is asked about in the background, with a time limit and
a bounded number of connections, and whoever asked is told when the answer changes. Only the first question about a URL waits, for a
moment, since most stores answer within it.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import structlog

from agentrun_operator.facts import QueueFact, SchemaFact
from agentrun_operator.fair_places import FairPlaces
from agentrun_operator.metrics import PROBES
from agentrun_operator.resources import Key
from agentrun_operator.store_looks import DATABASE_UNREACHABLE, REDIS_UNREACHABLE, DatabaseFact, ask_database, ask_redis

F = TypeVar("F")

PROBE_SECONDS = 5.0
FIRST_WAIT_SECONDS = 0.25
FRESH_SECONDS = 60.0
"""A good answer is asked for again after this long, or later where there are many stores: see MOST_PER_SECOND."""
MOST_PER_SECOND = 1.5
"""How many good answers of one kind are asked for again each second: what it costs stays the same for any number of stores."""
RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 30.0
INVALIDATE_GAP_SECONDS = 0.5
CONNECTIONS = 24
RETRY_CONNECTIONS = 8

_log = structlog.get_logger(__name__)


class StoreProbes:
    """Databases and Redis servers by URL. `on_change` is called with the AgentRuns that asked about a store whose answer changed."""

    def __init__(
        self,
        on_change: Callable[[Key], None],
        *,
        connections: int = CONNECTIONS,
        seconds: float = PROBE_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `connections` stores of each kind are asked at the same time, each for at most `seconds`.

        Stores that had a problem have places of their own, so that those that hang do not keep others waiting. Where many are looked at
        for the first time servers take turns: one that hangs holds up its own databases, and any other for one look at most.
        """
        rules = _Rules(connections, seconds, fresh_seconds, retry_seconds, clock)
        self._databases = _Answers("postgres", ask_database, DATABASE_UNREACHABLE, on_change, rules)
        self._queues = _Answers("redis", ask_redis, REDIS_UNREACHABLE, on_change, rules)

    async def database(self, key: Key, url: str) -> DatabaseFact | None:
        """What is known about the database; None if nothing yet: `on_change` follows."""
        return await self._databases.get(key, url)

    async def schema(self, key: Key, url: str) -> SchemaFact | None:
        """The schema part of it."""
        found = await self._databases.get(key, url)
        return found.schema if found is not None else None

    async def queue(self, key: Key, url: str) -> QueueFact | None:
        """What is known about the Redis; None if nothing yet: `on_change` follows."""
        return await self._queues.get(key, url)

    def known_database(self, url: str) -> DatabaseFact | None:
        """What is known, without asking."""
        return self._databases.known(url)

    def invalidate_database(self, url: str) -> None:
        """What is known may be wrong now, as after a migration: it is asked again, and the old answer stands meanwhile."""
        self._databases.invalidate(url)

    def invalidate_queue(self, url: str) -> None:
        """The same for a Redis."""
        self._queues.invalidate(url)

    def forget(self, key: Key) -> None:
        """This AgentRun is gone; what only it has asked about is dropped."""
        self._databases.forget(key)
        self._queues.forget(key)

    async def aclose(self) -> None:
        """Ends what is being asked."""
        await self._databases.aclose()
        await self._queues.aclose()


@dataclass(frozen=True, slots=True)
class _Rules:
    connections: int
    seconds: float
    fresh_seconds: float
    retry_seconds: float
    clock: Callable[[], float]


@dataclass(slots=True)
class _Entry(Generic[F]):
    answer: F | None = None
    asked_by: set[Key] = field(default_factory=set)
    fresh_until: float = float("-inf")
    failures: int = 0
    invalidated_at: float = float("-inf")
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class _Answers(Generic[F]):
    """The answers of one kind of store, by URL."""

    def __init__(
        self,
        store: str,
        ask: Callable[[str], Awaitable[tuple[F, bool]]],
        unreachable: F,
        on_change: Callable[[Key], None],
        rules: _Rules,
    ) -> None:
        self._store = store
        self._ask = ask
        self._unreachable = unreachable
        self._on_change = on_change
        self._rules = rules
        self._places = FairPlaces(rules.connections)
        self._retry_places = FairPlaces(RETRY_CONNECTIONS)
        self._entries: dict[str, _Entry[F]] = {}
        self._urls: dict[Key, str] = {}

    async def get(self, key: Key, url: str) -> F | None:
        if self._urls.get(key) != url:
            self.forget(key)
            self._urls[key] = url
        entry = self._entries.setdefault(url, _Entry())
        # Where it has to wait for its place the answer is not a matter of a moment.
        first = entry.answer is None and entry.task is None and not self._places.full()
        entry.asked_by.add(key)
        if self._rules.clock() >= entry.fresh_until:
            self._refresh(url, entry)
        if first and entry.task is not None:
            await asyncio.wait([entry.task], timeout=FIRST_WAIT_SECONDS)
        return entry.answer

    def known(self, url: str) -> F | None:
        entry = self._entries.get(url)
        return entry.answer if entry is not None else None

    def invalidate(self, url: str) -> None:
        entry = self._entries.get(url)
        if entry is None:
            return
        entry.fresh_until = float("-inf")
        if self._rules.clock() - entry.invalidated_at < INVALIDATE_GAP_SECONDS:
            return  # all AgentRuns of one Redis say it at the same time
        entry.invalidated_at = self._rules.clock()
        if entry.task is not None:  # what it reads may be older than the reason for this call
            entry.task.cancel()
            entry.task = None
        self._refresh(url, entry)

    def forget(self, key: Key) -> None:
        url = self._urls.pop(key, None)
        entry = self._entries.get(url) if url is not None else None
        if url is None or entry is None:
            return
        entry.asked_by.discard(key)
        if not entry.asked_by:
            del self._entries[url]
            self._end(entry)

    async def aclose(self) -> None:
        entries = [*self._entries.values()]
        self._entries.clear()
        self._urls.clear()
        tasks = [entry.task for entry in entries if entry.task is not None]
        for entry in entries:
            self._end(entry)
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _end(entry: _Entry[F]) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None:
            entry.task.cancel()

    def _refresh(self, url: str, entry: _Entry[F]) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if entry.task is None:
            entry.task = asyncio.create_task(self._look(url, entry), name=f"probe-{self._store}")

    async def _look(self, url: str, entry: _Entry[F]) -> None:
        places = self._retry_places if entry.failures else self._places
        async with places.place(_server(url)):
            try:
                async with asyncio.timeout(self._rules.seconds):
                    answer, good = await self._ask(url)
            except TimeoutError:
                answer, good = self._unreachable, False
            except Exception:
                _log.exception("a store could not be looked at", store=self._store)
                answer, good = self._unreachable, False
        PROBES.labels(self._store, "ok" if good else "problem").inc()
        entry.task = None
        entry.failures = 0 if good else min(entry.failures + 1, 10)
        if good:
            pause = max(self._rules.fresh_seconds, len(self._entries) / MOST_PER_SECOND)
        else:
            pause = min(self._rules.retry_seconds * 2 ** (entry.failures - 1), LONGEST_RETRY_SECONDS)
        pause *= random.uniform(0.9, 1.1)  # those that were asked together are not asked together again
        entry.fresh_until = self._rules.clock() + pause
        entry.timer = asyncio.get_running_loop().call_later(pause, self._refresh, url, entry)
        if answer != entry.answer:
            entry.answer = answer
            for key in tuple(entry.asked_by):
                self._on_change(key)


def _server(url: str) -> str:
    """Which server a URL leads to, databases and users aside. What is no URL is a server of its own."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    host = parts.netloc.rpartition("@")[2]
    return host or (parts.path if parts.scheme == "unix" else parts.query)
