"""What becomes of a message while its session has an unfinished run. Pure; the same rules are in store/submissions.sql (`follow_up`), which
decides under the session's lock. A test compares the two.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum


class Policy(StrEnum):
    """spec.followUps.policy."""

    MERGE = "Merge"
    ENQUEUE = "Enqueue"
    REJECT = "Reject"


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
