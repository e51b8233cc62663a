"""/v1/dead-letters: runs that were put aside, with what is known of them; a person redrives or discards each."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from agentrun import failpoints, telemetry
from agentrun.domain.ids import parse_id
from agentrun.domain.states import Outcome, RunStatus
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.auth import Caller
from agentrun.gateway.context import Gateway, events_url, page_position
from agentrun.gateway.problems import LETTER_CLOSED, Problem, not_found, suspended
from agentrun.gateway.routes.effects import Effect, effect_of
from agentrun.gateway.routes.parameters import After, Limit, User, Who
from agentrun.gateway.submissions import refusal
from agentrun.store import attempts, dead_letters, effects, runs
from agentrun.store.budgets import Refused
from agentrun.store.dead_letters import Letter, LetterState
from agentrun.store.ids import new_id

State = Literal["open", "redriven", "discarded", "all"]


class DeadLetter(BaseModel):
    """A run that was put aside. It stays failed; its session goes on."""

    run_id: UUID
    session_id: UUID
    session: str
    user: str
    state: LetterState = Field(description="open: a person has to decide.")
    reason: str = Field(description="lost_too_often: its workers died of it or with it. effect_unknown: see `effects`.")
    attempts: int
    created_at: datetime
    redriven_run_id: UUID | None = Field(description="The run that does it again.")
    redriven_at: datetime | None
    discarded_at: datetime | None


class DeadLetterPage(BaseModel):
    """Dead letters, those of the newest runs first."""

    dead_letters: list[DeadLetter]
    next: UUID | None = Field(description="Send it as `after` for the next page; null at the end.")


class Try(BaseModel):
    """One attempt, and who made it: the name of the worker's pod begins `owner`."""

    attempt: int
    outcome: Outcome
    owner: str
    started_at: datetime
    ended_at: datetime | None


class Evidence(DeadLetter):
    """A dead letter with everything that is known."""

    payload: Any = Field(description="The body of the submission.")
    inputs: list[Any] = Field(description="The messages that the run held, in order: what a redrive does again.")
    last_error: Any = Field(description="What its last attempt that could say so said: {type, message}.")
    tries: list[Try]
    effects: list[Effect]


class Redriven(BaseModel):
    """The run that does it again."""

    run_id: UUID
    session_id: UUID
    session: str
    status: RunStatus
    replayed: bool = Field(description="It was redriven before: this is that run.")
    events_url: str


def _members(letter: Letter) -> dict[str, Any]:
    return {
        "run_id": letter.run_id,
        "session_id": letter.session_id,
        "session": letter.external_id,
        "user": letter.user_id,
        "state": letter.state,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "created_at": letter.created_at,
        "redriven_run_id": letter.redriven_run_id,
        "redriven_at": letter.redriven_at,
        "discarded_at": letter.discarded_at,
    }


def router(gateway: Gateway) -> APIRouter:
    """The addresses."""
    routes = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])

    @routes.get("", summary="Runs that were put aside, newest first")
    async def list_dead_letters(
        caller: Who, state: State = "open", user: User = None, after: After = None, limit: Limit = 50
    ) -> DeadLetterPage:
        async with answering():
            found = await dead_letters.list_letters(
                gateway.pool,
                agent=gateway.agent,
                user_id=caller.asking_for(user),
                state=None if state == "all" else LetterState(state),
                before=page_position(after),
                limit=limit + 1,
            )
        page = [DeadLetter(**_members(letter)) for letter in found[:limit]]
        return DeadLetterPage(dead_letters=page, next=page[-1].run_id if len(found) > limit else None)

    @routes.get("/{run_id}", summary="A run that was put aside, with everything that is known of it")
    async def get_dead_letter(caller: Who, run_id: str) -> Evidence:
        async with answering():
            letter = await _letter(gateway, caller, run_id)
            held = await runs.held_inputs(gateway.pool, [letter.run_id])
            tries = await attempts.of_run(gateway.pool, letter.run_id)
            acts = await effects.of_run(gateway.pool, letter.run_id)
        return Evidence(
            **_members(letter),
            payload=msgspec.json.decode(letter.payload),
            inputs=[msgspec.json.decode(one.content) for one in held],
            last_error=msgspec.json.decode(letter.last_error) if letter.last_error else None,
            tries=[
                Try(attempt=one.epoch, outcome=one.outcome, owner=one.owner, started_at=one.started_at, ended_at=one.ended_at)
                for one in tries
            ],
            effects=[effect_of(one) for one in acts],
        )

    @routes.post(
        "/{run_id}/redrive", status_code=202, summary="Does it again in a new run; however often it is asked for, in one"
    )
    async def redrive(caller: Who, run_id: str, response: Response) -> Redriven:
        if gateway.suspended:
            raise suspended()
        async with answering():
            letter = await _letter(gateway, caller, run_id)
            held = await runs.held_inputs(gateway.pool, [letter.run_id])  # of a run that has ended: they stay as they are
            new, inputs = new_id(), [new_id() for _ in held]
            done = await read_back(
                lambda: dead_letters.redrive(gateway.pool, letter.run_id, run_id=new, inputs=inputs, budget=gateway.budget)
            )
        if done is None:
            raise not_found("dead letter")
        if isinstance(done, Refused):
            raise refusal(done)
        if done.discarded:
            raise _closed(letter, "It was discarded. Send its messages again if they are to be answered after all.")
        await failpoints.hit("gateway.redrive.committed")
        if done.is_head:
            gateway.publisher.publish([done.run_id])
        telemetry.RUNS_SUBMITTED.labels(str(done.replayed).lower()).inc()
        response.headers["Location"] = f"/v1/runs/{done.run_id}"
        if done.replayed:
            response.headers["Idempotency-Replayed"] = "true"
        return Redriven(
            run_id=done.run_id,
            session_id=done.session_id,
            session=done.external_id,
            status=done.status,
            replayed=done.replayed,
            events_url=events_url(done.run_id),
        )

    @routes.post("/{run_id}/discard", summary="Closes it: nothing more is done; what is known of it stays")
    async def discard(caller: Who, run_id: str) -> DeadLetter:
        async with answering():
            letter = await _letter(gateway, caller, run_id)
            closed = await read_back(lambda: dead_letters.discard(gateway.pool, letter.run_id))
            letter = await _letter(gateway, caller, run_id)
        if not closed:
            raise _closed(letter, "It was redriven. Cancel that run if it is not to be done.")
        return DeadLetter(**_members(letter))

    return routes


async def _letter(gateway: Gateway, caller: Caller, text: str) -> Letter:
    run_id = parse_id(text)
    letter = await dead_letters.get(gateway.pool, run_id, agent=gateway.agent) if run_id else None
    if letter is None or not caller.may_see(letter.user_id):
        raise not_found("dead letter")
    return letter


def _closed(letter: Letter, detail: str) -> Problem:
    redriven = str(letter.redriven_run_id) if letter.redriven_run_id else None
    return Problem(LETTER_CLOSED, detail, members={"run_id": str(letter.run_id), "redriven_run_id": redriven})
