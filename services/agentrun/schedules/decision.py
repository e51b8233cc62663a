"""What becomes of the slots of one CronTask that are due. Pure: time and facts are arguments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from agentrun.domain.cron import Schedule
from agentrun.domain.slots import STARTED, SlotOutcome
from agentrun.store.slots import Slot

ON_TIME = timedelta(minutes=1)
"""A slot that is younger than this is on time; an older one was missed, and `catchUp` says what becomes of it."""

MOST_FORGOTTEN = 10_000


class CatchUp(StrEnum):
    """Which missed slots are made up for."""

    ALL = "All"
    LATEST = "Latest"
    NONE = "None"


class Concurrency(StrEnum):
    """What is done about a run of the CronTask that has not ended."""

    ALLOW = "Allow"
    FORBID = "Forbid"
    REPLACE = "Replace"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the CronTask says. `deadline` None: no limit. `limit` is the most missed slots that are made up for at once, `history`
    the most slots that are remembered.
    """

    concurrency: Concurrency
    deadline: timedelta | None
    catch_up: CatchUp
    limit: int
    history: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The times of a CronTask between two edits: slots later than `after` and not later than `until`."""

    schedule: Schedule
    after: datetime
    until: datetime
    suspended: bool


def decide(stretches: Sequence[Stretch], rules: Rules, *, now: datetime, suspended: bool, busy: bool) -> tuple[list[Slot], int]:
    """The slots that are not later than `now` with their outcomes, oldest first. Of `stretches` that overlap the newer holds.

    At most as many as are remembered, the newest ones; and how many older ones are forgotten, of which at most MOST_FORGOTTEN are counted:
    however long nobody looked, this takes no longer. `suspended`: now, so nothing starts. `busy`: a run of the task has not ended.
    """
    all_due = _due(stretches, now)
    remembered = list(islice(all_due, max(rules.history, rules.limit + 1)))
    skipped = [Slot(slot, SlotOutcome.SKIPPED_SUSPENDED) for slot, then in remembered if suspended or then]
    due = [slot for slot, then in remembered if not (suspended or then)]
    decided = _without_overlap(list(_by_age(due, rules, now))[::-1], rules.concurrency, busy=busy)
    return sorted((*skipped, *decided), key=lambda one: one.slot), sum(1 for _ in islice(all_due, MOST_FORGOTTEN))


def _due(stretches: Sequence[Stretch], now: datetime) -> Iterator[tuple[datetime, bool]]:
    """The slots that are not later than `now`, newest first, and whether the task was suspended then."""
    until = now
    for one in reversed(stretches):
        until = min(one.until, until)
        if one.after < until:
            yield from ((slot, one.suspended) for slot in one.schedule.before(until, since=one.after))
        until = min(one.after, until)


def _by_age(due: list[datetime], rules: Rules, now: datetime) -> Iterator[Slot]:
    """`due` and the answer are newest first."""
    made_up = 0
    for place, slot in enumerate(due):
        age = now - slot
        missed = age >= ON_TIME
        why = None
        if rules.deadline is not None and age > rules.deadline:
            why = "older than startingDeadlineSeconds"
        elif missed and rules.catch_up is CatchUp.NONE:
            why = "missed, and catchUp.mode is None"
        elif place and rules.catch_up is CatchUp.LATEST:
            why = "missed, and catchUp.mode is Latest"
        elif missed and made_up == rules.limit:
            why = "missed, and more than catchUp.limit"
        if why is not None:
            yield Slot(slot, SlotOutcome.SKIPPED_DEADLINE, why)
        else:
            made_up += missed
            yield Slot(slot, SlotOutcome.LATE if missed else SlotOutcome.RAN)


def _without_overlap(aged: list[Slot], concurrency: Concurrency, *, busy: bool) -> list[Slot]:
    """Oldest first. Of slots that are decided together, one starts a run and the others would overlap with it, unless that is allowed:
    the first one, or with Replace the last one, since it would replace the others in this moment.
    """
    if concurrency is Concurrency.ALLOW:
        return aged
    starting = [one for one in aged if one.outcome in STARTED]
    if concurrency is Concurrency.REPLACE:
        chosen, why = starting[-1:], "a later slot that was due with it started a run"
    elif busy:
        chosen, why = [], "an earlier run has not ended"
    else:
        chosen, why = starting[:1], "an earlier slot that was due with it started a run"
    return [Slot(one.slot, SlotOutcome.SKIPPED_OVERLAP, why) if one in starting and one not in chosen else one for one in aged]
