"""/v1/cron-tasks: CronTasks, what became of their slots, and runs that somebody asks for. For keys with the scope admin."""

import re
import secrets
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Header, Query
from pydantic import AwareDatetime, BaseModel, Field

from agentrun import telemetry
from agentrun.domain.cron import CronError
from agentrun.domain.slots import SlotOutcome
from agentrun.domain.states import RunStatus
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.auth import Caller
from agentrun.gateway.context import Gateway, events_url
from agentrun.gateway.problems import INVALID_HEADER, INVALID_PARAMETER, Problem, not_found, suspended
from agentrun.gateway.routes.parameters import Limit, Who
from agentrun.gateway.submissions import refusal
from agentrun.schedules import manual, tasks
from agentrun.store import cron_tasks, slots
from agentrun.store.cron_tasks import Schedule, TaskState

NEXT_SHOWN = 3

_ID = re.compile(r"[A-Za-z0-9._:~-]{1,100}")
_FAILURES = (msgspec.ValidationError, msgspec.DecodeError, CronError)

Name = Annotated[str | None, Query(description="The `next` of the page before: a name.", max_length=63)]
Before = Annotated[AwareDatetime | None, Query(description="Only slots of before. The `next` of the page before.")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="The caller's id of this trigger, 1 to 100 letters, digits and ._:~- characters: sent again, it finds the same run.",
    ),
]


class CronTask(BaseModel):
    """A schedule as it is followed."""

    name: str
    namespace: str
    uid: UUID
    schedule: str
    time_zone: str
    suspended: bool
    concurrency_policy: str
    problem: str | None = Field(description="Why it cannot be followed; null if it can.")
    next: list[datetime] = Field(description="The next slots, at most three; none while it is suspended.")
    last_slot: datetime | None
    last_outcome: SlotOutcome | None
    last_success: datetime | None = Field(description="When the newest run that succeeded ended.")
    active: list[UUID] = Field(description="Runs that have not ended, oldest first, at most 20.")


class CronTaskPage(BaseModel):
    """CronTasks by their names."""

    cron_tasks: list[CronTask]
    next: str | None = Field(description="Send it as `after` for the next page; null at the end.")


class Slot(BaseModel):
    """What became of a slot."""

    slot: datetime
    outcome: SlotOutcome
    detail: str | None = Field(description="Why it was skipped, or what failed.")
    run_id: UUID | None
    run_status: RunStatus | None = Field(description="Where its run stands; null if it has none.")


class SlotPage(BaseModel):
    """Slots, newest first."""

    slots: list[Slot]
    next: datetime | None = Field(description="Send it as `before` for the next page; null at the end.")


class Triggered(BaseModel):
    """The run that was asked for."""

    run_id: UUID
    session: str
    replayed: bool = Field(description="It was asked for before under the same Idempotency-Key.")
    events_url: str


class FilledSlot(BaseModel):
    """A slot that should have a run."""

    slot: datetime
    run_id: UUID | None = Field(description="Its run; null if `dry_run` and it has none.")
    started: bool = Field(description="The run is new, or with `dry_run` would be.")


class Backfilled(BaseModel):
    """What became of slots, oldest first."""

    slots: list[FilledSlot]
    next: datetime | None = Field(description="Send it as `from` to go on; null if all were looked at.")


