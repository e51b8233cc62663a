"""The time of a plan."""

import asyncio
import time
from collections.abc import Callable

TURN_SECONDS, LONGEST_TURN_SECONDS = 0.02, 0.2
"""A turn that comes later is a machine that has no time for us: the plan waits for it."""


class Clock:
    """It stands still while the system does not stand, so that a slow machine has the same plan, only longer."""

    def __init__(self, stands: Callable[[], bool]) -> None:
        self._stands = stands
        self._last = time.monotonic()
        self.now = 0.0

    def turn(self) -> None:
        """Looks at the system and counts the time since the last look."""
        now, last = time.monotonic(), self._last
        self._last = now
        if self._stands():
            self.now += min(now - last, LONGEST_TURN_SECONDS)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(TURN_SECONDS)

    async def until(self, when: float) -> None:
        """Waits for a time of the plan."""
        while self.now < when:
            pause = min(when - self.now, 1.0)
            await asyncio.sleep(max(pause, TURN_SECONDS))
