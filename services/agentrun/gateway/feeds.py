"""All feeds of a process: who follows which run, the heartbeat, and the comparison with Postgres that finds lost last events.

The channel is only a fast wire. One query compares all runs that are followed with their tops in Postgres: with every heartbeat, after
every reconnect to Redis, and about each second while Redis is away or a hole waits to be filled.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import UUID

import structlog

from agentrun import telemetry
from agentrun.bus.live import LiveFeed
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.states import UNFINISHED
from agentrun.gateway.feed import Backlog, Feed, Viewer
from agentrun.gateway.log import EventLog
from agentrun.store import messages
from agentrun.store.pool import Pool

HEARTBEAT_SECONDS = 15.0
POLL_SECONDS = 1.0
SETTLE_SECONDS = 3.0
"""After a reconnect: a worker that lost the channel too may store its events this much later."""
LEAVE_SECONDS = 1.5
MOST_BYTES = 1_048_576
"""What may wait for one client before it is cut."""
MOST_BYTES_TOGETHER = 67_108_864
"""What may wait for all; beyond it those are cut that have more than their share."""
MOST_VIEWERS = 5000
MOST_COMPARED = 1000

_log = structlog.get_logger(__name__)


class Feeds:
    """Made once per process; `start` before use, `close` at the end. `live` must call `compare_soon` when it is back."""

    def __init__(
        self,
        pool: Pool,
        live: LiveFeed,
        log: EventLog,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        most_bytes: int = MOST_BYTES,
        most_viewers: int = MOST_VIEWERS,
    ) -> None:
        self.log = log
        self._pool = pool
        self._live = live
        self._heartbeat_seconds = heartbeat_seconds
        self._poll_seconds = poll_seconds
        self._most_bytes = most_bytes
        self._most_viewers = most_viewers
        self._backlog = Backlog(MOST_BYTES_TOGETHER)
        self._feeds: dict[UUID, Feed] = {}
        self._viewers: set[Viewer] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closing = False
        self._soon = asyncio.Event()
        self._settled_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to compare and to send heartbeats."""
        self._task = asyncio.create_task(self._run(), name="feeds")

    @property
    def runs(self) -> int:
        """How many runs are followed."""
        return len(self._feeds)

    @property
    def viewers(self) -> int:
        """How many clients there are."""
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """Whether there are as many clients as this process can serve."""
        return len(self._viewers) >= self._most_viewers

    def compare_soon(self) -> None:
        """Compares now instead of at the next heartbeat, and again until what was said meanwhile must have been stored."""
        self._settled_at = time.monotonic() + SETTLE_SECONDS
        self._soon.set()

    @contextlib.contextmanager
    def viewer(self, *, cursor: int, abort: Callable[[], None]) -> Iterator[Viewer]:
        """A client that stands at `cursor`, known here while the block runs."""
        viewer = Viewer(cursor=cursor, most_bytes=self._most_bytes, backlog=self._backlog, abort=abort)
        viewer.cut = self._closing
        self._viewers.add(viewer)
        self._backlog.clients += 1
        self._empty.clear()
        telemetry.STREAM_CLIENTS.inc()
        try:
            yield viewer
        finally:
            viewer.stop()
            self._viewers.discard(viewer)
            self._backlog.clients -= 1
            if not self._viewers:
                self._empty.set()
            telemetry.STREAM_CLIENTS.dec()

    @contextlib.asynccontextmanager
    async def follow(self, run_id: UUID) -> AsyncIterator[Feed]:
        """The run's feed, subscribed to its channel before the block runs if Redis can be reached at all."""
        feed = self._feeds.get(run_id)
        if feed is None:
            feed = self._feeds[run_id] = Feed(run_id, self.log)
        feed.users += 1
        try:
            async with feed.subscribing:
                if not feed.subscribed:
                    feed.confirmed = await self._live.subscribe(run_id, feed.receive)
                    feed.subscribed = True
            yield feed
        finally:
            feed.users -= 1
            if feed.users == 0:
                del self._feeds[run_id]
                self._live.unsubscribe(run_id, feed.receive)
                feed.close()

    async def close(self) -> None:
        """Cuts every stream, so that the clients resume elsewhere, and waits until they are gone."""
        self._closing = True
        for viewer in list(self._viewers):
            viewer.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), LEAVE_SECONDS)
        for viewer in list(self._viewers):
            viewer.abort()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        beat = time.monotonic() + self._heartbeat_seconds
        while True:
            pause = min(beat - time.monotonic(), self._poll_seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), max(pause, 0))
            due = self._soon.is_set() or self._uncertain()
            self._soon.clear()
            if time.monotonic() >= beat:
                beat, due = time.monotonic() + self._heartbeat_seconds, True
                for viewer in self._viewers:
                    viewer.beat()
            if due:
                await self._try_to_compare()

    async def _try_to_compare(self) -> None:
        try:
            await self._compare()
        except StoreUnavailable as error:
            _log.warning("streams cannot be compared with Postgres", error=str(error))
        except Exception:
            _log.exception("streams cannot be compared with Postgres")
        else:
            return
        await asyncio.sleep(self._poll_seconds)
        self._soon.set()

    def _uncertain(self) -> bool:
        if not self._live.connected or time.monotonic() < self._settled_at:
            return True
        return any(feed.stuck or not feed.confirmed for feed in self._feeds.values())

    async def _compare(self) -> None:
        for run_ids in _chunks(list(self._feeds)):
            tops = await messages.tops(self._pool, run_ids)
            for run_id in run_ids:
                feed, top = self._feeds.get(run_id), tops.get(run_id)
                if feed is not None and top is not None:
                    feed.compare(top.top, finished=top.status not in UNFINISHED)
                elif feed is not None:
                    feed.cut()
        if self._live.connected:
            for feed in [feed for feed in self._feeds.values() if feed.subscribed and not feed.confirmed]:
                await self._confirm(feed)

    async def _confirm(self, feed: Feed) -> None:
        """Asks again for a subscription that was not confirmed in time."""
        async with feed.subscribing:
            if self._feeds.get(feed.run_id) is feed:
                self._live.unsubscribe(feed.run_id, feed.receive)
                feed.confirmed = await self._live.subscribe(feed.run_id, feed.receive)
                if self._feeds.get(feed.run_id) is not feed:
                    self._live.unsubscribe(feed.run_id, feed.receive)
                elif feed.confirmed and feed.cursor is not None:
                    feed.refill()


def _chunks(run_ids: list[UUID]) -> list[list[UUID]]:
    return [run_ids[start : start + MOST_COMPARED] for start in range(0, len(run_ids), MOST_COMPARED)]
