"""What every request passes first: whether the gateway may work at all, and the clock."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrun import telemetry
from agentrun.gateway.headers import accepts_events
from agentrun.gateway.problems import NOT_READY, Problem
from agentrun.gateway.streams import busy


class Entrance:
    """A plain ASGI middleware: it touches no message, so streams pass as they are.

    `ready` says what stands against working, None if nothing does. An outage of a store does not: that is answered per request.
    """

    def __init__(self, app: ASGIApp, ready: Callable[[], str | None]) -> None:
        self._app = app
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def metered(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's template, never the address: a client must not be able to make new labels.
                route = getattr(scope.get("route"), "path", "none")
                status = f"{message['status'] // 100}xx"
                telemetry.REQUEST_SECONDS.labels(route, status).observe(time.perf_counter() - began)
            await send(message)

        wrong = self._ready() if scope["path"].startswith("/v1/") else None
        if wrong is None:
            await self._app(scope, receive, metered)
        elif scope["method"] == "GET" and accepts_events(scope["headers"]):
            await busy(scope, receive, metered)
        else:
            await Problem(NOT_READY, f"This gateway cannot work yet: {wrong}.")(scope, receive, metered)
