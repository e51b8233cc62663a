"""GET /v1/effects, POST /v1/runs/{run_id}/effects/settle: calls of which nobody knows what came, until a person says it."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from agentrun.gateway import bodies
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.context import Gateway, page_position
from agentrun.gateway.problems import EFFECT_SETTLED, INVALID_BODY, Problem, not_found
from agentrun.gateway.routes.parameters import After, Limit, User, Who
from agentrun.store import effects
from agentrun.store.effects import EffectRow, EffectState


class Effect(BaseModel):
    """A call that changes the world, which the run made or was about to make."""

    name: str
    key: str
    state: EffectState = Field(description="initiated: it may have gone out, and nobody has said what came of it.")
    attempt: int
    tries: int
    created_at: datetime
    settled_at: datetime | None


class UnsettledEffect(BaseModel):
    """A call of a run that has ended, of which nobody knows what came."""

    run_id: UUID
    user: str
    name: str
    key: str
    state: EffectState
    attempt: int
    tries: int
    request: Any
    created_at: datetime


class EffectPage(BaseModel):
    """Effects, those of the newest runs first; a page holds all of a run's or none."""

    effects: list[UnsettledEffect]
    next: UUID | None = Field(description="Send it as `after` for the next page; null at the end.")


class Settled(BaseModel):
    """What is on record now."""

    run_id: UUID
    name: str
    key: str
    state: EffectState


def effect_of(one: EffectRow) -> Effect:
    """The effect as it stands in answers."""
    return Effect(
        name=one.name,
        key=one.key,
        state=one.state,
        attempt=one.epoch,
        tries=one.tries,
        created_at=one.created_at,
        settled_at=one.settled_at,
    )


def router(gateway: Gateway) -> APIRouter:
    """The addresses."""
    routes = APIRouter(prefix="/v1", tags=["effects"])

    @routes.get("/effects", summary="Calls of ended runs of which nobody knows what came")
    async def list_effects(caller: Who, user: User = None, after: After = None, limit: Limit = 50) -> EffectPage:
        async with answering():
            found = await effects.unsettled(
                gateway.pool, agent=gateway.agent, user_id=caller.asking_for(user), before=page_position(after), limit=limit
            )
        page = [
            UnsettledEffect(
                run_id=one.run_id,
                user=one.user_id,
                name=one.name,
                key=one.key,
                state=one.state,
                attempt=one.epoch,
                tries=one.tries,
                request=msgspec.json.decode(one.request) if one.request else None,
                created_at=one.created_at,
            )
            for one in found
        ]
        return EffectPage(effects=page, next=page[-1].run_id if len(page) >= limit else None)

    @routes.post("/runs/{run_id}/effects/settle", summary="Says what came of a call; for keys with the scope admin")
    async def settle(caller: Who, run_id: str, request: Request) -> Settled:
        async with answering():
            run = await gateway.run_of(caller, run_id)
        caller.must_be_admin("Settling is for people who have looked at the other side, so it is")
        bodies.check_content_type(request.scope)
        try:
            body = bodies.parse_settlement(await bodies.read(request.scope, request.receive, limit=gateway.max_body_bytes))
        except bodies.ClientLeft:
            raise Problem(INVALID_BODY, "The request ended before its body did.") from None
        state = EffectState(body.state)
        response = None if body.response in (msgspec.UNSET, None) else msgspec.json.encode(body.response).decode()
        async with answering():
            ok, now = await read_back(
                lambda: effects.settle_by_hand(gateway.pool, run.id, name=body.name, key=body.key, state=state, response=response)
            )
        if now is None:
            raise not_found("effect")
        if not ok:
            detail = (
                "The run has not ended, so its own attempt says what comes of it. Wait for its end, or cancel it."
                if now in (EffectState.INITIATED, EffectState.UNKNOWN)
                else f"It is on record as {now.value}, and that stays."
            )
            raise Problem(EFFECT_SETTLED, detail, members={"run_id": str(run.id), "state": now.value})
        return Settled(run_id=run.id, name=body.name, key=body.key, state=now)

    return routes
