"""Background loops that cannot vanish: each is held, watched, started again after a failure, and its progress is known.

A loop that fails is logged, counted and started again after a growing pause. A loop that neither fails nor makes progress shows in
`stalled`, which a process serves as its liveness.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from agentrun.domain.errors import AgentrunError
from agentrun.telemetry import LOOP_RESTARTS

Stamp = Callable[[], None]
"""Called by a loop to say: I am getting on. Also resets the pause before the next restart."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Loop:
    stamped: float
    stale_after: float
    failures: int = 0
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Runs the loops of one process."""

    def __init__(
        self, *, first_pause: float = 0.2, longest_pause: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Pauses before a restart begin at `first_pause` seconds and double up to `longest_pause`."""
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._loops: dict[str, _Loop] = {}

    def run(self, name: str, body: Callable[[Stamp], Awaitable[None]], *, stale_after: float = 60.0) -> None:
        """Keeps `body` running until `stop`. It must stamp its progress at least every `stale_after` seconds, and never return."""
        if name in self._loops:
            raise ValueError(f"the loop {name} is running already")
        loop = self._loops[name] = _Loop(self._clock(), stale_after)
        loop.task = asyncio.create_task(self._keep_running(name, loop, body), name=name)

    def every(
        self,
        name: str,
        seconds: float,
        tick: Callable[[], Awaitable[object]],
        *,
        before: Callable[[], Awaitable[object]] | None = None,
        stale_after: float = 60.0,
    ) -> None:
        """Calls `tick` again and again, with `seconds` between the end of one call and the start of the next.

        `before` is called first, and again after every failure: what must hold for the ticks, such as a connection's checks.
        """

        async def body(stamp: Stamp) -> None:
            if before is not None:
                await before()
            while True:
                await tick()
                stamp()
                await asyncio.sleep(seconds)

        self.run(name, body, stale_after=stale_after + seconds)

    def stalled(self) -> str | None:
        """What is wrong if a loop has neither made progress nor failed for too long; None if all is well."""
        now = self._clock()
        late = [name for name, loop in self._loops.items() if now - loop.stamped > loop.stale_after]
        return f"no progress: {', '.join(sorted(late))}" if late else None

    def failing(self) -> str | None:
        """Which loops failed at their last try; None if none did."""
        bad = [name for name, loop in self._loops.items() if loop.failures]
        return f"failing: {', '.join(sorted(bad))}" if bad else None

    async def stop(self) -> None:
        """Ends all loops and waits for them."""
        tasks = [loop.task for loop in self._loops.values() if loop.task is not None]
        self._loops.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_running(self, name: str, loop: _Loop, body: Callable[[Stamp], Awaitable[None]]) -> None:
        def stamp() -> None:
            loop.stamped, loop.failures = self._clock(), 0

        while True:
            try:
                await body(stamp)
                _log.error("loop returned", loop=name)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                _log.error("loop cancelled itself", loop=name)
            except AgentrunError as error:
                _log.warning("loop could not work", loop=name, error=str(error))
            except Exception:
                _log.exception("loop failed", loop=name)
            loop.stamped = self._clock()  # a failure is not a stall: a restart of the process would not mend a store
            LOOP_RESTARTS.labels(name).inc()
            await asyncio.sleep(min(self._first_pause * 2**loop.failures, self._longest_pause))
            loop.failures = min(loop.failures + 1, 30)
