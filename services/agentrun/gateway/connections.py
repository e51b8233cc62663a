"""The HTTP connection under the requests: what one may cost, and the one thing that ASGI does not show and a cut stream needs.

Uvicorn's protocol bounds neither the head of a request (address and headers) nor the time that one may take, and refuses what is no HTTP
with plain text. An application can only end a chunked body properly, or raise, which is logged as a fault, so the transport is handed on.
"""

import asyncio
import resource
from typing import Any, Protocol

import httptools
import structlog
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agentrun.gateway.problems import HEADERS_TOO_LARGE, MALFORMED_REQUEST, Problem, request_timeout

MOST_HEADERS = 100
MOST_HEAD_BYTES = 65_536
HEAD_SECONDS = 10.0
"""From the opening of a connection, or the first byte of a later request, to the end of the request's headers."""
BODY_SECONDS = 35.0
"""For a body that nobody reads; longer than the patience of bodies.read, which has an answer."""
LINGER_SECONDS = 1.0
MOST_CONNECTIONS = 20_000
SPARE_FILES = 100

_PIECE = 16_384
_EXTENSION = "agentrun.transport"
_CLOSE = {"Connection": "close"}
_log = structlog.get_logger(__name__)


class Transport(Protocol):
    """The two ways of asyncio.Transport to end a connection."""

    def close(self) -> None:
        """Ends it when everything written has gone out."""

    def abort(self) -> None:
        """Ends it now."""


def most_connections() -> int:
    """How many clients may be connected: what the process may have open, less what it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, max(soft - SPARE_FILES, 1))


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 over httptools: bounded heads, deadlines, refusals as problems, and the transport in each request's scope."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        """The next byte belongs to a request's head."""
        self._head_bytes = 0
        self._begun = False
        """A request has begun and is not all there."""
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        """Nothing more is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called once. A connection too many is dropped unheard: a status of 503 would stop an EventSource for good."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            _log.debug("too many connections; one is dropped", connections=len(self.connections))
            self._refused = True
            transport.abort()
            return
        self._arm(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes bytes, in small pieces: the parser keeps the beginning of a header until it has seen its end."""
        self._unset_keepalive_if_required()
        if self._in_head and self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._arm(HEAD_SECONDS)
        for start in range(0, len(data), _PIECE):
            if self._refused:
                return
            piece = data[start : start + _PIECE]
            was_in_head = self._in_head
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                _log.debug("an upgrade was asked for that is not offered")
            except httptools.HttpParserError as error:
                if not self._refused:
                    self._refuse(_malformed(error))
            if not self._in_head or self._refused:
                continue
            self._head_bytes = self._head_bytes + len(piece) if was_in_head else len(piece)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        """Called by the parser for each request."""
        super().on_message_begin()
        extensions: dict[str, Any] = {_EXTENSION: self.transport}
        self.scope["extensions"] = extensions
        self._begun = True
        self._head_bytes = 0
        if self._deadline is None:
            self._arm(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header."""
        if len(self.headers) >= MOST_HEADERS:
            self._refuse(_too_large())
            raise ValueError("too many headers")  # stops the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser; starts the application."""
        super().on_headers_complete()
        self._in_head = False
        self._arm(BODY_SECONDS)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the body."""
        super().on_message_complete()
        self._in_head = True
        self._begun = False
        self._head_bytes = 0
        self._disarm()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        if not self._refused:
            self._deadline = self.loop.call_later(seconds, self._late, seconds)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self, seconds: float) -> None:
        self._deadline = None
        if self.flow.read_paused:  # the rest may be here: it is the gateway that does not read it
            self._arm(seconds)
        elif not self._in_head or not self._begun:
            self.transport.close()
        else:
            self._refuse(request_timeout(seconds))

    def _refuse(self, problem: Problem) -> None:
        """Answers what the parser cannot take, if it is that request's turn, and ends the connection."""
        self._refused = True
        self._disarm()
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if self.pipeline or (answering and cycle.response_started) or (cycle is not None and not answering and not self._in_head):
            self.transport.close()  # an answer here would be taken for that of another request
            return
        if answering and self._in_head:
            cycle.keep_alive = False  # the answer that is being made is the last
            return
        if answering:
            cycle.disconnected = True
            cycle.message_event.set()
        body = problem.body
        lines = b"".join(b"%b: %b\r\n" % field for field in problem.fields(body))
        self.transport.write(STATUS_LINE[problem.kind.status] + lines + b"\r\n" + body)
        # What is still coming is read and forgotten for a moment: closing at once would reset the connection before the answer is read.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def transport(scope: Scope) -> Transport | None:
    """The transport of a request's connection; None under another server."""
    found: Transport | None = scope.get("extensions", {}).get(_EXTENSION)
    return found


def _malformed(error: httptools.HttpParserError) -> Problem:
    said = "the address is not plain ASCII" if isinstance(error, httptools.HttpParserCallbackError) else str(error)
    _log.debug("a request is not HTTP", error=said)
    detail = f"The parser says: {said}. Percent-encode addresses, and send one well-formed request at a time."
    return Problem(MALFORMED_REQUEST, detail, headers=_CLOSE)


def _too_large() -> Problem:
    detail = f"A request may have {MOST_HEADERS} headers, and {MOST_HEAD_BYTES} bytes of address and headers together."
    return Problem(HEADERS_TOO_LARGE, detail, headers=_CLOSE)
