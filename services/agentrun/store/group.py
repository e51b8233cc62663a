"""Group commit: whoever waits shares one round trip.

A committer takes whatever waits at the moment (at most `most`), hands it to `work` in the order of arrival, and
resolves the waiters. There is no timer, so a lone item is not delayed; under load the groups grow by themselves. A
member that makes the whole group fail is found by halving the group: it alone gets the error. An outage
(StoreUnavailable, BusUnavailable) fails every member at once, since trying them singly would only take longer.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from agentrun.domain.errors import BusUnavailable, StoreUnavailable
from agentrun.telemetry import GROUP_SIZE

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

OUTAGE = (StoreUnavailable, BusUnavailable)


class Group(Generic[I, R]):
    """Items of one kind, worked on in groups by one committer. Belongs to the event loop that first submits.

    `work` gets the items in order and answers with one result each, in the same order. `stage` names the group in
    the metric agentrun_group_size and in errors.
    """

    def __init__(self, work: Callable[[Sequence[I]], Awaitable[Sequence[R]]], *, most: int = 500, stage: str) -> None:
        self.stage = stage
        self._sizes = GROUP_SIZE.labels(stage)
        self._work = work
        self._most = most
        self._waiting: deque[tuple[I, asyncio.Future[R]]] = deque()
        self._committer: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many items wait for a committer (not those in a group that is on its way)."""
        return len(self._waiting)

    async def submit(self, item: I) -> R:
        """Waits for the item's result. Raises what `work` raised for it, RuntimeError after `close`.

        A caller that is cancelled takes its item back if no group has taken it yet; otherwise the item is worked on all
        the same.
        """
        if self._closed:
            raise RuntimeError(f"group {self.stage!r} is closed")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit(), name=f"group:{self.stage}")
        return await future

    async def close(self) -> None:
        """Takes nothing more and waits until everything submitted has its answer."""
        self._closed = True
        while self._committer is not None:
            await asyncio.wait([self._committer])

    async def _commit(self) -> None:
        group: list[tuple[I, asyncio.Future[R]]] = []
        try:
            while self._waiting:
                group = self._take()
                self._sizes.observe(len(group))
                await self._try(group)
        except BaseException:
            # The committer itself was cancelled: nobody may wait for ever.
            for _, future in (*group, *self._waiting):
                future.cancel()
            self._waiting.clear()
            raise
        finally:
            self._committer = None  # in the same step as the last look at `_waiting`, or an item could be left behind

    def _take(self) -> list[tuple[I, "asyncio.Future[R]"]]:
        group: list[tuple[I, asyncio.Future[R]]] = []
        while self._waiting and len(group) < self._most:
            item, future = self._waiting.popleft()
            if not future.done():
                group.append((item, future))
        return group

    async def _try(self, group: list[tuple[I, "asyncio.Future[R]"]]) -> None:
        if not group:
            return
        try:
            results = await self._work([item for item, _ in group])
            if len(results) != len(group):
                raise RuntimeError(f"group {self.stage!r}: {len(results)} results for {len(group)} items")
        except Exception as error:
            if len(group) == 1 or isinstance(error, OUTAGE):
                for _, future in group:
                    if not future.done():
                        future.set_exception(error)
                return
            middle = len(group) // 2
            await self._try(group[:middle])
            await self._try(group[middle:])
            return
        for (_, future), result in zip(group, results, strict=True):
            if not future.done():
                future.set_result(result)
