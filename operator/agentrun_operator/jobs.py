"""What the status of a Job says. Pure."""

from datetime import datetime

from agentrun_operator.conditions import age
from agentrun_operator.facts import Object

SLOW_START_SECONDS = 300.0
"""A Job without a pod that runs counts as stuck after so long. An image that is pulled for the first time takes minutes, too."""


def job_condition(job: Object, kind: str) -> Object | None:
    """A condition of a Job that is True."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == "True"), None)


def is_complete(job: Object) -> bool:
    """Whether it did what it was made for."""
    return job_condition(job, "Complete") is not None


def is_at_work(job: Object) -> bool:
    """Whether a pod of it runs. One whose pod cannot start, as for an image that does not exist, never ends by itself."""
    ended = is_complete(job) or job_condition(job, "Failed") is not None
    return not ended and "deletionTimestamp" not in job["metadata"] and _number(job, "ready") > 0


def seconds_to_start(job: Object, now: datetime) -> float:
    """How long a Job may still wait for its first pod to run, at most SLOW_START_SECONDS; infinite once one has run."""
    if _number(job, "ready") or _number(job, "failed") or _number(job, "succeeded"):
        return float("inf")
    return SLOW_START_SECONDS - age(job, now)


def _number(job: Object, member: str) -> int:
    return int((job.get("status") or {}).get(member) or 0)
