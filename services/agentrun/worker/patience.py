"""Living through outages: the same call again until it is answered, and few words about it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from agentrun.domain.errors import StoreUnavailable

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
REMIND_SECONDS = 30.0

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


async def until_answered(call: Callable[[], Awaitable[T]], *, complaint: Complaint) -> T:
    """Repeats `call` while it raises StoreUnavailable. Only for calls that may be repeated; cancellation gives up."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            answer = await call()
        except StoreUnavailable as error:
            complaint.about(error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        else:
            complaint.over()
            return answer
