"""One request to the API server: connections, credentials, JSON. No other module makes one."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

from agentrun.domain.errors import ConfigurationError
from agentrun_operator.kube_config import Access
from agentrun_operator.kube_errors import Unavailable

Body = dict[str, Any]

JSON = "application/json"
NETWORK_ERRORS = (OSError, TimeoutError, aiohttp.ClientError)
"""No answer, or half of one."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: Sequence[tuple[str, str]] = ()
    body: Body | None = None
    content_type: str = JSON
    accept: str = JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def repeatable(self) -> bool:
        """Whether doing it twice is the same as once: not so for POST."""
        return self.method != "POST"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Body
    retry_after: float | None
    """Seconds."""


class Http:
    """Connections to the API server, kept open. One event loop uses it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, request: Request) -> Answer:
        """The whole answer, whatever its status. Takes any time; raises NETWORK_ERRORS and Unavailable."""
        return await _read(await self._send(request, aiohttp.ClientTimeout(total=None)))

    async def stream(self, request: Request, *, connect_seconds: float, silence: float) -> AsyncGenerator[Answer | bytes, None]:
        """The lines of an endless answer, or one Answer if it is an error. Ends with the stream; raises NETWORK_ERRORS, also after
        `silence` seconds without a byte, and Unavailable."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=silence)
        response = await self._send(request, limits)
        try:
            if response.status >= 400:
                yield await _read(response)
                return
            async for line in _lines(response.content):
                yield line
        finally:
            response.close()

    async def _send(self, request: Request, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        access = self._access
        if self._session is None:
            # trust_env reads .netrc at each request; the proxy is known already.
            connector = aiohttp.TCPConnector(limit=access.connections, ssl=access.tls())
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=2**21)
        headers = {"Accept": request.accept, "User-Agent": "agentrun-operator"}
        try:
            authorization = await access.authorization()
        except ConfigurationError as error:
            raise Unavailable(f"{request}: {error}") from None
        if authorization:
            headers["Authorization"] = authorization
        data = None
        if request.body is not None:
            headers["Content-Type"] = request.content_type
            data = msgspec.json.encode(request.body)
        query = f"?{urlencode(request.query)}" if request.query else ""
        return await self._session.request(
            request.method,
            URL(f"{access.server}{request.path}{query}", encoded=True),
            data=data,
            headers=headers,
            timeout=limits,
            proxy=access.proxy,
            proxy_headers=access.proxy_headers,
            server_hostname=access.server_name,
        )


async def _read(response: aiohttp.ClientResponse) -> Answer:
    data = await response.read()
    try:
        body = msgspec.json.decode(data) if data else {}
    except msgspec.DecodeError:
        body = data.decode(errors="replace")
    if not isinstance(body, dict):
        body = {"message": str(body)[:500]}
    return Answer(response.status, body, _seconds(response.headers.get("Retry-After")))


def _seconds(header: str | None) -> float | None:
    """Retry-After as the API server writes it: whole seconds. A date, which it never sends, counts as unsaid."""
    try:
        return max(float(header), 0.0) if header else None
    except ValueError:
        return None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        *whole, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in whole:
            if line:
                yield bytes(line)
