"""The three Deployments: gateway, worker, scheduler. The worker's has no replicas: they belong to the scaler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrun.manifests import AgentRun
from agentrun.manifests.pods import OWN_VOLUME_PREFIX
from agentrun_operator.digests import digest
from agentrun_operator.render.labels import (
    CONFIG_DIGEST,
    DESIRED_DIGEST,
    SECRETS_DIGEST,
    TEMPLATE_DIGEST,
    VOLUMES_DIGEST,
    new_object,
    selector,
)
from agentrun_operator.render.names import Component, component
from agentrun_operator.render.pods import (
    CONFIG_VOLUME,
    GATEWAY_PORT,
    HEALTH_PORT,
    KEYS_FOLDER,
    Pod,
    config_mount,
    config_volume,
    pod_template,
    store_env,
)
from agentrun_operator.resources import Key

GATEWAY_GRACE_SECONDS = 30
SCHEDULER_GRACE_SECONDS = 30
WORKER_MARGIN_SECONDS = 15
"""Above spec.workers.drainSeconds: to hand back what did not end, and to exit."""
UNROUTED_SECONDS = 5
"""A gateway that is to stop serves on for so long, until nobody routes to it any more."""
KEPT_REVISIONS = 3

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """What the Deployments are made from. `secrets_digest` stands for the URLs of the stores, `worker_digest` for agent.secretRefs too."""

    key: Key
    uid: str
    manifest: AgentRun
    image: str
    secrets_digest: str
    worker_digest: str
    volumes_digest: str
    """Of the Secrets of spec.podTemplate.volumes; empty where there are none."""
    config_digests: Mapping[Component, str]
    configs: Mapping[Component, str]
    """Which ConfigMap the pods of each component mount."""
    notes: Mapping[str, str]
    """Further annotations of the Deployments themselves: what was known when they were written."""


def gateway(given: Rendered) -> Json:
    """Serves HTTP. A new pod is there before an old one goes."""
    spec = given.manifest.spec.gateway
    keys = given.manifest.spec.store_secrets().api_keys
    volume = f"{OWN_VOLUME_PREFIX}keys"
    pod = Pod(
        Component.GATEWAY,
        given.image,
        GATEWAY_GRACE_SECONDS,
        spec.resources,
        container={
            "ports": [{"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
            "readinessProbe": _probe("/readyz", "http", period=5, failures=3),
            "livenessProbe": _probe("/healthz", "http", period=10, failures=6),
            "lifecycle": {"preStop": {"sleep": {"seconds": UNROUTED_SECONDS}}},
        },
        env=[*store_env(given.manifest), {"name": "AGENTRUN_API_KEYS", "value": f"{KEYS_FOLDER}/{keys.key}"}],
        mounts=[config_mount(), {"name": volume, "mountPath": KEYS_FOLDER, "readOnly": True}],
        volumes=[
            config_volume(given.configs[Component.GATEWAY]),
            {"name": volume, "secret": {"secretName": keys.name, "items": [{"key": keys.key, "path": keys.key}]}},
        ],
        annotations=_digests(given, Component.GATEWAY),
    )
    return _deployment(given, pod, {"replicas": spec.replicas})


def worker(given: Rendered) -> Json:
    """Executes runs. Readiness is patient: a worker that is busy is not to be the first that is stopped."""
    spec = given.manifest.spec
    pod = Pod(
        Component.WORKER,
        given.image,
        spec.workers.drain_seconds + WORKER_MARGIN_SECONDS,
        spec.workers.resources,
        container=_health(failures=12),
        env=store_env(given.manifest),
        env_from=[{"secretRef": {"name": secret.name}} for secret in spec.agent.secret_refs],
        mounts=[config_mount()],
        volumes=[config_volume(given.configs[Component.WORKER])],
        annotations={**_digests(given, Component.WORKER), SECRETS_DIGEST: given.worker_digest},
    )
    return _deployment(given, pod, {})


def scheduler(given: Rendered) -> Json:
    """Reaps, sweeps, and starts what is scheduled. None leads."""
    pod = Pod(
        Component.SCHEDULER,
        given.image,
        SCHEDULER_GRACE_SECONDS,
        container=_health(failures=6),
        env=store_env(given.manifest),
        mounts=[config_mount()],
        volumes=[config_volume(given.configs[Component.SCHEDULER])],
        annotations=_digests(given, Component.SCHEDULER),
    )
    return _deployment(given, pod, {"replicas": given.manifest.spec.scheduler.replicas})


def _deployment(given: Rendered, pod: Pod, spec: Json) -> Json:
    body = new_object(component(given.key, pod.component), given.key.name, uid=given.uid, component=pod.component)
    template = pod_template(given.key, given.manifest, pod=pod)
    mark = digest(template)
    template["metadata"]["annotations"] = {**template["metadata"].get("annotations", {}), TEMPLATE_DIGEST: mark}
    body["spec"] = {
        **spec,
        "revisionHistoryLimit": KEPT_REVISIONS,
        "selector": {"matchLabels": selector(given.key.name, pod.component)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
        "template": template,
    }
    digests = {DESIRED_DIGEST: digest(body), TEMPLATE_DIGEST: mark}
    body["metadata"]["annotations"] = {**digests, **given.notes}
    return body


def mounted_config(deployment: Mapping[str, Any]) -> str | None:
    """The name of the ConfigMap that the pods of a Deployment mount."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    found = next((volume.get("configMap") for volume in volumes if volume.get("name") == CONFIG_VOLUME), None)
    return str(found["name"]) if found and found.get("name") else None


def _digests(given: Rendered, part: Component) -> dict[str, str]:
    digests = {CONFIG_DIGEST: given.config_digests[part], SECRETS_DIGEST: given.secrets_digest}
    return {**digests, VOLUMES_DIGEST: given.volumes_digest} if given.volumes_digest else digests


def _health(*, failures: int) -> Json:
    """Port and probes of a process with the small health server."""
    return {
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "readinessProbe": _probe("/readyz", "health", period=5, failures=failures),
        "livenessProbe": _probe("/healthz", "health", period=10, failures=failures),
    }


def _probe(path: str, port: str, *, period: int, failures: int) -> Json:
    """After `period` times `failures` seconds without a good answer the pod counts as failed."""
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}
