"""Labels, annotations and the owner of what is made for an AgentRun.

Selectors hold instance and component only: they cannot be changed later, so nothing that a new version changes may be in them.
"""

from collections.abc import Mapping
from typing import Any

from agentrun.manifests import API_VERSION
from agentrun_operator.render.names import Component, instance_of
from agentrun_operator.resources import AGENTRUN_LABEL, MANAGED_BY, MANAGED_BY_LABEL, Ref

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
NAME = "app.kubernetes.io/name"

CONFIG_DIGEST = "agentrun.dev/config-digest"
"""On a pod template: what the pods read at their start; a change rolls them."""
SECRETS_DIGEST = "agentrun.dev/secrets-digest"
"""On a pod template: the stores' URLs; a change rolls the pods."""
VOLUMES_DIGEST = "agentrun.dev/volumes-digest"
"""On a pod template: the Secrets of spec.podTemplate.volumes, if there are any; a change rolls the pods."""
DESIRED_DIGEST = "agentrun.dev/desired-digest"
"""On a Deployment: all that the operator wants it to be."""
TEMPLATE_DIGEST = "agentrun.dev/template-digest"
"""On a Deployment: the pod template that the operator wants. It differs: the pods are replaced. On pods: what they were made from."""
MIGRATED_DIGEST = "agentrun.dev/migrated-digest"
"""On a Deployment: the image and the database's URL, for which a migration had ended before it was made or changed."""
REDIS_DIGEST = "agentrun.dev/redis-digest"
"""On a Deployment: the URL of Redis that its pods were rolled out with."""
SUSPENDED = "agentrun.dev/suspended"
"""On a worker Deployment that others scale: this operator has set it to zero for spec.suspend, and sets it back afterwards."""
CREATING = "agentrun.dev/creating"
"""On a worker Deployment whose creation is not finished: see `apply.py`."""


def selector(agent_run: str, component: Component) -> dict[str, str]:
    """The labels by which pods of a component are found."""
    return {INSTANCE: instance_of(agent_run), COMPONENT: component.value}


def labels(agent_run: str, component: Component | None = None) -> dict[str, str]:
    """The labels of an object; `component` None: it belongs to all of them."""
    return {
        NAME: "agentrun",
        INSTANCE: instance_of(agent_run),
        **({COMPONENT: component.value} if component else {}),
        MANAGED_BY_LABEL: MANAGED_BY,
        AGENTRUN_LABEL: instance_of(agent_run),
    }


def owner(agent_run: str, uid: str) -> dict[str, Any]:
    """The reference by which Kubernetes deletes the object with its AgentRun; both are in one namespace.

    Without blockOwnerDeletion, which needs a right on finalizers where the API server enforces it.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": "AgentRun",
        "name": agent_run,
        "uid": uid,
        "controller": True,
    }


def new_object(
    ref: Ref, agent_run: str, *, uid: str, component: Component | None = None, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The head of an object's body."""
    return {
        "apiVersion": ref.resource.api_version,
        "kind": ref.resource.kind,
        "metadata": {
            "name": ref.name,
            "namespace": ref.namespace,
            "labels": labels(agent_run, component),
            **({"annotations": dict(annotations)} if annotations else {}),
            "ownerReferences": [owner(agent_run, uid)],
        },
    }
