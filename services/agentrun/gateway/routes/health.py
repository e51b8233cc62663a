"""/healthz, /readyz, /metrics: open to everybody who can reach the port; they hold nothing of any user."""

from fastapi import APIRouter, Response

from agentrun import telemetry
from agentrun.gateway.context import Gateway


def router(gateway: Gateway) -> APIRouter:
    """The three addresses."""
    routes = APIRouter(tags=["health"])

    @routes.head("/healthz", include_in_schema=False)
    @routes.get("/healthz", summary="Whether the process lives")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/readyz", include_in_schema=False)
    @routes.get("/readyz", summary="Whether it may get traffic", responses={503: {"description": "Not now; says why."}})
    async def readyz(response: Response) -> dict[str, str]:
        wrong = gateway.ready()
        if wrong is not None:
            response.status_code = 503
            return {"status": "not ready", "detail": wrong}
        return {"status": "ready"}

    @routes.head("/metrics", include_in_schema=False)
    @routes.get("/metrics", summary="Metrics in the text format of Prometheus", response_class=Response)
    async def metrics() -> Response:
        text, media_type = telemetry.exposition()
        return Response(text, media_type=media_type)

    return routes
