"""The HTTP application: its routes, and how everything that goes wrong becomes a problem document."""

from collections.abc import Sequence

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from agentrun import __version__
from agentrun.domain.errors import StoreUnavailable
from agentrun.gateway import openapi
from agentrun.gateway.context import SESSION_RULE, Gateway
from agentrun.gateway.entrance import Entrance
from agentrun.gateway.problems import (
    INTERNAL,
    INVALID_PARAMETER,
    MEDIA_TYPE,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    Problem,
    store_unavailable,
)
from agentrun.gateway.routes import cron_tasks, dead_letters, effects, events, health, runs, sessions, submit, usage

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")

_log = structlog.get_logger(__name__)


def create_app(gateway: Gateway) -> FastAPI:
    """The application of one gateway."""
    app = FastAPI(
        title="agentrun",
        version=__version__,
        description=(
            "Durable runs of LLM agents. Errors are RFC 9457 problem documents. Whatever the address, a request that is not HTTP is "
            "answered with malformed_request, one that does not arrive in time with request_timeout, one with too many or too large "
            "headers with headers_too_large."
        ),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Entrance, ready=gateway.ready)
    submitting = submit.Submit(gateway)
    app.router.routes.extend(
        [
            PlainRoute("/v1/sessions/{session}/messages", submitting, methods=["POST"], include_in_schema=False),
            PlainRoute("/v1/runs", submitting, methods=["POST"], include_in_schema=False),
            PlainRoute("/v1/runs/{run_id}/events", events.Events(gateway), methods=["GET"], include_in_schema=False),
        ]
    )
    app.state.gateway = gateway
    for part in (runs, sessions, dead_letters, effects, cron_tasks, usage, health):
        app.include_router(part.router(gateway))
    _answer_problems(app)
    openapi.describe(app)
    return app


class PlainRoute(Route):
    """A route of the hot path, which FastAPI does not see. Like FastAPI's own it says in the scope which route was taken."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the request is meant for it, and what it adds to the scope."""
        match, found = super().matches(scope)
        return match, {**found, "route": self} if match is not Match.NONE else found


def _answer_problems(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def problem(_request: Request, error: Problem) -> Response:
        return _Answer(error)

    @app.exception_handler(StoreUnavailable)
    async def outage(_request: Request, _error: StoreUnavailable) -> Response:
        return _Answer(store_unavailable())

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(piece) for piece in first["loc"][1:])
        return _Answer(Problem(INVALID_PARAMETER, f"{place}: {first['msg']}."))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 404 and path.startswith("/v1/sessions/") and b"%2f" in request.scope["raw_path"].lower():
            return _Answer(Problem(INVALID_PARAMETER, f"An encoded `/` separates like any other. {SESSION_RULE}"))
        if error.status_code == 404:
            return _Answer(Problem(NOT_FOUND, f"There is no {path} here. The addresses are in /openapi.json."))
        if error.status_code == 405:
            detail = f"{path} does not take {request.method}. The addresses are in /openapi.json."
            return _Answer(Problem(METHOD_NOT_ALLOWED, detail, headers={"Allow": ", ".join(_taken(app.routes, request.scope))}))
        return _Answer(Problem(INVALID_PARAMETER, str(error.detail)))

    @app.exception_handler(Exception)
    async def fault(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server logs it with its trace.
        return _Answer(Problem(INTERNAL, "This is a fault of the gateway; its log says more."))


def _taken(routes: Sequence[BaseRoute], scope: Scope) -> list[str]:
    """The methods that an address takes, by all its routes."""
    return [method for method in METHODS if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)]


class _Answer(Response):
    """A problem as Starlette's response."""

    media_type = MEDIA_TYPE

    def __init__(self, problem: Problem) -> None:
        super().__init__(
            content=problem.body,
            status_code=problem.kind.status,
            headers={"cache-control": "no-store", **problem.headers},
        )
