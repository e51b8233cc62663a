"""The rules of follow-ups, written down once more without a database: what `follow_up` in store/submissions.sql is compared with."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from agentrun.domain.follow_ups import Policy


class Decision(StrEnum):
    """What becomes of the message: the session's only run, one run together with what the last one held, the next run, or nothing."""

    RUN = "run"
    MERGE = "merge"
    ENQUEUE = "enqueue"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class LastRun:
    """The session's unfinished run of highest position, waiting or running. `first_input_at` is when the first input that it holds came."""

    first_input_at: datetime
    has_effects: bool = False
    of_cron_task: bool = False


def decide(policy: Policy, last: LastRun | None, *, now: datetime, window: timedelta) -> Decision:
    """The decision for a new message. A message that was stored before is not decided at all: its run answers it."""
    if last is None:
        return Decision.RUN
    if policy is Policy.REJECT:
        return Decision.REJECT
    if policy is Policy.ENQUEUE or last.has_effects or last.of_cron_task or now > last.first_input_at + window:
        return Decision.ENQUEUE
    return Decision.MERGE
