"""The keys that wait to be reconciled: each once, handled by one worker at a time, and later again if it failed. Knows no I/O.

A key that is added while it is handled is handled once more afterwards. A plain `add` overtakes a back-off, because it means
that something changed. Of the keys that are due, groups (namespaces) take turns: thousands of one hold up another by one key each time.
"""

import asyncio
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 60.0


class WorkQueue(Generic[K]):
    """`clock` counts seconds, `jitter` gives numbers from 0 to 1, `group` tells whose turn a key belongs to."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        group: Callable[[K], Hashable] = lambda _key: None,
    ) -> None:
        self._group = group
        self._clock = clock
        self._jitter = jitter
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._turn = itertools.count()
        self._ready: dict[Hashable, deque[K]] = {}
        """The keys that are due, by group, in the order of the groups' turns; no group is empty."""
        self._in_line: set[K] = set()
        """The same keys."""
        self._handled: set[K] = set()
        self._again: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Keys that wait, those of later included."""
        return len(self._due) + len(self._again)

    @property
    def handled(self) -> frozenset[K]:
        """The keys that are being handled now."""
        return frozenset(self._handled)

    def close(self) -> None:
        """Forgets all keys, and takes no more until `open`."""
        self._closed = True
        for known in (self._due, self._heap, self._ready, self._in_line, self._again, self._failures):
            known.clear()

    def open(self) -> None:
        """Takes keys again. A new queue does."""
        self._closed = False

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Makes a key due in `after` seconds, or leaves it at its time if that is sooner. Nothing happens while the queue is closed."""
        if self._closed:
            return
        due = self._clock() + max(after, 0.0)
        if key in self._handled:
            self._again[key] = min(due, self._again.get(key, due))
        else:
            self._schedule(key, due)

    async def get(self) -> K:
        """Waits for the next due key. `done` must be called for it."""
        while True:
            key = self.take()
            if key is not None:
                return key
            self._changed.clear()
            wait = self.seconds_to_next()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def take(self) -> K | None:
        """Of the group whose turn it is the key that has been due for longest; None if none is due."""
        self._make_ready()
        for group in self._ready:
            keys = self._ready.pop(group)
            key = keys.popleft()
            if keys:
                self._ready[group] = keys  # behind the others
            del self._due[key]
            self._in_line.discard(key)
            self._handled.add(key)
            return key
        return None

    def done(self, key: K) -> None:
        """Ends the handling. If the key was added meanwhile, it waits again."""
        self._handled.discard(key)
        due = self._again.pop(key, None)
        if due is not None:
            self._schedule(key, due)

    def retry(self, key: K, *, at_least: float = 0.0) -> float:
        """Adds a key that failed: in 0.5 s, doubled with each failure in a row up to 60 s, half to all of it at random, and not
        before `at_least` seconds. Returns the seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        full = min(FIRST_BACK_OFF * 2.0 ** min(failures - 1, 16), LONGEST_BACK_OFF)
        pause = max(full * (0.5 + 0.5 * self._jitter()), at_least)
        self.add(key, after=pause)
        return pause

    def look_again(self, key: K, seconds: float) -> None:
        """Makes a key due in `seconds` or up to a fifth later, at random, so that what began together does not stay together."""
        self.add(key, after=seconds * (1.0 + 0.2 * self._jitter()))

    def failures(self, key: K) -> int:
        """Failures in a row."""
        return self._failures.get(key, 0)

    def forget(self, key: K) -> None:
        """Ends a row of failures: the next back-off starts from the beginning."""
        self._failures.pop(key, None)

    def overdue(self) -> float:
        """Seconds for which the first key has been waiting past its time; 0.0 if none is due."""
        self._make_ready()
        return max((self._clock() - self._due[keys[0]] for keys in self._ready.values()), default=0.0)

    def seconds_to_next(self) -> float | None:
        """Seconds until a key is due; None if none waits."""
        self._make_ready()
        if self._ready:
            return 0.0
        return max(self._heap[0][0] - self._clock(), 0.0) if self._heap else None

    def _schedule(self, key: K, due: float) -> None:
        known = self._due.get(key)
        if known is not None and known <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._turn), key))
        self._changed.set()

    def _make_ready(self) -> None:
        """Takes from the heap what is due, and what was rescheduled: a key's newest place counts."""
        now = self._clock()
        while self._heap and ((first := self._heap[0])[0] <= now or self._due.get(first[2]) != first[0]):
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due and key not in self._in_line:
                self._in_line.add(key)
                self._ready.setdefault(self._group(key), deque()).append(key)
