"""What several routes take: who calls, for which user, which page."""

from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import Request

from agentrun.gateway.auth import Caller


async def _caller(request: Request) -> Caller:
    caller: Caller = request.app.state.gateway.authenticator.caller(request.scope)
    return caller


Who = Annotated[Caller, Depends(_caller)]
User = Annotated[str | None, Query(description="Only what belongs to this user; of other users for keys with the scope admin.")]
Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
After = Annotated[str | None, Query(description="The `next` of the page before.")]
