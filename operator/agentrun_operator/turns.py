"""Turns of many at something that has a limited rate: first come, first served."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Turns:
    """Admits so many that their costs together are at most `budget`; one whose cost is above it has its turn alone."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._used = 0.0
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()
        self.active = 0

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def turn(self, cost: float) -> AsyncIterator[None]:
        """Waits for a turn; it lasts as long as the body."""
        await self._take(cost)
        try:
            yield
        finally:
            self._give(cost)

    async def _take(self, cost: float) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((cost, ready))
        self._admit()
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # admitted in this moment
                self._give(cost)
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove((cost, ready))
                self._admit()
            raise

    def _give(self, cost: float) -> None:
        self.active -= 1
        self._used = self._used - cost if self.active else 0.0
        self._admit()

    def _admit(self) -> None:
        while self._queue and (not self.active or self._used + self._queue[0][0] <= self._budget):
            cost, ready = self._queue.popleft()
            if not ready.cancelled():
                self.active += 1
                self._used += cost
                ready.set_result(None)
