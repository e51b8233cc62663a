"""Living through outages: the same call again until it is answered, and few words about it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from agentrun.domain.errors import StoreUnavailable

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
REMIND_SECONDS = 30.0
GROUP_TRIES = 3

log = structlog.get_logger("agentrun.worker")


class Complaint:
    """One error that may repeat: said at once, then at most every 30 seconds with a count, and once when it is over.

    May be used from any one thread.
    """

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._count = 0
        self._said = 0.0

    def about(self, error: BaseException) -> None:
        """The error happened, perhaps again."""
        self._count += 1
        now = self._clock()
        if self._count == 1 or now - self._said >= REMIND_SECONDS:
            self._said = now
            log.warning(self._what, error=f"{type(error).__name__}: {error}", times=self._count)

    def over(self) -> None:
        """It works again."""
        if self._count:
            log.info(f"{self._what}: works again", times=self._count)
            self._count = 0


async def until_answered(call: Callable[[], Awaitable[T]], *, complaint: Complaint, tries: int | None = None) -> T:
    """Repeats `call` while it raises StoreUnavailable, at most `tries` times. Only for calls that may be repeated; cancellation
    gives up.
    """
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            answer = await call()
        except StoreUnavailable as error:
            complaint.about(error)
            tries = None if tries is None else tries - 1
            if tries == 0:
                raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        else:
            complaint.over()
            return answer


async def by_halves(
    group: Sequence[I],
    ask: Callable[[Sequence[I]], Awaitable[T]],
    *,
    then: Callable[[Sequence[I], T], Awaitable[None]],
    bad: Callable[[I, Exception], Awaitable[None]],
    complaint: Complaint,
) -> None:
    """Asks for a whole group and goes on with the answer. If that fails, the halves are asked for side by side, and so on down to
    the member at fault, for which `bad` is called: nobody waits for it.

    A group that gets no answer is halved too after some tries, since one member may look like an outage. A single one is asked
    for until it is answered.
    """
    try:
        tries = GROUP_TRIES if len(group) > 1 else None
        answer = await until_answered(lambda: ask(group), complaint=complaint, tries=tries)
    except Exception as error:
        if len(group) == 1:
            await bad(group[0], error)
            return
        middle = len(group) // 2
        halves = (group[:middle], group[middle:])
        await asyncio.gather(*(by_halves(half, ask, then=then, bad=bad, complaint=complaint) for half in halves))
        return
    await then(group, answer)
