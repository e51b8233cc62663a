"""One run's events to one client: replay at the client's pace, then live, until the terminal event.

The order is what makes it whole: subscribe to the channel, replay from Postgres, then from the run's stream, then take what the channel
brought meanwhile. No database connection is held between two reads. An early end (shutdown, a client that is too slow) cuts the chunked
body, so that the client notices and resumes.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from starlette.types import Receive, Scope, Send

from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.states import UNFINISHED
from agentrun.gateway import frames
from agentrun.gateway.connections import transport
from agentrun.gateway.feed import Viewer
from agentrun.gateway.feeds import Feeds
from agentrun.gateway.problems import INVALID_CURSOR, Problem, not_found
from agentrun.store import messages
from agentrun.store.pool import Pool

SEND_SECONDS = 60.0
"""A client that takes nothing for this long is cut."""
CLOSE_SECONDS = 2.0
BUSY_MILLISECONDS = 5000
FULL_MILLISECONDS = 15_000

Headers = Sequence[tuple[bytes, bytes]]


class StreamCut(Exception):
    """The stream ends here without its proper end. Raised only under a server that does not show its transport."""


def cursor_of(scope: Scope, after: str | None) -> int:
    """The position that a request names in `Last-Event-ID`, else in `?after=`; -1 if it names none.

    The header wins, since a client that reconnects to the same address sends the newer position there. Raises Problem.
    """
    named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"]
    if len(named) > 1:
        raise Problem(INVALID_CURSOR, "Send Last-Event-ID once.")
    text = named[0] if named else after
    if text is None:
        return frames.START
    cursor = frames.parse_position(text)
    if cursor is None:
        raise Problem(INVALID_CURSOR, "A position is the id of the last event that you have: a whole number, 0 or more.")
    return cursor


@dataclass(frozen=True, slots=True)
class Start:
    """Where a client begins. `finished`: nothing will be added to the run's events; `at_end`: the client has them all. `top` is the last
    event in Postgres, -1 if there is none.
    """

    cursor: int
    finished: bool = False
    at_end: bool = False
    top: int = -1


async def start_at(pool: Pool, run_id: UUID, cursor: int) -> Start:
    """Raises Problem for a position that the run cannot have given out, StoreUnavailable."""
    top = (await messages.tops(pool, [run_id])).get(run_id)
    if top is None:
        raise not_found("run")
    if cursor > top.cursor_limit:
        raise Problem(
            INVALID_CURSOR,
            f"This run has no event {cursor}. The position belongs to another run; start without one.",
            members={"top": top.top},
        )
    finished = top.status not in UNFINISHED
    return Start(cursor, finished, finished and cursor == top.top, top.top)


async def no_content(send: Send, headers: Headers = ()) -> None:
    """The answer that tells an EventSource not to reconnect: there is nothing more."""
    await send({"type": "http.response.start", "status": 204, "headers": [*headers, (b"cache-control", b"no-store")]})
    await send({"type": "http.response.body", "body": b""})


class RunStream:
    """An ASGI application that answers with the events of one run after `start.cursor`."""

    def __init__(self, feeds: Feeds, run_id: UUID, start: Start, headers: Headers = ()) -> None:
        self._feeds = feeds
        self._run_id = run_id
        self._start = start
        self._headers = [*frames.HEADERS, *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": b""})
            return
        connection = transport(scope)
        with self._feeds.viewer(cursor=self._start.cursor, abort=connection.abort if connection else _nothing) as viewer:
            gone = asyncio.create_task(_until_gone(receive, viewer), name=f"viewer:{self._run_id}")
            try:
                await self._serve(viewer, send)
                if viewer.done or gone.done():
                    return
                if connection is None:
                    raise StreamCut(f"stream of run {self._run_id} was cut")
                connection.close()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(gone), CLOSE_SECONDS)
                if not gone.done():
                    connection.abort()
                    await gone
            finally:
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await gone

    async def _serve(self, viewer: Viewer, send: Send) -> None:
        """Returns when the viewer has everything or is to be cut."""
        try:
            if self._start.finished:
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._replay(viewer, send)
                return
            async with self._feeds.follow(self._run_id) as feed:
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._replay(viewer, send)
                feed.attach(viewer)
                try:
                    while viewer.open:
                        await viewer.wake.wait()
                        await _write(viewer, send)
                finally:
                    feed.detach(viewer)
        except (StoreUnavailable, TimeoutError):
            viewer.stop()

    async def _replay(self, viewer: Viewer, send: Send) -> None:
        """Sends what there is, without a pause between the last look and the return.

        Too many events, and those of a finished run that are not there any more, are replaced by their text.
        """
        log = self._feeds.log
        if self._start.top - viewer.cursor > log.replay_limit:
            await self._skip(viewer, send)
        while viewer.open:
            page = await log.replay(self._run_id, after=viewer.cursor)
            for event in page:
                viewer.push(frames.frame(event))
            await _write_all(viewer, send)
            if not page and not (self._start.finished and await self._skip(viewer, send)):
                return

    async def _skip(self, viewer: Viewer, send: Send) -> bool:
        """Sends a gap, if there is anything that it can stand for."""
        parts = await self._feeds.log.gap(self._run_id, after=viewer.cursor)
        if parts is not None:
            viewer.push(frames.gap(parts))
            await _write_all(viewer, send)
        return parts is not None


async def _write_all(viewer: Viewer, send: Send) -> None:
    while viewer.waiting and viewer.open:
        await _write(viewer, send)


async def _write(viewer: Viewer, send: Send) -> None:
    body = viewer.take()
    if viewer.cut:
        return
    ended = viewer.ended and not viewer.waiting
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": not ended})
    viewer.done = ended


async def busy(scope: Scope, receive: Receive, send: Send, *, retry: int = BUSY_MILLISECONDS) -> None:
    """The answer to an EventSource while it cannot be served: a status of 503 would stop a browser for good.

    The body asks for a longer pause and is cut.
    """
    body = b"retry: %d\n" % retry + frames.HEARTBEAT
    await send({"type": "http.response.start", "status": 200, "headers": [*frames.HEADERS]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    connection = transport(scope)
    if connection is None:
        raise StreamCut("no stream can be served now")
    connection.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass


async def _until_gone(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.stop()


def _nothing() -> None:
    pass
