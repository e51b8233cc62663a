"""How long to wait before something that ought to be rare is done again: longer and longer while it goes on."""

import random
import time
from collections.abc import Callable

GROWTH = 8.0


class Pauses:
    """Pauses from `first` to `longest` seconds, growing by `GROWTH`. After `calm` seconds without one they begin anew.

    Several that ask within one pause are of one round, and get the same: what happens to one watch happens to all of them.
    """

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        calm: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._first, self._longest, self._calm = first, longest, calm
        self._clock, self._jitter = clock, jitter
        self._pause = 0.0
        self._until = float("-inf")

    def next(self) -> float:
        """Seconds; up to a quarter more at random."""
        now = self._clock()
        if now >= self._until:
            calm = now > self._until + self._calm
            self._pause = self._first if calm else min(self._pause * GROWTH, self._longest)
            self._until = now + self._pause
        return self._pause * (1.0 + 0.25 * self._jitter())
