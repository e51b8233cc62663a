"""A small HTTP server for processes that have none: /healthz, /readyz and /metrics.

Own code instead of a web framework because it must answer without one, never take over signals, and read nothing but a request line.
Readiness does not depend on load or on a short outage of a store: a pod that is not ready is stopped first, whatever it is doing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from agentrun.domain.errors import ConfigurationError
from agentrun.telemetry import exposition

Probe = Callable[[], str | None]
"""Returns None if all is well, else what is wrong."""

_PLAIN = "text/plain; charset=utf-8"
_MOST_HEADERS = 100


@contextlib.asynccontextmanager
async def serve(*, host: str, port: int | None, alive: Probe, ready: Probe) -> AsyncIterator[int | None]:
    """Serves while the block runs and yields the port; a `port` of 0 takes a free one, None serves nothing and yields None.

    Raises ConfigurationError if the port cannot be had.
    """
    if port is None:
        yield None
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                method, path = await _request(reader)
                answered = _respond(path, alive, ready)
                writer.write(answered if method == "GET" else answered[: answered.index(b"\r\n\r\n") + 4])
                await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            pass  # a client that says nothing, too much, or nonsense: nobody to answer to
        except asyncio.CancelledError:
            pass  # the process ends; before 3.12 asyncio complains of a handler that lets its cancellation through
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=8192)
    except OSError as error:
        raise ConfigurationError(
            f"AGENTRUN_HEALTH_PORT: cannot listen on {host}:{port} ({error.strerror}); choose a free port, or leave it empty"
        ) from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Method and path of a GET or HEAD request; raises ValueError for anything else."""
    method, target, _ = (await reader.readline()).decode("latin-1").split(" ", 2)
    for _ in range(_MOST_HEADERS):
        if (await reader.readline()).strip() == b"":
            break
    if method not in ("GET", "HEAD"):
        raise ValueError(method)
    return method, target.partition("?")[0]


def _respond(path: str, alive: Probe, ready: Probe) -> bytes:
    if path == "/metrics":
        body, content_type = exposition()
        return _response("200 OK", content_type, body)
    if path not in ("/healthz", "/readyz"):
        return _response("404 Not Found", _PLAIN, b"not found\n")
    wrong = (alive if path == "/healthz" else ready)()
    if wrong is None:
        return _response("200 OK", _PLAIN, b"ok\n")
    return _response("503 Service Unavailable", _PLAIN, wrong.encode() + b"\n")


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
