"""How many runs a worker may hold, and how many it does."""

import asyncio
from collections.abc import Callable


class Slots:
    """A slot is taken before a run comes in, and given back when nothing of it is left in this process."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._news = asyncio.Event()

    def take(self, count: int) -> None:
        """Before runs come in."""
        self.free -= count

    def give(self, count: int) -> None:
        """After they have gone."""
        self.free += count
        self._news.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is held."""
        return self.free == self.capacity

    async def wait(self, seconds: float) -> None:
        """Until some slot is free, at most so long."""
        await self._wait(lambda: self.free > 0, seconds)

    async def wait_empty(self, seconds: float) -> None:
        """Until all slots are free, at most so long."""
        await self._wait(lambda: self.empty, seconds)

    @property
    def chunk(self) -> int:
        """How many entries to ask for: a quarter of all at most, so that reading, claiming and executing overlap."""
        return min(self.free, max(1, self.capacity // 4))

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
