"""Slots: the scheduled minutes of a CronTask, what becomes of each, and the names of the runs that they start."""

import hashlib
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from uuid import UUID


class SlotOutcome(StrEnum):
    """What became of a slot. Each slot gets one, in the transaction that decides it."""

    RAN = "ran"
    """A run was started within a minute."""
    LATE = "late"
    """A run was started later: nobody was there at its time."""
    SKIPPED_OVERLAP = "skipped_overlap"
    """concurrencyPolicy: an earlier run was unfinished, or a later slot that was due too took its place."""
    SKIPPED_DEADLINE = "skipped_deadline"
    """It was too old to be made up for, by startingDeadlineSeconds or catchUp."""
    SKIPPED_SUSPENDED = "skipped_suspended"
    """The CronTask or its AgentRun was suspended."""
    SKIPPED_BUDGET = "skipped_budget"
    """The day's budget was spent, or set aside for runs that had not ended."""
    FAILED = "failed"
    """The run could not be stored, or ended as failed."""


STARTED = frozenset({SlotOutcome.RAN, SlotOutcome.LATE})


def minute(slot: datetime) -> str:
    """A slot as names have it: 2026-11-29T10:06Z."""
    return slot.astimezone(UTC).strftime("%Y-%m-%dT%H:%MZ")


def run_key(uid: UUID, slot: datetime) -> str:
    """The idempotency key of a slot's run: from the scheduled minute, never from the time at which somebody looks."""
    return f"cron:{uid}:{minute(slot)}"


def manual_key(uid: UUID, client_id: str) -> str:
    """The idempotency key of a run that somebody asked for under an id of theirs."""
    return f"cron:{uid}:manual:{client_id}"


def user(task: str) -> str:
    """To whom the runs of a CronTask belong, by its name."""
    return f"cron:{task}"


def slot_session(task: str, slot: datetime) -> str:
    """The session of one slot, where each has its own."""
    return f"cron:{task}:{minute(slot)}"


def manual_session(task: str, client_id: str) -> str:
    """The session of a run that somebody asked for, where each has its own."""
    return f"cron:{task}:manual:{client_id}"


def jitter(uid: UUID, slot: datetime, *, most: int) -> timedelta:
    """How long a slot's run waits: 0 to `most` seconds, the same whoever asks."""
    if most <= 0:
        return timedelta()
    digest = hashlib.sha256(run_key(uid, slot).encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8], "big") % (most + 1))


def fill(text: str, *, task: str, slot: datetime) -> str:
    """A CronTask's input for one slot: {{slot}} is its minute in UTC, {{task}} the CronTask's name."""
    return text.replace("{{slot}}", minute(slot)).replace("{{task}}", task)
