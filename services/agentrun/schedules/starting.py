"""Stores the runs of a CronTask. The caller's transaction holds the CronTask's row."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec

from agentrun.domain import idempotency, slots
from agentrun.schedules.tasks import Task
from agentrun.store import slots as table
from agentrun.store import transitions
from agentrun.store.ids import new_id
from agentrun.store.pool import Connection
from agentrun.store.slots import Started
from agentrun.store.transitions import Submission, Submitted


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose runs they are: the AgentRun (namespace/name), and the CronTask with its uid."""

    agent: str
    uid: UUID
    task: Task


async def start_slots(conn: Connection, owner: Owner, starting: Sequence[Started]) -> list[Submitted]:
    """Stores the runs of slots and binds them to their rows. Raises StoreUnavailable, and Postgres' errors about values."""
    found = await transitions.submit(conn, [_of_slot(owner, one) for one in starting])
    bound = [Started(one.slot, run.run_id, one.not_before) for one, run in zip(starting, found, strict=True)]
    await table.link(conn, owner.uid, bound)
    return found


async def start_manual(conn: Connection, owner: Owner, client_id: str, now: datetime) -> Submitted:
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
    (found,) = await transitions.submit(conn, [submission])
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
