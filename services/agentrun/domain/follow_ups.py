"""What becomes of a message while its session has an unfinished run."""

from enum import StrEnum


class Policy(StrEnum):
    """spec.followUps.policy. The rules are in store/submissions.sql (`follow_up`), which decides under the session's lock."""

    MERGE = "Merge"
    ENQUEUE = "Enqueue"
    REJECT = "Reject"
