"""How many replicas the worker Deployment is to have now, and what of the Deployment that depends on. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from agentrun_operator.render.labels import SUSPENDED

Body = Mapping[str, Any]

_POD_NAME_KEEPS = 57
"""Pod names keep so much of a long Deployment's name: the API server cuts the rest to make room for a random end."""


def aim(*, wanted: int, replicas: int, known: bool, settled: bool, busy: int, most: int) -> int:
    """The replicas to write, where `wanted` follow from the demand and `replicas` are there now.

    Up at once. Down only while the demand is `known` and no roll-out is under way (`settled`), and never below the number of `busy`
    workers, which end their work first; but `most`, the admin's limit, holds whoever is busy.
    """
    if wanted >= replicas:
        return wanted
    if not (known and settled):
        return replicas
    return min(replicas, max(wanted, min(busy, most)))


def suspension(deployment: Body, *, suspended: bool, least: int) -> int | None:
    """What to write, once, to a Deployment that others scale: zero for spec.suspend, and what wakes it afterwards. None: nothing.

    An autoscaler of Kubernetes does not touch what stands at zero. What others set meanwhile is theirs.
    """
    if suspended is (SUSPENDED in (deployment["metadata"].get("annotations") or {})):
        return None
    return 0 if suspended else replicas_of(deployment) or max(1, least)


def hand_over(deployment: Body, managers: Collection[str], *, ours: str, suspended: bool, least: int) -> int | None:
    """What to write, once, to a Deployment that others scale from now on, where we have left it at zero. None: nothing.

    The zero is ours as long as nobody else is among the `managers` of the number; afterwards it is somebody's wish (KEDA's, say).
    """
    if suspended or replicas_of(deployment) or not {*managers} <= {ours}:
        return None
    return max(1, least)


def replicas_of(deployment: Body) -> int:
    """The API server fills it in: 1 if nobody says."""
    return int(deployment["spec"].get("replicas", 1))


def is_settled(deployment: Body) -> bool:
    """Whether no roll-out is under way: the last spec was seen, all pods are of the newest template, and that template has come up.

    During a roll-out a smaller number is spread over old and new ReplicaSets, and the cost of a pod counts within one only.
    Pods that have not come up after a roll-out that had ended (no room in the cluster) are no roll-out: the condition Progressing keeps
    the reason NewReplicaSetAvailable then. https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#deployment-status
    """
    status = deployment.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(deployment["metadata"].get("generation", 0)):
        return False
    if int(status.get("updatedReplicas", 0)) != int(status.get("replicas", 0)):
        return False
    if int(status.get("unavailableReplicas", 0)) == 0:
        return True
    conditions = status.get("conditions") or ()
    return any(one["type"] == "Progressing" and one.get("reason") == "NewReplicaSetAvailable" for one in conditions)


def has_arrived(deployment: Body) -> bool:
    """Whether there are exactly as many pods as asked for, so that a scale-in is over."""
    status = deployment.get("status") or {}
    seen = int(status.get("observedGeneration", 0)) >= int(deployment["metadata"].get("generation", 0))
    return seen and int(status.get("replicas", 0)) == replicas_of(deployment)


def busy_workers(held: Mapping[str, int], deployment: str) -> int:
    """How many consumers that hold entries are workers of this Deployment; reapers hold some, too."""
    if not held:
        return 0
    prefix = deployment[:_POD_NAME_KEEPS]
    return sum(consumer.startswith(prefix) for consumer in held)


def is_controlled_by(body: Body, uid: str) -> bool:
    """Whether the AgentRun of that uid is its controller: a foreign Deployment of our name is let alone."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)