def router(gateway: Gateway) -> APIRouter:
    """The addresses."""
    routes = APIRouter(prefix="/v1/cron-tasks", tags=["cron tasks"])

    @routes.get("", summary="CronTasks by their names")
    async def list_cron_tasks(caller: Who, after: Name = None, limit: Limit = 50) -> CronTaskPage:
        _admin(caller)
        async with answering():
            found = await cron_tasks.named(gateway.pool, after=after, limit=limit + 1)
            page = found[:limit]
            known = await _shown(gateway, page)
        return CronTaskPage(cron_tasks=known, next=known[-1].name if len(found) > limit else None)

    @routes.get("/{name}", summary="A CronTask")
    async def get_cron_task(caller: Who, name: str) -> CronTask:
        _admin(caller)
        async with answering():
            return (await _shown(gateway, [await _named(gateway, name)]))[0]

    @routes.get("/{name}/slots", summary="What became of a CronTask's slots, newest first")
    async def list_slots(caller: Who, name: str, before: Before = None, limit: Limit = 50) -> SlotPage:
        _admin(caller)
        async with answering():
            task = await _named(gateway, name)
            found = await slots.history(gateway.pool, task.uid, limit=limit + 1, before=before)
        page = [
            Slot(slot=one.slot, outcome=one.outcome, detail=one.detail, run_id=one.run_id, run_status=one.run_status)
            for one in found[:limit]
        ]
        return SlotPage(slots=page, next=page[-1].slot if len(found) > limit else None)

    @routes.post("/{name}/trigger", status_code=202, summary="Start a run of a CronTask now, whatever its schedule says")
    async def trigger(caller: Who, name: str, key: Key = None) -> Triggered:
        _admin(caller)
        if key is not None and not _ID.fullmatch(key):
            raise Problem(INVALID_HEADER, "Idempotency-Key has 1 to 100 letters, digits and characters of ._:~- here.")
        _not_suspended(gateway)
        client_id = key or secrets.token_hex(16)
        try:
            async with answering():
                done = await read_back(
                    lambda: manual.trigger(
                        gateway.pool, agent=gateway.agent, name=name, client_id=client_id, budget=gateway.budget
                    )
                )
        except manual.OverBudget as over:
            raise refusal(over.refused) from None
        if done is None:
            raise not_found("CronTask")
        if done.run.is_head:
            gateway.publisher.publish([done.run.run_id])
        telemetry.RUNS_SUBMITTED.labels(str(done.run.replayed).lower()).inc()
        run_id = done.run.run_id
        return Triggered(run_id=run_id, session=done.session, replayed=done.run.replayed, events_url=events_url(run_id))

    @routes.post("/{name}/backfill", status_code=202, summary="Start a run for each past slot that has none")
    async def backfill(
        caller: Who,
        name: str,
        since: Annotated[AwareDatetime, Query(alias="from", description="The first moment; not before the year 2000.")],
        until: Annotated[
            AwareDatetime | None, Query(alias="to", description="The last moment, not later than now; now if left out.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=manual.MOST, description="How many slots at most.")] = manual.MOST,
        dry_run: Annotated[bool, Query(description="Change nothing, only say what would be done.")] = False,
    ) -> Backfilled:
        _admin(caller)
        if since < manual.EARLIEST or (until is not None and until < since):
            raise Problem(INVALID_PARAMETER, "`from` is a moment from the year 2000 on and not later than `to`.")
        _not_suspended(gateway)
        try:
            async with answering():
                done = await read_back(
                    lambda: manual.backfill(
                        gateway.pool,
                        agent=gateway.agent,
                        name=name,
                        since=since.astimezone(UTC),
                        until=until.astimezone(UTC) if until is not None else None,
                        limit=limit,
                        dry_run=dry_run,
                        budget=gateway.budget,
                    )
                )
        except manual.OverBudget as over:
            raise refusal(over.refused) from None
        except manual.NotYet:
            raise Problem(INVALID_PARAMETER, "`to` has not come yet. Slots are not run ahead of their time.") from None
        if done is None:
            raise not_found("CronTask")
        gateway.publisher.publish(done.heads)
        filled = [FilledSlot(slot=one.slot, run_id=one.run_id, started=one.started) for one in done.filled]
        return Backfilled(slots=filled, next=done.following)

    return routes


async def _named(gateway: Gateway, name: str) -> Schedule:
    found = await cron_tasks.named(gateway.pool, name=name)
    if not found:
        raise not_found("CronTask")
    return found[0]


async def _shown(gateway: Gateway, found: list[Schedule]) -> list[CronTask]:
    states = {state.uid: state for state in await cron_tasks.states(gateway.pool, [one.uid for one in found])}
    return [_show(gateway.agent.partition("/")[0], one, states[one.uid]) for one in found if one.uid in states]


def _show(namespace: str, row: Schedule, state: TaskState) -> CronTask:
    spec = msgspec.json.decode(row.spec)
    following, problem = _following(namespace, row)
    return CronTask(
        name=spec["name"],
        namespace=namespace,
        uid=row.uid,
        schedule=spec["schedule"],
        time_zone=spec.get("timeZone", "Etc/UTC"),
        suspended=spec.get("suspend", False),
        concurrency_policy=spec.get("concurrencyPolicy", "Allow"),
        problem=problem,
        next=following,
        last_slot=state.last_slot,
        last_outcome=state.last_outcome,
        last_success=state.last_success,
        active=list(state.active),
    )


def _following(namespace: str, row: Schedule) -> tuple[list[datetime], str | None]:
    """The next slots, and what is wrong with a row that cannot be followed, as one of a newer version may be."""
    try:
        task = tasks.read(row.spec)
        schedule = task.when(namespace=namespace)
    except _FAILURES as error:
        return [], str(error)
    return [] if task.suspend else list(islice(schedule.after(datetime.now(UTC)), NEXT_SHOWN)), None


def _admin(caller: Caller) -> None:
    caller.must_be_admin("CronTasks are")


def _not_suspended(gateway: Gateway) -> None:
    if gateway.suspended:
        raise suspended()
