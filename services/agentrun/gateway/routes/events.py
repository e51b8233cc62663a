"""GET /v1/runs/{run_id}/events: a run's events as a stream, resumable. Plain ASGI inside the FastAPI app."""

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from agentrun.gateway import streams
from agentrun.gateway.answering import answering
from agentrun.gateway.context import Gateway
from agentrun.gateway.headers import accepts_events
from agentrun.gateway.problems import OVERLOADED, STORE_UNAVAILABLE, Problem


class Events:
    """The address itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            caller = gateway.authenticator.caller(scope)
            cursor = streams.cursor_of(scope, _after(Request(scope)))
            async with answering():
                run = await gateway.run_of(caller, scope["path_params"]["run_id"])
                start = await streams.start_at(gateway.pool, run.id, cursor)
            if gateway.feeds.full and not start.at_end:
                raise Problem(OVERLOADED, "Too many clients follow runs. Send the same request again.")
        except Problem as problem:
            if problem.kind in (STORE_UNAVAILABLE, OVERLOADED) and accepts_events(scope["headers"]):
                retry = streams.FULL_MILLISECONDS if problem.kind is OVERLOADED else streams.BUSY_MILLISECONDS
                await streams.busy(scope, receive, send, retry=retry)
            else:
                await problem(scope, receive, send)
            return
        if start.at_end:
            await streams.no_content(send)
            return
        await streams.RunStream(gateway.feeds, run.id, start)(scope, receive, send)


def _after(request: Request) -> str | None:
    values = request.query_params.getlist("after")
    # Two positions are as good as none that can be believed: "" is refused as a position.
    return values[0] if len(values) == 1 else "" if values else None
