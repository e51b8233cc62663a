"""A limited number of places for which groups take turns, so that a crowd of one group holds up only itself."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class FairPlaces:
    """Of those that wait, the next place goes to the group that has had none for longest; within a group, first come, first served.

    So a newcomer of another group waits for as many places as there are groups that wait, however many wait in each.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """In the order of their turns; no group is empty."""

    def full(self) -> bool:
        """Whether who comes now has to wait."""
        return self._free == 0

    @contextlib.asynccontextmanager
    async def place(self, group: str) -> AsyncIterator[None]:
        """Waits for a place; it is taken as long as the body lasts."""
        await self._take(group)
        try:
            yield
        finally:
            self._give()

    async def _take(self, group: str) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(group, turn)
            else:  # the place was given in this moment
                self._give()
            raise

    def _leave(self, group: str, turn: asyncio.Future[None]) -> None:
        if (queue := self._waiting.get(group)) is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[group]

    def _give(self) -> None:
        while self._waiting:
            group = next(iter(self._waiting))
            queue = self._waiting.pop(group)
            turn = queue.popleft()
            if queue:
                self._waiting[group] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
