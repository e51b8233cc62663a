"""The full list of all kinds, at the start and every few minutes: it finds what the watches missed, deletions above all."""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import structlog

from agentrun.maintenance.supervise import Stamp
from agentrun_operator.cache import Body, ObjectCache
from agentrun_operator.kube import PAGE, Forbidden, Keep, Listing, NotFound
from agentrun_operator.metrics import RESYNC_FOUND, RESYNC_SECONDS, SYNCED
from agentrun_operator.resources import AGENTRUNS, CHILDREN, CHILDREN_SELECTOR, CRONTASKS, OPTIONAL, WATCHED, Key, Ref, Resource
from agentrun_operator.work_queue import WorkQueue

HURRY_SECONDS = 1.0
"""Pause before a list that was asked for, so that many reasons make one list."""
HURRY_AGAIN_SECONDS = 30.0
"""Between two of those: an API server that makes us lose our place all the time is not helped by more lists."""
STALE_SECONDS = 120.0
_SLICE_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class Lister(Protocol):
    """What a resync needs of the API server."""

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        limit: int = PAGE,
        keep: Keep = lambda page: page,
    ) -> Listing: ...


class Resync:
    """Keeps the cache complete, and has every AgentRun and CronTask looked at."""

    def __init__(
        self,
        lister: Lister,
        cache: ObjectCache,
        *,
        runs: WorkQueue[Key],
        cron_tasks: WorkQueue[Key],
        namespaces: tuple[str, ...] = (),
        spread_seconds: float = 10.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`namespaces`: those to look at; empty: all. What was not found changed is looked at within `spread_seconds`, since each look
        reads Secrets."""
        self._lister = lister
        self._cache = cache
        self._runs = runs
        self._cron_tasks = cron_tasks
        self._namespaces = namespaces
        self._spread_seconds = spread_seconds
        self._jitter = jitter
        self._locks: defaultdict[Resource, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of two lists of a kind at the same time the older could be taken last."""
        self._hurried = asyncio.Event()
        self._hurried_at = float("-inf")
        self.done = asyncio.Event()
        """Set after the first full list."""
        self.wrong = "the first full list is not complete"
        """Why the last one failed; empty if it did not."""

    async def watch(self, stamp: Stamp, *, seconds: float) -> None:
        """Lists again and again, with about `seconds` between, or sooner after `hurry`."""
        while True:
            await self.once(stamp)
            stamp()
            await self._rest(seconds * random.uniform(0.9, 1.1), stamp)

    def hurry(self) -> None:
        """Something may have been missed: the next full list is made soon, HURRY_AGAIN_SECONDS after the last one like this."""
        self._hurried.set()

    async def once(self, stamp: Stamp = lambda: None) -> None:
        """One full list; each page is progress. What it found changed is looked at now, the rest spread over `spread_seconds`.

        Raises KubeError.
        """
        begun = time.monotonic()
        found: dict[Resource, set[Key]] = {}
        try:
            for resource in WATCHED:
                try:
                    found[resource] = await self._take(resource, stamp)
                except (NotFound, Forbidden):
                    if resource not in OPTIONAL:
                        raise
                    found[resource] = set()  # what is known of it stays
        except Exception as error:
            self.wrong = f"listing failed: {error}"
            raise
        runs = set[Key]().union(*(keys for resource, keys in found.items() if resource != CRONTASKS))
        if self.done.is_set():
            RESYNC_FOUND.inc(len(runs) + len(found[CRONTASKS]))
        self._enqueue(self._runs, AGENTRUNS, runs)
        self._enqueue(self._cron_tasks, CRONTASKS, found[CRONTASKS])
        RESYNC_SECONDS.observe(time.monotonic() - begun)
        self.wrong = ""
        self.done.set()
        SYNCED.set(1)
        _log.debug("resync", seconds=round(time.monotonic() - begun, 2), changed=len(runs))

    async def take_cron_tasks(self) -> None:
        """Lists only these, now that they are served. Raises KubeError."""
        for key in await self._take(CRONTASKS, lambda: None):
            self._cron_tasks.add(key)

    async def _rest(self, seconds: float, stamp: Stamp) -> None:
        """Sleeps, and shows that it does."""
        until, hurried = time.monotonic() + seconds, False
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _SLICE_SECONDS)):
                    await (asyncio.sleep(left) if hurried else self._hurried.wait())
            if self._hurried.is_set() and not hurried:
                hurried = True
                until = min(until, max(time.monotonic() + HURRY_SECONDS, self._hurried_at + HURRY_AGAIN_SECONDS))
            stamp()
        if hurried:
            self._hurried_at = time.monotonic()
            self._hurried.clear()

    async def _take(self, resource: Resource, stamp: Stamp) -> set[Key]:
        async with self._locks[resource]:
            return await self._take_alone(resource, stamp)

    async def _take_alone(self, resource: Resource, stamp: Stamp) -> set[Key]:
        labels = CHILDREN_SELECTOR if resource in CHILDREN else None

        def keep(page: list[Body]) -> list[Body]:
            """A page is progress, and what is known already need not be in memory twice until the last one."""
            stamp()
            return [self._cache.known(resource, body) or body for body in page]

        since = self._cache.begin_list()
        try:
            items = []
            for namespace in self._namespaces or (None,):
                items += (await self._lister.list(resource, namespace=namespace, labels=labels, keep=keep)).items
            return self._cache.replace_all(resource, items, since=since, within=self._is_watched)
        finally:
            self._cache.end_list()

    def _is_watched(self, ref: Ref) -> bool:
        return not self._namespaces or ref.namespace in self._namespaces

    def _enqueue(self, queue: WorkQueue[Key], resource: Resource, changed: set[Key]) -> None:
        for key in changed:
            queue.add(key)
        for ref in self._cache.of(resource):
            queue.add(Key(ref.namespace, ref.name), after=self._spread_seconds * self._jitter() if self.done.is_set() else 0.0)
