"""GET /v1/runs, GET /v1/runs/{run_id}, POST /v1/runs/{run_id}/cancel."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field

from agentrun import telemetry
from agentrun.costs.amounts import usd
from agentrun.domain.states import FINAL, Outcome, RunStatus
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.context import Gateway, events_url, page_position, session_name
from agentrun.gateway.problems import ALREADY_FINISHED, Problem, not_found
from agentrun.gateway.routes.effects import Effect, effect_of
from agentrun.gateway.routes.parameters import After, Limit, User, Who
from agentrun.store import attempts, effects, ledger, runs, transitions
from agentrun.store.runs import HeldInput, RunRow
from agentrun.store.transitions import Reason, TakenOver, TakeOver


class Waiting(BaseModel):
    """Why an unfinished run does not move."""

    reason: str = Field(description="behind_earlier_run, retry_later, no_worker_yet or worker_lost")
    detail: str


class Attempt(BaseModel):
    """One try at the run."""

    attempt: int
    outcome: Outcome
    started_at: datetime
    ended_at: datetime | None


class Usage(BaseModel):
    """What all attempts used; `cost_usd` is null while no call had a known price."""

    calls: int
    input_tokens: int
    output_tokens: int
    cost_usd: str | None
    unpriced_calls: int
    unmeasured_calls: int
    price_ids: list[str]
    lost_calls: int = Field(
        description="Of these calls, those of attempts whose worker was lost: the next attempt made them again."
    )
    lost_usd: str = Field(description="What they cost.")


class Input(BaseModel):
    """A user message, and what became of it."""

    input_id: UUID
    content: Any
    sent_with: UUID = Field(description="The run that the message was answered 202 with.")
    held_by: UUID = Field(description="The run that answers it: another one once its own was superseded.")
    fate: Literal["answered_in", "failed_in", "cancelled_in"] | None = Field(
        description="Null until the run that holds it has ended."
    )
    created_at: datetime


class RunSummary(BaseModel):
    """A run in a list."""

    run_id: UUID
    session_id: UUID
    session: str = Field(description="The session's name, as in /v1/sessions/{session}/messages.")
    user: str
    status: RunStatus
    waiting: Waiting | None
    superseded_by: UUID | None = Field(description="The run that answers this one's messages: follow it instead.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    events_url: str


class RunDetail(RunSummary):
    """A run with what came out of it."""

    input: Any = Field(description="The body of the submission.")
    output: Any = Field(description="What the agent answered; null unless the run succeeded.")
    error: Any = Field(description="Why it failed: {type, message}; the last error while it is retried.")
    inputs: list[Input] = Field(description="Every message that the run holds or was made for, in order.")
    effects: list[Effect]
    attempts: list[Attempt]
    usage: Usage


class RunPage(BaseModel):
    """Runs, newest first."""

    runs: list[RunSummary]
    next: UUID | None = Field(description="Send it as `after` for the next page; null at the end.")


class Cancelled(BaseModel):
    """The answer to a cancellation."""

    run_id: UUID
    session_id: UUID
    session: str
    status: RunStatus
    events_url: str


def waiting(run: RunRow) -> Waiting | None:
    """Why the run waits; None if it is being worked on or has ended."""
    if run.status in FINAL:
        return None
    if run.status is RunStatus.RUNNING:
        if run.lease_alive:
            return None
        return Waiting(reason="worker_lost", detail="Its worker has not been heard of; another takes the run over soon.")
    if not run.head:
        return Waiting(reason="behind_earlier_run", detail="An earlier run of its session has not ended yet.")
    if not run.due:
        return Waiting(reason="retry_later", detail=f"It is tried again after {run.not_before}; `error` says what went wrong.")
    return Waiting(reason="no_worker_yet", detail="It is next in its session and waits for a free worker.")


def summary(run: RunRow) -> RunSummary:
    """The run as it stands in lists."""
    return RunSummary(
        run_id=run.id,
        session_id=run.session_id,
        session=run.external_id,
        user=run.user_id,
        status=run.status,
        waiting=waiting(run),
        superseded_by=run.superseded_by,
        created_at=run.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
        events_url=events_url(run.id),
    )


def _input(one: HeldInput) -> Input:
    return Input(
        input_id=one.id,
        content=msgspec.json.decode(one.content),
        sent_with=one.sent_with,
        held_by=one.run_id,
        fate=one.fate,  # type: ignore[arg-type]  # the table's constraint has the same values
        created_at=one.created_at,
    )


def router(gateway: Gateway) -> APIRouter:
    """The addresses."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"])

    @routes.get("", summary="Runs, newest first")
    async def list_runs(
        caller: Who,
        status: RunStatus | None = None,
        session: str | None = None,
        user: User = None,
        after: After = None,
        limit: Limit = 50,
    ) -> RunPage:
        async with answering():
            found = await runs.list_runs(
                gateway.pool,
                agent=gateway.agent,
                user_id=caller.asking_for(user),
                status=status,
                session=session_name(session) if session is not None else None,
                before=page_position(after),
                limit=limit + 1,
            )
        page = found[:limit]
        return RunPage(runs=[summary(run) for run in page], next=page[-1].id if len(found) > limit else None)

    @routes.get("/{run_id}", summary="A run: its state, why it waits, what came out of it")
    async def get_run(caller: Who, run_id: str) -> RunDetail:
        async with answering():
            run = await gateway.run_of(caller, run_id)
            tries = await attempts.of_run(gateway.pool, run.id)
            cost = await ledger.of_run(gateway.pool, run.id)
            said = await runs.inputs_of(gateway.pool, run.id)
            acts = await effects.of_run(gateway.pool, run.id)
        result = msgspec.json.decode(run.result) if run.result else None
        return RunDetail(
            **dict(summary(run)),
            input=msgspec.json.decode(run.input),
            output=result.get("output") if isinstance(result, dict) else result,
            error=msgspec.json.decode(run.error) if run.error else None,
            inputs=[_input(one) for one in said],
            effects=[effect_of(one) for one in acts],
            attempts=[
                Attempt(attempt=one.epoch, outcome=one.outcome, started_at=one.started_at, ended_at=one.ended_at) for one in tries
            ],
            usage=Usage(
                calls=cost.calls,
                input_tokens=cost.input_tokens,
                output_tokens=cost.output_tokens,
                cost_usd=None if cost.cost_usd is None else usd(cost.cost_usd),
                unpriced_calls=cost.unpriced,
                unmeasured_calls=cost.unmeasured,
                price_ids=list(cost.price_ids),
                lost_calls=cost.lost_calls,
                lost_usd=usd(cost.lost_usd),
            ),
        )

    @routes.post("/{run_id}/cancel", status_code=202, summary="Ends a run, whatever it is doing; may be repeated")
    async def cancel_run(caller: Who, run_id: str) -> Cancelled:
        async with answering():
            run = await gateway.run_of(caller, run_id)
            wish = [TakeOver(run.id, Reason.CANCELLED)]
            taken = (await read_back(lambda: transitions.take_over(gateway.pool, wish)))[0]
        if taken.status is None:
            raise not_found("run")
        if not taken.ok:
            raise Problem(
                ALREADY_FINISHED,
                f"The run is {taken.status.value} and stays so. There is nothing to cancel.",
                members={"run_id": str(run.id), "run_status": taken.status.value},
            )
        _tell(gateway, taken, news=run.status not in FINAL)
        return Cancelled(
            run_id=run.id,
            session_id=run.session_id,
            session=run.external_id,
            status=taken.status,
            events_url=events_url(run.id),
        )

    return routes


def _tell(gateway: Gateway, taken: TakenOver, *, news: bool) -> None:
    """Says it to the worker, to the run's readers and to whoever takes the session's next run. Saying it twice is harmless."""
    if taken.owner is not None:
        gateway.publisher.cancel(taken.owner.rpartition("/")[0], taken.run_id, taken.epoch)
    gateway.publisher.send_events([(taken.run_id, event) for event in taken.events])
    if taken.next_head is not None:
        gateway.publisher.publish([taken.next_head])
    if news:
        telemetry.TAKEOVERS.labels(Reason.CANCELLED.value).inc()
        telemetry.RUNS_FINISHED.labels(RunStatus.CANCELLED.value).inc()
