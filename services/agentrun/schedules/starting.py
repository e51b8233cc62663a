"""Stores the runs of a CronTask. The caller's transaction holds the CronTask's row."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec

from agentrun.domain import idempotency, slots
from agentrun.domain.follow_ups import Policy
from agentrun.schedules.tasks import Task
from agentrun.store import follow_ups, transitions
from agentrun.store import slots as table
from agentrun.store.budgets import Budget, Refused
from agentrun.store.ids import new_id
from agentrun.store.pool import Connection
from agentrun.store.slots import Started
from agentrun.store.transitions import Reason, Submission, Submitted, TakenOver, TakeOver


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose runs they are: the AgentRun (namespace/name), the CronTask with its uid, and the budget into which they must fit."""

    agent: str
    uid: UUID
    task: Task
    budget: Budget | None


async def start_slots(
    conn: Connection, owner: Owner, starting: Sequence[Started], *, replaced: Sequence[UUID] = ()
) -> tuple[list[Submitted | Refused], list[TakenOver]]:
    """Cancels the runs that are replaced, stores those of slots and binds them to their rows; what does not fit into the day's budget is
    not stored. Raises StoreUnavailable, and Postgres' errors about values.
    """
    group = [_of_slot(owner, one) for one in starting]
    cancelled: list[TakenOver] = []
    if replaced:
        await transitions.hold_sessions(conn, group, replaced)
        if owner.budget is not None:
            await transitions.hold_replaced(conn, replaced, slots.user(owner.task.name), owner.budget)
        taken = await transitions.take_over(conn, [TakeOver(run_id, Reason.CANCELLED) for run_id in replaced])
        cancelled = [one for one in taken if one.ok]
    found = await _submit(conn, owner, group)
    pairs = zip(starting, found, strict=True)
    bound = [Started(one.slot, run.run_id, one.not_before) for one, run in pairs if isinstance(run, Submitted)]
    if bound:
        await table.link(conn, owner.uid, bound)
    return found, cancelled


async def _submit(conn: Connection, owner: Owner, group: Sequence[Submission]) -> list[Submitted | Refused]:
    return [one for one in await follow_ups.submit(conn, group, Policy.ENQUEUE, owner.budget) if one is not None]


async def start_manual(conn: Connection, owner: Owner, client_id: str, now: datetime) -> Submitted | Refused:
    """Stores the run that somebody asks for under an id of theirs, or finds the one that they were given before.

    It is of no slot. Raises as `start_slots`.
    """
    task = owner.task
    # The body depends on the time, what was asked does not: the second request may come in another minute.
    asked = idempotency.canonical({"trigger": client_id})
    submission = _submission(
        owner,
        new_id(),
        session=task.fixed_session or slots.manual_session(task.name, client_id),
        key=slots.manual_key(owner.uid, client_id),
        text=slots.fill(task.input, task=task.name, slot=now),
        asked=asked,
    )
    (found,) = await _submit(conn, owner, [submission])
    if isinstance(found, Submitted):
        await table.adopt(conn, owner.uid, [found.run_id])
    return found


def _of_slot(owner: Owner, one: Started) -> Submission:
    task = owner.task
    return _submission(
        owner,
        one.run_id,
        session=task.fixed_session or slots.slot_session(task.name, one.slot),
        key=slots.run_key(owner.uid, one.slot),
        text=slots.fill(task.input, task=task.name, slot=one.slot),
    )


def _submission(owner: Owner, run_id: UUID, *, session: str, key: str, text: str, asked: bytes | None = None) -> Submission:
    body = idempotency.canonical({"input": text})
    return Submission(
        run_id=run_id,
        session_id=new_id(),
        input_id=new_id(),
        agent=owner.agent,
        user_id=slots.user(owner.task.name),
        external_id=session,
        session_given=session,
        idempotency_key=key,
        client_key=None,
        body_hash=idempotency.body_hash(body if asked is None else asked),
        body=body.decode(),
        content=msgspec.json.encode(text).decode(),
    )
