"""Why pods of an AgentRun do not come up, in a line that a person can act on and that stays the same as long as the cause does. Pure.

Pods are not watched: they are listed only while some are missing, and another look is asked for then, the later the longer it lasts.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from agentrun_operator.conditions import find, seconds_since
from agentrun_operator.facts import Object
from agentrun_operator.jobs import is_complete
from agentrun_operator.render.labels import COMPONENT, INSTANCE, TEMPLATE_DIGEST
from agentrun_operator.render.names import Component
from agentrun_operator.resources import DEPLOYMENTS, JOBS, Ref
from agentrun_operator.steady_text import scheduling, steady

AGAIN_SECONDS = 10.0
LONGEST_AGAIN_SECONDS = 300.0
CRASH_SECONDS = 600.0
"""A container that runs for longer after a restart does not crash in a loop; so does the kubelet count."""
MOUNT_SECONDS = 120.0
"""A pod on a node whose volumes and network are not there after so long waits for something that is missing."""

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
    "RunContainerError": "{message}",
}
"""What is said for the reasons of the kubelet. Their own messages change from try to try, where the sentence here leaves them out."""
_CANNOT_RUN = ("StartError", "ContainerCannotRun")
_MEMORY: Mapping[str, str] = {
    Component.GATEWAY: "; raise spec.gateway.resources.limits",
    Component.WORKER: "; raise spec.workers.resources.limits, or lower spec.workers.concurrency",
}


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


def troubles(pods: Sequence[Object], children: Mapping[Ref, Object], *, now: datetime) -> dict[str, str]:
    """By component, for a migration by the name of its Job: also what its last pod said when it failed, by the line printed last.

    Of Deployments only the pods of the present template count: what the former ones suffer from is being replaced.
    """
    deployments = {_label(body, COMPONENT): body for ref, body in children.items() if ref.resource == DEPLOYMENTS}
    living = {_label(pod, COMPONENT) for pod in pods if not _failed(pod)}
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp"))):
        part = _label(pod, COMPONENT)
        if "deletionTimestamp" in pod["metadata"] or (part in deployments and not _is_present(pod, deployments[part])):
            continue
        if part != Component.MIGRATE and _failed(pod) and part in living:
            continue  # another has taken its place
        for said in _of_pod(pod, part, now):
            found[_label(pod, _JOB) or part] = said[:_LONGEST].rstrip(".; ")
    for part, body in deployments.items():
        if (refused := find((body.get("status") or {}).get("conditions") or (), "ReplicaFailure")) and refused[
            "status"
        ] == "True":
            found[part] = f"its pods are refused ({steady(refused.get('message'))})"[:_LONGEST]
    return found


def _label(body: Object, name: str) -> str:
    return str((body["metadata"].get("labels") or {}).get(name) or "")


def _failed(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Failed"


def _is_present(pod: Object, deployment: Object) -> bool:
    """Whether it was made from the template that the Deployment has now."""
    mine, present = (
        (metadata.get("annotations") or {}).get(TEMPLATE_DIGEST)
        for metadata in (pod["metadata"], deployment["spec"]["template"]["metadata"])
    )
    return bool(mine == present)


def _of_pod(pod: Object, part: str, now: datetime) -> Iterator[str]:
    """The last one counts."""
    status = pod.get("status") or {}
    scheduled = find(status.get("conditions") or (), "PodScheduled") or {}
    if scheduled.get("reason") == "Unschedulable":
        yield f"no node has room for its pods ({scheduling(scheduled.get('message'))})"
    if part != Component.MIGRATE and _failed(pod):
        yield f"its pod was ended ({status.get('reason') or 'Failed'}: {_steady(status.get('message'), pod)})"
    sandbox = find(status.get("conditions") or (), "PodReadyToStartContainers") or {}
    if (scheduled.get("status"), sandbox.get("status")) == ("True", "False") and seconds_since(scheduled, now) > MOUNT_SECONDS:
        yield f"its pods wait for volumes or network on their nodes{_mounted(pod)}"
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if form := _WAITING.get(str(waiting.get("reason"))):
            yield form.format(image=container.get("image"), message=_steady(waiting.get("message"), pod))
        elif part == Component.MIGRATE:
            if ended.get("exitCode") and (lines := str(ended.get("message") or "").split("\n")):
                yield next((line.strip() for line in reversed(lines) if line.strip()), "")
        elif not container.get("ready") and (last := _last_end(container, now)):
            yield _crash(last, pod, part)


def _mounted(pod: Object) -> str:
    """What its volumes need to be there."""
    sources = (
        ("secret", "secretName", "Secret"),
        ("configMap", "name", "ConfigMap"),
        ("persistentVolumeClaim", "claimName", "claim"),
    )
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    named = sorted({f"{word} {one[source][member]}" for one in volumes for source, member, word in sources if one.get(source)})
    return f"; check that these are there: {', '.join(named)}" if named else ""


def _last_end(container: Mapping[str, Any], now: datetime) -> Mapping[str, Any] | None:
    """How its process ended last; None for one that has not, or has run for long since."""
    state = container.get("state") or {}
    running = state.get("running") or {}
    if running and seconds_since({"lastTransitionTime": running.get("startedAt")}, now) > CRASH_SECONDS:
        return None
    return state.get("terminated") or (container.get("lastState") or {}).get("terminated")


def _crash(ended: Mapping[str, Any], pod: Object, part: str) -> str:
    """The same sentence while it ends, waits for its turn, and runs again."""
    if ended.get("reason") in _CANNOT_RUN:
        return f"its container cannot start ({_steady(ended.get('message'), pod)})"
    if ended.get("reason") == "OOMKilled":
        return f"its container needs more memory than it may use (OOMKilled){_MEMORY.get(part, '')}"
    labels = f"{INSTANCE}={_label(pod, INSTANCE)},{COMPONENT}={part}"
    log = f"kubectl logs --previous -n {pod['metadata'].get('namespace')} -l {labels}"
    return f"its container ends soon after each start, with exit code {ended.get('exitCode')}; {log}"


def _steady(message: object, pod: Object) -> str:
    return steady(message, names=(str(pod["metadata"].get("name")), str(pod["metadata"].get("uid"))))
