"""What is written where `plan` itself fails: that is a bug, and it must not be a silent one. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agentrun_operator.conditions import Condition, Status, find, merge
from agentrun_operator.facts import Observed
from agentrun_operator.plan import Event, Plan
from agentrun_operator.reasons import ALWAYS_PRESENT, ConditionType, EventReason, Reason
from agentrun_operator.status import differs


def plan_of_failure(observed: Observed, error: Exception, *, now: datetime) -> Plan:
    """A status that says so; the other conditions and the numbers stay. Only the kind of the error is told: its text may hold secrets."""
    old: Mapping[str, Any] = observed.raw.get("status") or {}
    known = list(old.get("conditions") or ())
    what = (
        f"this operator cannot work out what is to be done ({type(error).__name__}), and leaves everything as it is; "
        "its log has the details; please report it, and use another version or change the spec meanwhile"
    )
    later = "not looked at before Accepted is True"
    new = [
        Condition(kind, Status.UNKNOWN, Reason.OPERATOR_ERROR, what)
        if kind in (ConditionType.READY, ConditionType.ACCEPTED)
        else Condition(kind, Status.UNKNOWN, Reason.NOT_EVALUATED, later)
        for kind in ALWAYS_PRESENT
        if kind in (ConditionType.READY, ConditionType.ACCEPTED) or find(known, kind) is None
    ]
    told = {condition.type for condition in new}
    conditions = [*merge(known, new, generation=observed.generation, now=now), *(one for one in known if one["type"] not in told)]
    status = {**old, "observedGeneration": observed.generation, "conditions": conditions}
    ready = find(known, ConditionType.READY) or {}
    told_before = ready.get("reason") == Reason.OPERATOR_ERROR
    events = [] if told_before else [Event(EventReason.NOT_READY, f"{Reason.OPERATOR_ERROR}: {what}", warning=True)]
    return Plan(status=status if differs(old, status) else None, events=events)
