"""What all pods of an AgentRun have in common: identity, stores, security, and what spec.podTemplate adds.

They meet the Pod Security Standard `restricted` (https://kubernetes.io/docs/concepts/security/pod-security-standards/), have a read-only
root and no token of the API server.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from agentrun.manifests import AgentRun
from agentrun.manifests.base import SecretRef
from agentrun.manifests.pods import OWN_VOLUME_PREFIX, PodTemplate, Resources
from agentrun_operator.render.config import FILE
from agentrun_operator.render.labels import labels, selector
from agentrun_operator.render.names import Component
from agentrun_operator.resources import Key

CONFIG_FOLDER = "/etc/agentrun"
KEYS_FOLDER = "/etc/agentrun-keys"
CONFIG_VOLUME = f"{OWN_VOLUME_PREFIX}config"
HEALTH_PORT = 8081
GATEWAY_PORT = 8080

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """How the pods of one component differ from the others."""

    component: Component
    image: str
    grace_seconds: int
    resources: Resources | None = None
    container: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the container: ports, probes, lifecycle."""
    env: Sequence[Json] = ()
    env_from: Sequence[Json] = ()
    mounts: Sequence[Json] = ()
    volumes: Sequence[Json] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the pod."""


def pod_template(key: Key, manifest: AgentRun, *, pod: Pod) -> Json:
    """The pod template of a Deployment or a Job."""
    added = manifest.spec.pod_template
    metadata: Json = {"labels": {**added.labels, **labels(key.name, pod.component), **selector(key.name, pod.component)}}
    if annotations := {**added.annotations, **pod.annotations}:
        metadata["annotations"] = annotations
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": pod.grace_seconds,
        "containers": [_container(key, manifest, pod=pod)],
        "volumes": [*pod.volumes, _tmp(), *plain(added.volumes)],
        **_placement(key, pod.component, added),
        **pod.spec,
    }
    if manifest.spec.image_pull_secrets:
        spec["imagePullSecrets"] = plain(manifest.spec.image_pull_secrets)
    return {"metadata": metadata, "spec": spec}


def store_env(manifest: AgentRun) -> list[Json]:
    """Where the stores and the manifest are."""
    secrets = manifest.spec.store_secrets()
    return [
        secret_env("DATABASE_URL", secrets.database),
        secret_env("REDIS_URL", secrets.redis),
        {"name": "AGENTRUN_MANIFEST", "value": f"{CONFIG_FOLDER}/{FILE}"},
    ]


def config_mount() -> Json:
    """Where the container sees the manifest."""
    return {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True}


def config_volume(name: str) -> Json:
    """The manifest in the ConfigMap of that name as a volume."""
    return {"name": CONFIG_VOLUME, "configMap": {"name": name}}


def secret_env(name: str, ref: SecretRef) -> Json:
    """An environment variable from a key of a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}


def plain(models: Iterable[BaseModel]) -> list[Json]:
    """Parts of a manifest as Kubernetes has them: members that were not given are left out."""
    return [model.model_dump(mode="json", by_alias=True, exclude_none=True) for model in models]


def _container(key: Key, manifest: AgentRun, *, pod: Pod) -> Json:
    added, spec = manifest.spec.pod_template, manifest.spec
    chosen = {variable.name for variable in added.env}
    container: Json = {
        "name": pod.component.value,
        "image": pod.image,
        "imagePullPolicy": spec.image_pull_policy,
        "args": [pod.component.value],
        "env": [
            {"name": "AGENTRUN_NAMESPACE", "value": key.namespace},
            {"name": "AGENTRUN_NAME", "value": key.name},
            {"name": "AGENTRUN_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *([] if "HOME" in chosen else [{"name": "HOME", "value": "/tmp"}]),
            *pod.env,
            *plain(added.env),
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [*pod.mounts, {"name": f"{OWN_VOLUME_PREFIX}tmp", "mountPath": "/tmp"}, *plain(added.volume_mounts)],
        **pod.container,
    }
    if pod.env_from:
        container["envFrom"] = list(pod.env_from)
    if pod.resources is not None:
        resources = pod.resources.model_dump(mode="json", by_alias=True)
        container["resources"] = {name: quantities for name, quantities in resources.items() if quantities}
    return container


def _tmp() -> Json:
    return {"name": f"{OWN_VOLUME_PREFIX}tmp", "emptyDir": {}}


def _placement(key: Key, component: Component, added: PodTemplate) -> Json:
    """On which nodes the pods go. Without a wish they are spread over nodes where that is possible."""
    same = {"labelSelector": {"matchLabels": selector(key.name, component)}}
    spread = plain(added.topology_spread_constraints) or [
        {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    ]
    placement: Json = {"topologySpreadConstraints": [{**constraint, **same} for constraint in spread]}
    if added.node_selector:
        placement["nodeSelector"] = dict(added.node_selector)
    if added.tolerations:
        placement["tolerations"] = plain(added.tolerations)
    if affinity := {name: rules for name, rules in plain([added.affinity])[0].items() if rules}:
        placement["affinity"] = affinity
    return placement
