"""One feed per run that somebody follows, shared by all its viewers, and the viewers themselves.

A feed turns the run's channel, which may lose messages, into events without a hole: a missing number is seen at the next one and refilled
from the run's stream, else from Postgres; a hole that neither can fill waits for the next comparison with Postgres (feeds.py).
What comes before a viewer joins is the viewer's own business (streams.py): it replays at its own pace and then attaches.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from uuid import UUID

from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.events import Event
from agentrun.gateway.frames import HEARTBEAT, RETRY, Frame, frame
from agentrun.gateway.log import EventLog

RECENT = 256
RECENT_BYTES = 262_144
MOST_EARLY = 1000
EARLY_BYTES = 1_048_576
WRITE_BYTES = 65_536
"""What goes to a connection at once: as much as it holds by itself before it says that it is full."""


class Backlog:
    """What waits for all clients together."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self.clients = 0
        self._most_bytes = most_bytes

    def hoards(self, own: int) -> bool:
        """Whether all together have too much, and a client with `own` bytes more than its share."""
        return self.bytes > self._most_bytes and own * self.clients > self._most_bytes


class Viewer:
    """One client of a run: its position, and what is still to be written to it."""

    def __init__(self, *, cursor: int, most_bytes: int, backlog: Backlog, abort: Callable[[], None]) -> None:
        self.cursor = cursor
        self.ended = False
        """The terminal event is in the queue or was written: nothing more comes."""
        self.done = False
        """Everything was written, the terminal event last."""
        self.cut = False
        """It is to be disconnected without a proper end."""
        self.live = False
        """It is attached, so what waits for it is bounded; before that its own replay waits for it."""
        self.wake = asyncio.Event()
        self.abort = abort
        """Ends the connection at once, whatever is on its way."""
        self._first = True
        self.waiting = 0
        """The bytes that are still to be written."""
        self._most_bytes = most_bytes
        self._backlog = backlog
        self._queue: deque[bytes] = deque()

    @property
    def open(self) -> bool:
        """Whether there is still something to do for it."""
        return not self.done and not self.cut

    def push(self, item: Frame) -> None:
        """Queues a frame unless the viewer has it. A live viewer that is too slow is cut: it resumes from its last id."""
        if item.seq <= self.cursor or self.cut:
            return
        self.cursor = item.seq
        self.ended = item.terminal
        self._put(RETRY + item.data if self._first else item.data)
        self._first = False
        if (self.live and self.waiting > self._most_bytes) or self._backlog.hoards(self.waiting):
            self.stop()
            self.abort()

    def beat(self) -> None:
        """Queues a heartbeat if it is idle."""
        if self.live and not self._queue:
            self._put(HEARTBEAT)

    def take(self) -> bytes:
        """The next of what waits, at least WRITE_BYTES of it if there is so much."""
        taken: list[bytes] = []
        size = 0
        while self._queue and size < WRITE_BYTES:
            taken.append(self._queue.popleft())
            size += len(taken[-1])
        self._count(-size)
        if not self._queue:
            self.wake.clear()
        return b"".join(taken)

    def stop(self) -> None:
        """Lets its connection be cut."""
        self.cut = True
        self._queue.clear()
        self._count(-self.waiting)
        self.wake.set()

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._count(len(data))
        self.wake.set()

    def _count(self, size: int) -> None:
        self.waiting += size
        self._backlog.bytes += size


