"""A strict client of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) for tests.

Speaks HTTP/1.1 itself, so that it sees what client libraries hide: every byte, and whether a body ended or was cut.

    async with open_stream(url, headers=..., last_event_id="4") as stream:
        first = await stream.take(3)
        rest = await stream.rest()          # until the clean end; StreamCutError if the body is cut
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class StreamCutError(Exception):
    """The body ended without its last chunk."""


class StreamRefusedError(Exception):
    """Any status but 200 and 204, or 200 with another content type."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"{status} {headers.get('content-type', '')}: {body[:300]!r}")
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Frame:
    """One dispatched event. `id` and `retry` are None if the frame itself has no such field; `raw` is its bytes."""

    id: str | None
    event: str
    data: str
    retry: int | None
    raw: bytes

    def json(self) -> Any:
        return json.loads(self.data)


class FrameParser:
    """Bytes in, frames out. An unfinished last event is never dispatched."""

    def __init__(self) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        self.comments: list[str] = []
        self._pending = b""
        self._at_start = True
        self._block = b""
        self._clear()

    def _clear(self) -> None:
        self._data: list[str] = []
        self._event = ""
        self._id: str | None = None
        self._frame_retry: int | None = None

    def feed(self, data: bytes) -> list[Frame]:
        self._pending += data
        if self._at_start:
            if len(self._pending) < 3 and b"\xef\xbb\xbf".startswith(self._pending):
                return []
            self._pending = self._pending.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        frames = []
        while match := re.search(rb"\r\n|\n|\r(?=[^\n])", self._pending, re.DOTALL):
            line, end = self._pending[: match.start()], match.end()
            self._block += self._pending[:end]
            self._pending = self._pending[end:]
            frame = self._line(line.decode("utf-8", errors="replace"))
            if frame is not None:
                frames.append(frame)
        return frames

    def _line(self, line: str) -> Frame | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            self.comments.append(value)
        elif name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = self.last_event_id = value
        elif name == "retry" and re.fullmatch("[0-9]+", value):
            self._frame_retry = self.retry = int(value)
        return None

    def _dispatch(self) -> Frame | None:
        raw, self._block = self._block, b""
        frame = None
        if self._data:
            event = self._event or "message"
            frame = Frame(self._id, event, "\n".join(self._data), self._frame_retry, raw)
        self._clear()
        return frame


class EventStream:
    """An open stream. Iterate over it, or `take` and `rest`; leaving the `async with` block cuts it."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self.body = b""
        self.ended = status == 204
        self._parser = FrameParser()
        self._reader = reader
        self._ready: list[Frame] = []

    @property
    def last_event_id(self) -> str:
        """The cursor for a reconnect, as a browser keeps it."""
        return self._parser.last_event_id

    @property
    def retry(self) -> int | None:
        return self._parser.retry

    @property
    def comments(self) -> list[str]:
        """Heartbeats and other comments so far."""
        return self._parser.comments

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> Frame:
        while not self._ready:
            if self.ended:
                raise StopAsyncIteration
            data = await self._read()
            self.body += data
            self._ready = self._parser.feed(data)
        return self._ready.pop(0)

    async def take(self, count: int, *, within: float = 10.0) -> list[Frame]:
        """Exactly so many frames; fails if they do not come in time or the stream ends first."""
        frames: list[Frame] = []
        try:
            async with asyncio.timeout(within):
                while len(frames) < count:
                    frames.append(await anext(self))
        except (TimeoutError, StopAsyncIteration) as error:
            why = "the stream ended" if isinstance(error, StopAsyncIteration) else f"{within:g} s went by"
            raise AssertionError(f"{why} after {len(frames)} of {count} frames: {_shown(frames)}") from None
        return frames

    async def rest(self, *, within: float = 10.0) -> list[Frame]:
        """All frames until the clean end. Raises StreamCutError if the body is cut."""
        frames: list[Frame] = []
        try:
            async with asyncio.timeout(within):
                async for frame in self:
                    frames.append(frame)
        except TimeoutError:
            raise AssertionError(f"no end within {within:g} s; {len(frames)} frames: {_shown(frames)}") from None
        return frames

    async def until_comment(self, *, within: float = 30.0) -> None:
        """Waits for the next comment (a heartbeat); frames that come before it stay to be read."""
        before = len(self.comments)
        async with asyncio.timeout(within):
            while len(self.comments) == before:
                assert not self.ended, "the stream ended before a comment came"
                data = await self._read()
                self.body += data
                self._ready += self._parser.feed(data)

    async def _read(self) -> bytes:
        """The next piece of the body; b"" and `ended` at its clean end."""
        try:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                data = await self._reader.read(65536)
                self.ended = not data
                return data
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.ended = True
            raise StreamCutError(f"cut after {len(self.body)} bytes, last id {self.last_event_id!r}") from error
        self.ended = size == 0
        return data


def _shown(frames: list[Frame]) -> str:
    return ", ".join(f"{frame.id}:{frame.data[:60]}" for frame in frames[-5:])


@contextlib.asynccontextmanager
async def open_stream(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    json_body: Any = None,
    last_event_id: str | None = None,
    within: float = 10.0,
) -> AsyncIterator[EventStream]:
    """Opens a stream (http only); `within` is for the headers. A 204 is an ended stream. Raises StreamRefusedError."""
    parts = urlsplit(url)
    payload = b"" if json_body is None else json.dumps(json_body).encode()
    sent = {"Host": parts.netloc, "Accept": "text/event-stream", "Cache-Control": "no-store", **(headers or {})}
    if json_body is not None:
        sent = {"Content-Type": "application/json", **sent}
    if payload or method != "GET":
        sent["Content-Length"] = str(len(payload))
    if last_event_id is not None:
        sent["Last-Event-ID"] = last_event_id
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**24)
    try:
        async with asyncio.timeout(within):
            writer.write(head.encode() + b"\r\n" + payload)
            status, answer = await _head(reader)
            kind = answer.get("content-type", "").split(";")[0].strip().lower()
            if status not in (200, 204) or (status == 200 and kind != "text/event-stream"):
                raise StreamRefusedError(status, answer, await _whole_body(reader, answer))
        yield EventStream(status, answer, reader)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise StreamCutError("cut before the headers") from error
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _whole_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    stream = EventStream(200, headers, reader)
    body = b""
    while not stream.ended:
        body += await stream._read()
    return body
