"""The HTTP connection under a request: the one thing that ASGI does not show and a cut stream needs.

An application can only end a chunked body properly, or raise, which is logged as a fault. So uvicorn's protocol hands the transport on.
"""

from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "agentrun.transport"


class Transport(Protocol):
    """The two ways of asyncio.Transport to end a connection."""

    def close(self) -> None:
        """Ends it when everything written has gone out."""

    def abort(self) -> None:
        """Ends it now."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 over httptools, with the transport in each request's scope."""

    def on_message_begin(self) -> None:
        """Called by the parser for each request."""
        super().on_message_begin()
        extensions: dict[str, Any] = {_EXTENSION: self.transport}
        self.scope["extensions"] = extensions


def transport(scope: Scope) -> Transport | None:
    """The transport of a request's connection; None under another server."""
    found: Transport | None = scope.get("extensions", {}).get(_EXTENSION)
    return found
