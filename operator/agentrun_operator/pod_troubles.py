"""Why pods of an AgentRun do not start, in a line that a person can act on. Pure.

Pods are not watched: they are listed only while some are missing, and another look is asked for then, the later the longer it lasts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrun_operator.facts import Object
from agentrun_operator.jobs import is_complete
from agentrun_operator.render.labels import COMPONENT
from agentrun_operator.render.names import Component
from agentrun_operator.resources import DEPLOYMENTS, JOBS, Ref

AGAIN_SECONDS = 10.0
LONGEST_AGAIN_SECONDS = 300.0
_JOB = "batch.kubernetes.io/job-name"
_LONGEST = 600

_NO_IMAGE = "the image {image} cannot be pulled; check its name, the registry, and spec.imagePullSecrets"
_WAITING = {
    "ErrImagePull": _NO_IMAGE,
    "ImagePullBackOff": _NO_IMAGE,
    "RegistryUnavailable": _NO_IMAGE,
    "InvalidImageName": "{image} is no name of an image; correct spec.image",
    "ErrImageNeverPull": "the image {image} is not on the node, and spec.imagePullPolicy is Never",
    "CreateContainerConfigError": "{message}",
    "CreateContainerError": "{message}",
}
"""What is said for the reasons of the kubelet. Their own messages change from try to try, where the sentence here leaves them out."""


def may_be_in_trouble(children: Mapping[Ref, Object]) -> bool:
    """Whether pods are missing or have failed, so that it is worth a look at them."""
    return any(
        (ref.resource == JOBS and not is_complete(body))
        or (ref.resource == DEPLOYMENTS and (body.get("status") or {}).get("unavailableReplicas"))
        for ref, body in children.items()
    )


def again_after(seconds: float) -> float:
    """Seconds until the next look at pods of which nothing new has been seen for `seconds`: half as long, from 10 s to 5 minutes."""
    return min(max(AGAIN_SECONDS, seconds / 2.0), LONGEST_AGAIN_SECONDS)


def troubles(pods: Sequence[Object]) -> dict[str, str]:
    """By component, for a migration by the name of its Job: also what its last pod said when it failed, by the line printed last."""
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp"))):
        labels = pod["metadata"].get("labels") or {}
        part = str(labels.get(COMPONENT))
        if "deletionTimestamp" in pod["metadata"]:
            continue
        for said in _of_pod(pod, part):
            found[labels.get(_JOB, part)] = said[:_LONGEST].rstrip(".; ")
    return found


def _of_pod(pod: Mapping[str, Any], part: str) -> Iterator[str]:
    status = pod.get("status") or {}
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("reason") == "Unschedulable":
            yield f"no node has room for its pods ({str(one.get('message')).partition('. ')[0]})"
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if form := _WAITING.get(str(waiting.get("reason"))):
            yield form.format(image=container.get("image"), message=waiting.get("message"))
        if part == Component.MIGRATE and ended.get("exitCode") and (lines := str(ended.get("message") or "").split("\n")):
            yield next((line.strip() for line in reversed(lines) if line.strip()), "")
