"""The stage after the commit: tells Redis what Postgres already holds. Nobody waits for it, and nothing depends on it.

Heads that it could not publish are found by the sweep; events that it could not send are found by the streams' comparison with Postgres;
a worker that missed a control message ends at its next refused write.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import structlog

from agentrun import failpoints
from agentrun.domain.errors import BusMisconfigured, BusUnavailable
from agentrun.domain.events import Event

MOST_WAITING = 10_000
MOST_AT_ONCE = 500
LAST_SECONDS = 1.0

_log = structlog.get_logger(__name__)

Heads = Callable[[Sequence[UUID]], Awaitable[object]]
Events = Callable[[Sequence[tuple[UUID, Event]]], Awaitable[object]]
Cancel = Callable[[str, UUID, int], Awaitable[object]]


class Publisher:
    """Sends in the order: control messages, events, heads. What it cannot send, it drops. Belongs to one event loop."""

    def __init__(self, *, heads: Heads, events: Events, cancel: Cancel) -> None:
        self._send_heads = heads
        self._send_events = events
        self._send_cancel = cancel
        self._heads: dict[UUID, None] = {}
        self._events: list[tuple[UUID, Event]] = []
        self._cancels: list[tuple[str, UUID, int]] = []
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0

    def publish(self, run_ids: Sequence[UUID]) -> None:
        """Makes runs that are their sessions' heads known to the workers."""
        self._heads.update(dict.fromkeys(run_ids))
        self._wake()

    def send_events(self, events: Sequence[tuple[UUID, Event]]) -> None:
        """Sends stored events to the readers of their runs."""
        self._events.extend(events)
        self._wake()

    def cancel(self, consumer: str, run_id: UUID, epoch: int) -> None:
        """Tells a worker that its attempt has been ended."""
        self._cancels.append((consumer, run_id, epoch))
        self._wake()

    async def close(self) -> None:
        """Sends what waits, for at most a second."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, LAST_SECONDS)

    def _wake(self) -> None:
        if len(self._heads) > MOST_WAITING or len(self._events) > MOST_WAITING or len(self._cancels) > MOST_WAITING:
            self._drop()
        if self._task is None and (self._heads or self._events or self._cancels):
            self._task = asyncio.create_task(self._run(), name="publisher")

    def _drop(self) -> None:
        self.dropped += len(self._heads) + len(self._events) + len(self._cancels)
        self._heads.clear()
        self._events.clear()
        self._cancels.clear()

    async def _run(self) -> None:
        try:
            while self._heads or self._events or self._cancels:
                try:
                    await self._send()
                except BusUnavailable:
                    self._drop()
                except (BusMisconfigured, failpoints.FailpointError) as error:
                    _log.error("what is stored cannot be published", error=str(error))
                    self._drop()
                except Exception:
                    # A fault, of which nobody would hear otherwise: nobody waits for this task.
                    _log.exception("what is stored cannot be published")
                    self._drop()
        finally:
            self._task = None

    async def _send(self) -> None:
        while self._cancels:
            await self._send_cancel(*self._cancels.pop(0))
        if self._events:
            events, self._events = self._events[:MOST_AT_ONCE], self._events[MOST_AT_ONCE:]
            await self._send_events(events)
        if self._heads:
            heads = list(self._heads)[:MOST_AT_ONCE]
            for head in heads:
                del self._heads[head]
            await failpoints.hit("gateway.publish.before")
            await self._send_heads(heads)