class Feed:
    """The live part of one run."""

    def __init__(self, run_id: UUID, log: EventLog) -> None:
        self.run_id = run_id
        self.cursor: int | None = None
        """The last seq without a hole before it; None until a viewer has said where it stands."""
        self.attached: set[Viewer] = set()
        self.users = 0
        self.subscribing = asyncio.Lock()
        self.subscribed = False
        self.confirmed = False
        """Whether everything that is published arrives here from now on."""
        self._log = log
        self._recent: deque[Frame] = deque()
        self._recent_bytes = 0
        self._early: dict[int, Frame] = {}
        self._early_bytes = 0
        self._stuck_at: int | None = None
        self._end: int | None = None
        """The terminal event's number, once it is stored."""
        self._refilling: asyncio.Task[None] | None = None

    def receive(self, event: Event) -> None:
        """Takes an event from the channel."""
        if self.cursor is not None and event.seq <= self.cursor:
            return
        self._keep_early(frame(event))
        if self.cursor is not None:
            self._advance()
            if self._early and self._stuck_at != self.cursor:
                self.refill()

    def attach(self, viewer: Viewer) -> None:
        """Joins a viewer that has replayed all it could find, without a hole or a repetition."""
        if self.cursor is None:
            self.cursor = viewer.cursor
        for item in self._recent:
            if item.seq == viewer.cursor + 1:
                viewer.push(item)
        self.attached.add(viewer)
        viewer.live = True
        if viewer.cursor < self.cursor:
            # It stands further back than what is remembered: go back with it. The others drop what they have.
            self._rewind(viewer.cursor)
        self._advance()
        if self._early or viewer.cursor != self.cursor:
            self.refill()

    def detach(self, viewer: Viewer) -> None:
        """Forgets a viewer."""
        self.attached.discard(viewer)

    @property
    def remembered(self) -> int:
        """The bytes that it holds for viewers to come and for numbers that wait for a missing one."""
        return self._recent_bytes + self._early_bytes

    @property
    def stuck(self) -> bool:
        """Whether it has a hole that could not be filled yet."""
        return self.cursor is not None and self._stuck_at == self.cursor

    def compare(self, top: int, *, finished: bool) -> None:
        """Takes the number of the last event in Postgres: whatever is missing up to there is fetched."""
        self._end = top if finished else None
        if self.cursor is not None and (top > self.cursor or self._early):
            self.refill()

    def cut(self) -> None:
        """Lets all its viewers resume: what they miss is not there any more, so they get a gap instead."""
        for viewer in self.attached:
            viewer.stop()
            viewer.abort()

    def refill(self) -> None:
        """Fetches what is missing after the cursor, as far as there is anything."""
        if self._refilling is None:
            self._refilling = asyncio.create_task(self._refill(), name=f"refill:{self.run_id}")

    def close(self) -> None:
        """Stops all work; viewers are left alone."""
        if self._refilling is not None:
            self._refilling.cancel()

    async def _refill(self) -> None:
        try:
            while self.cursor is not None:
                before = self.cursor
                for event in await self._log.refill(self.run_id, after=before):
                    self._keep_early(frame(event))
                    self._advance()
                if self.cursor == before:
                    self._stuck_at = before if self._early else None
                    if self._end is not None and before < self._end:
                        self.cut()
                    return
        except StoreUnavailable:
            pass  # the next comparison tries again
        finally:
            self._refilling = None

    def _keep_early(self, item: Frame) -> None:
        if item.seq in self._early:
            return
        if len(self._early) >= MOST_EARLY or self._early_bytes >= EARLY_BYTES:
            self._early.clear()  # they are on the stream or in Postgres
            self._early_bytes = 0
        self._early[item.seq] = item
        self._early_bytes += len(item.data)

    def _advance(self) -> None:
        assert self.cursor is not None
        while (item := self._early.pop(self.cursor + 1, None)) is not None:
            self._early_bytes -= len(item.data)
            self.cursor = item.seq
            self._remember(item)
            for viewer in self.attached:
                viewer.push(item)
        for seq in [seq for seq in self._early if seq <= self.cursor]:
            self._early_bytes -= len(self._early.pop(seq).data)

    def _remember(self, item: Frame) -> None:
        self._recent.append(item)
        self._recent_bytes += len(item.data)
        while len(self._recent) > RECENT or self._recent_bytes > RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popleft().data)

    def _rewind(self, cursor: int) -> None:
        for item in self._recent:
            if item.seq > cursor:
                self._keep_early(item)
        self._recent.clear()
        self._recent_bytes = 0
        self.cursor = cursor
        self._stuck_at = None
