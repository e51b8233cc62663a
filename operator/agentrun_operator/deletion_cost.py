"""Which worker pods a scale-in takes: the idle ones.

The ReplicaSet's controller picks the victims: pods that are not ready first, whatever their cost, then those of the lowest
pod-deletion-cost (https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost). So before each scale-in idle
pods get a negative cost and busy ones a positive cost, and afterwards the costs go away: they would be wrong at the next one. A pod that
has a cost of somebody else keeps it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrun_operator.kube import Kube, NotFound
from agentrun_operator.resources import PODS, Ref

COST = "controller.kubernetes.io/pod-deletion-cost"
BUSY_COST, IDLE_COST = "1000", "-1000"
_PATCHES_AT_ONCE = 8

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Crew:
    """The worker pods of one AgentRun that are not about to end. Busy: a consumer of that pod holds entries."""

    pods: Sequence[Body]
    busy: frozenset[str]
    endangered: frozenset[str]
    """Busy, and no cost of ours would save them: not ready, or with a cost that somebody else gave."""

    @property
    def costs(self) -> dict[str, str]:
        """The cost of each pod by its name, where it is another one now. A cost that somebody else gave stays."""
        wanted = {_name(pod): BUSY_COST if _name(pod) in self.busy else IDLE_COST for pod in self.pods if not _has_foreign(pod)}
        return {_name(pod): wanted[_name(pod)] for pod in self.pods if _cost(pod) != wanted.get(_name(pod), _cost(pod))}


def crew(pods: Sequence[Body], held: Mapping[str, int]) -> Crew:
    """`held` are the consumers with entries: a worker's consumer is its pod's name, a hyphen and a nonce."""
    busy_names = {consumer.rpartition("-")[0] for consumer in held}
    alive = [pod for pod in pods if not _ends(pod)]
    busy = frozenset(_name(pod) for pod in alive if _name(pod) in busy_names)
    endangered = (_name(pod) for pod in alive if _name(pod) in busy and (_has_foreign(pod) or not _is_ready(pod)))
    return Crew(alive, busy, frozenset(endangered))


async def list_pods(kube: Kube, deployment: Body) -> list[Body]:
    """The pods that this Deployment selects. Raises KubeError."""
    labels = deployment["spec"]["selector"].get("matchLabels") or {}
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return [*(await kube.list(PODS, namespace=deployment["metadata"]["namespace"], labels=selector)).items]


async def assign(kube: Kube, namespace: str, costs: Mapping[str, str | None]) -> None:
    """Gives pods their costs; None takes one away. Returns when all are stored; a pod that is gone needs none. Raises KubeError."""
    places = asyncio.Semaphore(_PATCHES_AT_ONCE)

    async def one(name: str, cost: str | None) -> None:
        async with places:
            try:
                await kube.merge_patch(Ref(PODS, namespace, name), {"metadata": {"annotations": {COST: cost}}})
            except NotFound:
                pass

    async with asyncio.TaskGroup() as group:
        for name, cost in costs.items():
            group.create_task(one(name, cost))


def ours(pods: Sequence[Body]) -> dict[str, str | None]:
    """What takes our costs away again; a cost that somebody else gave stays."""
    return {_name(pod): None for pod in pods if _cost(pod) is not None and not _has_foreign(pod)}


def _name(pod: Body) -> str:
    return str(pod["metadata"]["name"])


def _cost(pod: Body) -> str | None:
    return (pod["metadata"].get("annotations") or {}).get(COST)


def _has_foreign(pod: Body) -> bool:
    """Ours are known by their two values."""
    return _cost(pod) not in (None, BUSY_COST, IDLE_COST)


def _ends(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"] or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
