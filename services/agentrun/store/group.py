"""Group commit: whoever waits shares one round trip.

A committer takes whatever waits at the moment (at most `most` items, and so many that they weigh about `most_weight`), hands
it to `work` in the order of arrival, and resolves the waiters. There is no timer, so a lone item is not delayed; under load
the groups grow by themselves. A member that makes the whole group fail is found by halving the group: it alone gets the
error. An outage (StoreUnavailable, BusUnavailable) fails every member at once, since trying them singly would only take
longer. But one member may be what looks like an outage, for example by taking too long: after several outages in a row the
groups are halved, until one gets through.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from agentrun.domain.errors import BusUnavailable, StoreUnavailable
from agentrun.telemetry import GROUP_SIZE

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

OUTAGE = (StoreUnavailable, BusUnavailable)
OUTAGES_BEFORE_HALVING = 3
MOST_WEIGHT = 16_000_000
"""Bytes of one group, roughly: a statement of that size is parsed, sent and stored well within every time limit."""


class _Waiting(NamedTuple, Generic[I, R]):
    item: I
    weight: int
    future: "asyncio.Future[R]"


class Group(Generic[I, R]):
    """Items of one kind, worked on in groups by one committer. Belongs to the event loop that first submits.

    `work` gets the items in order and answers with one result each, in the same order. `weigh` says how many bytes an item
    is. `stage` names the group in the metric agentrun_group_size and in errors.
    """

    def __init__(
        self,
        work: Callable[[Sequence[I]], Awaitable[Sequence[R]]],
        *,
        most: int = 500,
        weigh: Callable[[I], int] = lambda item: 0,
        most_weight: int = MOST_WEIGHT,
        stage: str,
    ) -> None:
        self.stage = stage
        self.weight = 0
        """What all items that wait for a committer weigh together."""
        self._sizes = GROUP_SIZE.labels(stage)
        self._work = work
        self._most = self._most_now = most
        self._weigh = weigh
        self._most_weight = most_weight
        self._outages = 0
        self._waiting: deque[_Waiting[I, R]] = deque()
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
        one = _Waiting(item, self._weigh(item), future)
        self._waiting.append(one)
        self.weight += one.weight
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit(), name=f"group:{self.stage}")
        return await future

    async def close(self) -> None:
        """Takes nothing more and waits until everything submitted has its answer."""
        self._closed = True
        while self._committer is not None:
            await asyncio.wait([self._committer])

    async def _commit(self) -> None:
        group: list[_Waiting[I, R]] = []
        try:
            while self._waiting:
                group = self._take()
                if group:
                    self._sizes.observe(len(group))
                    await self._try(group)
        except BaseException:
            # The committer itself was cancelled: nobody may wait for ever.
            for one in (*group, *self._waiting):
                one.future.cancel()
            self._waiting.clear()
            self.weight = 0
            raise
        finally:
            self._committer = None  # in the same step as the last look at `_waiting`, or an item could be left behind

    def _take(self) -> list[_Waiting[I, R]]:
        group: list[_Waiting[I, R]] = []
        weight = 0
        while self._waiting and len(group) < self._most_now:
            one = self._waiting[0]
            if group and weight + one.weight > self._most_weight:
                break
            self._waiting.popleft()
            self.weight -= one.weight
            if not one.future.done():
                group.append(one)
                weight += one.weight
        return group

    async def _try(self, group: Sequence[_Waiting[I, R]]) -> None:
        try:
            results = await self._work([one.item for one in group])
            if len(results) != len(group):
                raise RuntimeError(f"group {self.stage!r}: {len(results)} results for {len(group)} items")
        except Exception as error:
            away = isinstance(error, OUTAGE)
            self._note(len(group), away=away)
            if len(group) == 1 or away:
                for one in group:
                    if not one.future.done():
                        one.future.set_exception(error)
                return
            middle = len(group) // 2
            await self._try(group[:middle])
            await self._try(group[middle:])
            return
        self._note(len(group), away=False)
        for one, result in zip(group, results, strict=True):
            if not one.future.done():
                one.future.set_result(result)

    def _note(self, size: int, *, away: bool) -> None:
        """Keeps account of outages in a row: the groups shrink by halves during many, and grow again by doubling after them."""
        if not away:
            self._outages, self._most_now = 0, min(2 * self._most_now, self._most)
            return
        self._outages += 1
        if self._outages >= OUTAGES_BEFORE_HALVING:
            self._most_now = max(1, min(self._most_now, size) // 2)
