"""The status of an AgentRun: conditions and numbers. Pure. Equal to what is there: nothing is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrun.bus.keys import GROUP, Keys
from agentrun.costs.amounts import usd
from agentrun_operator import spending
from agentrun_operator.availability import count, wanted
from agentrun_operator.conditions import Condition, merge
from agentrun_operator.reasons import ALWAYS_PRESENT, ConditionType
from agentrun_operator.render.names import Component
from agentrun_operator.render.service import url
from agentrun_operator.situation import Situation

Json = dict[str, Any]


def status_of(situation: Situation, conditions: Sequence[Condition]) -> Json:
    """The whole status as this operator has it."""
    observed = situation.observed
    old = situation.old_status.get("conditions") or ()
    status: Json = {
        "observedGeneration": observed.generation,
        "conditions": list(merge(old, conditions, generation=observed.generation, now=situation.now)),
    }
    for member, numbers in (
        ("gateway", _gateway(situation)),
        ("workers", _workers(situation)),
        ("queue", _queue(situation)),
        ("schema", _schema(situation)),
        ("usage", _usage(situation)),
    ):
        if numbers:
            status[member] = numbers
    return status


def differs(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the object's status has to be written; what others added to it does not count."""
    mine = {condition["type"]: condition for condition in new["conditions"]}
    theirs = {condition.get("type"): condition for condition in old.get("conditions") or ()}
    gone = (set(ConditionType) - set(ALWAYS_PRESENT) - set(mine)) & set(theirs)
    return (
        bool(gone)
        or any(theirs.get(kind) != condition for kind, condition in mine.items())
        or any(_unlike(old.get(member), value) for member, value in new.items() if member != "conditions")
        or any(member in old and member not in new for member in ("gateway", "workers", "queue", "schema", "usage"))
    )


def _unlike(old: Any, new: Any) -> bool:
    if isinstance(new, Mapping):
        return not isinstance(old, Mapping) or dict(old) != dict(new)
    return bool(old != new)


def _gateway(situation: Situation) -> Json:
    deployment = situation.child(Component.GATEWAY)
    if deployment is None or situation.observed.manifest is None:
        return {}
    return {"url": url(situation.observed.key, situation.manifest), **_pods(deployment)}


def _workers(situation: Situation) -> Json:
    deployment, scaling = situation.child(Component.WORKER), situation.observed.scaling
    if deployment is None:
        return {}
    desired = wanted(deployment) if scaling is None or scaling.desired is None else scaling.desired
    pods = _pods(deployment)
    numbers: Json = {**pods, "desiredReplicas": desired, "summary": f"{pods['readyReplicas']}/{desired}"}
    if scaling is not None and scaling.counters is not None:
        numbers["busy"] = scaling.counters.busy
    return numbers


def _queue(situation: Situation) -> Json:
    key, scaling = situation.observed.key, situation.observed.scaling
    if situation.observed.manifest is None:
        return {}
    numbers: Json = {"stream": Keys(key.namespace, key.name).runs, "group": GROUP}
    if scaling is not None and (counters := scaling.counters) is not None:
        numbers |= {
            "undelivered": counters.undelivered,
            "inFlight": counters.in_flight,
            "reclaimable": counters.reclaimable,
        }
        if counters.dead_lettered is not None:
            numbers["deadLettered"] = counters.dead_lettered
    return numbers


def _schema(situation: Situation) -> Json:
    fact = situation.observed.schema
    if fact is None:
        return {}
    return {"required": fact.required, **({"present": fact.present} if fact.problem is None else {})}


def _usage(situation: Situation) -> Json:
    today = spending.spent_today(situation)
    return {} if today is None else {"todayUsd": usd(round(today, 6))}


def _pods(deployment: Mapping[str, Any]) -> Json:
    return {"replicas": count(deployment, "replicas"), "readyReplicas": count(deployment, "readyReplicas")}
