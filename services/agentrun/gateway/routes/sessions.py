"""GET /v1/sessions, GET /v1/sessions/{session}/messages: conversations as their user sees them."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field

from agentrun.domain.states import RunStatus
from agentrun.gateway.answering import answering
from agentrun.gateway.context import Gateway, page_position, session_name
from agentrun.gateway.problems import INVALID_PARAMETER, Problem, not_found
from agentrun.gateway.routes.parameters import After, Limit, User, Who
from agentrun.store import runs, sessions
from agentrun.store.runs import HeldInput, RunRow


class Session(BaseModel):
    """A conversation."""

    session_id: UUID
    session: str = Field(description="Its name, as in /v1/sessions/{session}/messages.")
    user: str
    created_at: datetime


class SessionPage(BaseModel):
    """Conversations, newest first."""

    sessions: list[Session]
    next: UUID | None = Field(description="Send it as `after` for the next page; null at the end.")


class Item(BaseModel):
    """One whole message."""

    run_id: UUID = Field(description="The run that holds the message, or gave the answer.")
    sent_with: UUID | None = Field(description="Of a user's message: the run that it was answered 202 with.")
    fate: Literal["answered_in", "failed_in", "cancelled_in"] | None = Field(
        description="Of a user's message: what became of it in that run; null until the run has ended."
    )
    role: Literal["user", "agent"]
    content: Any
    status: RunStatus = Field(description="How the run stands that holds the message.")
    created_at: datetime


class ItemPage(BaseModel):
    """Messages, newest first: of each run its answer, then what the user said."""

    messages: list[Item]
    next: UUID | None = Field(description="Send it as `after` for the next page; null at the end.")


def items_of(run: RunRow, held: list[HeldInput]) -> list[Item]:
    """The messages of one run, newest first."""
    items = [
        Item(
            run_id=run.id,
            sent_with=one.sent_with,
            fate=one.fate,  # type: ignore[arg-type]  # the table's constraint has the same values
            role="user",
            content=msgspec.json.decode(one.content),
            status=run.status,
            created_at=one.created_at,
        )
        for one in held
    ]
    result = msgspec.json.decode(run.result) if run.status is RunStatus.SUCCEEDED and run.result else None
    if isinstance(result, dict) and result.get("output") is not None:
        items.append(
            Item(
                run_id=run.id,
                sent_with=None,
                fate=None,
                role="agent",
                content=result["output"],
                status=run.status,
                created_at=run.finished_at or run.created_at,
            )
        )
    return items[::-1]


def router(gateway: Gateway) -> APIRouter:
    """The addresses."""
    routes = APIRouter(prefix="/v1/sessions", tags=["sessions"])

    @routes.get("", summary="Sessions, newest first")
    async def list_sessions(caller: Who, user: User = None, after: After = None, limit: Limit = 50) -> SessionPage:
        async with answering():
            found = await sessions.list_sessions(
                gateway.pool, agent=gateway.agent, user_id=caller.asking_for(user), before=page_position(after), limit=limit + 1
            )
        page = found[:limit]
        return SessionPage(
            sessions=[
                Session(session_id=one.id, session=one.external_id, user=one.user_id, created_at=one.created_at) for one in page
            ],
            next=page[-1].id if len(found) > limit else None,
        )

    @routes.get("/{session}/messages", summary="The messages of a session, whole, newest first; pages are counted in runs")
    async def list_messages(caller: Who, session: str, user: User = None, after: After = None, limit: Limit = 50) -> ItemPage:
        name, before, whose = session_name(session), page_position(after), caller.asking_for(user)
        async with answering():
            known = await sessions.named(gateway.pool, agent=gateway.agent, user_id=whose, external_id=name)
            if not known:
                raise not_found("session")
            if len(known) > 1:
                raise Problem(INVALID_PARAMETER, "Several users have a session of this name. Say whose with `?user=`.")
            found = await runs.list_runs(
                gateway.pool, agent=gateway.agent, user_id=known[0].user_id, session=name, before=before, limit=limit + 1
            )
            page = found[:limit]
            inputs = await runs.held_inputs(gateway.pool, [run.id for run in page])
        return ItemPage(
            messages=[item for run in page for item in items_of(run, [one for one in inputs if one.run_id == run.id])],
            next=page[-1].id if len(found) > limit else None,
        )

    return routes
