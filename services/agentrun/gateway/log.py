"""A run's events wherever they are: Postgres has all that were flushed, the run's Redis stream the newest.

Answers are always without a hole: they begin right after the position asked for, or are empty.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from agentrun import telemetry
from agentrun.domain.errors import BusUnavailable
from agentrun.domain.events import Event
from agentrun.domain.folding import Part, fold, parts_of
from agentrun.store import messages
from agentrun.store.pool import Pool

PAGE = 200
PAGE_BYTES = 262_144
"""A page ends with the event that reaches it."""
FIRST_STREAMED = 20
"""Redis counts entries only, so a few are asked for first; as a rule that is all there is."""
BUS_SECONDS = 1.0
"""Redis is only the shorter way: Postgres is asked when it takes longer."""

REPLAY_LIMIT = 10_000

ReadStream = Callable[[UUID, int, int], Awaitable[Sequence[Event]]]


def contiguous(events: Sequence[Event], *, after: int) -> list[Event]:
    """The events right after `after`, up to the first hole."""
    found: list[Event] = []
    for event in events:
        if event.seq == after + len(found) + 1:
            found.append(event)
        elif event.seq > after:
            break
    return found


def size_of(events: Sequence[Event]) -> int:
    """How many bytes they carry."""
    return sum(len(event.data) for event in events)


class EventLog:
    """Reads events of runs; `read_stream` takes run id, position and limit. Holds no connection between two calls."""

    def __init__(self, pool: Pool, read_stream: ReadStream, *, replay_limit: int = REPLAY_LIMIT) -> None:
        """Whoever is more than `replay_limit` events behind is not to get them one by one."""
        self.replay_limit = replay_limit
        self._pool = pool
        self._read_stream = read_stream

    async def gap(self, run_id: UUID, *, after: int) -> list[Part] | None:
        """What stands for the events after a position, as far as they can be folded; None: they cannot. Raises StoreUnavailable."""
        marks, checkpoint = await messages.outline(self._pool, run_id)
        wanted = fold(marks, checkpoint=checkpoint)
        if wanted is None or wanted.through <= after:
            return None
        return parts_of(wanted, await messages.spoken(self._pool, run_id, wanted))

    async def replay(self, run_id: UUID, *, after: int) -> list[Event]:
        """The next page for a client that starts: Postgres first, then the stream. Raises StoreUnavailable."""
        found = await self._stored(run_id, after=after)
        if len(found) >= PAGE or size_of(found) >= PAGE_BYTES:
            return found
        top = found[-1].seq if found else after
        newest = await self._streamed(run_id, after=top)
        if newest and newest[0].seq > top + 1:
            # What lies between was flushed since Postgres was read, or was never on the stream.
            found += await self._stored(run_id, after=top)
            top = found[-1].seq if found else after
        return found + contiguous(newest, after=top)

    async def refill(self, run_id: UUID, *, after: int) -> list[Event]:
        """What is missing in a live stream: from the run's stream, else from Postgres. Raises StoreUnavailable."""
        found = contiguous(await self._streamed(run_id, after=after), after=after)
        source = "redis"
        if not found:
            found = await self._stored(run_id, after=after)
            source = "postgres"
        if found:
            telemetry.STREAM_REFILLS.labels(source).inc()
        return found

    async def _stored(self, run_id: UUID, *, after: int) -> list[Event]:
        return await messages.page(self._pool, run_id, after=after, limit=PAGE, most_bytes=PAGE_BYTES)

    async def _streamed(self, run_id: UUID, *, after: int) -> Sequence[Event]:
        found: list[Event] = []
        wanted = FIRST_STREAMED
        with contextlib.suppress(BusUnavailable, TimeoutError):
            async with asyncio.timeout(BUS_SECONDS):
                while True:
                    more = await self._read_stream(run_id, found[-1].seq if found else after, wanted)
                    found += more
                    if len(more) < wanted or len(found) >= PAGE or (size := size_of(found)) >= PAGE_BYTES:
                        break
                    wanted = min(PAGE - len(found), max(1, (PAGE_BYTES - size) * len(found) // max(size, 1)))
        return found
