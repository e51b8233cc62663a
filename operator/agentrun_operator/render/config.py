"""The ConfigMap with the manifest, and the digests that decide whether a change of it replaces pods.

The manifest in it holds what pods read and nothing that is at its default, so that pods of an older image, which knows fewer fields,
can still start while they are the ones that serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from agentrun.manifests import AgentRun
from agentrun_operator.digests import digest
from agentrun_operator.render.labels import new_object
from agentrun_operator.render.names import Component, config
from agentrun_operator.resources import Key, Ref

FILE = "agentrun.yaml"

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""That of libyaml, where it is, takes a tenth of the time."""

_Paths = tuple[tuple[str, ...], ...]

_OPERATOR_ONLY: _Paths = (
    ("agent", "secretRefs"),
    ("image",),
    ("imagePullPolicy",),
    ("imagePullSecrets",),
    ("database", "secretRef"),
    ("database", "migrations"),
    ("database", "migrationSecretRef"),
    ("redis", "secretRef"),
    ("gateway", "replicas"),
    ("gateway", "resources"),
    ("gateway", "service"),
    ("gateway", "auth"),
    ("workers", "minReplicas"),
    ("workers", "maxReplicas"),
    ("workers", "resources"),
    ("scaling",),
    ("scheduler",),
    ("networkPolicy",),
    ("podTemplate",),
)
"""Members that no pod reads: they reach pods by their environment, their template, or not at all."""

_NOT_READ_BY: Mapping[Component, _Paths] = {
    Component.GATEWAY: (("agent",), ("workers",), ("reaper",), ("prices",), ("budget", "onUnknownPrice")),
    Component.WORKER: (
        ("gateway",),
        ("submission",),
        ("reaper",),
        ("suspend",),
        ("budget", "usdPerDay"),
        ("budget", "usdPerUserDay"),
        ("budget", "timeZone"),
    ),
    Component.SCHEDULER: (("agent",), ("gateway",), ("budget", "onUnknownPrice")),
}
"""What a component never looks at: a change of it must not replace its pods. A field that is not named here does replace them."""


def pod_manifest(manifest: AgentRun) -> dict[str, Any]:
    """The manifest as pods read it."""
    document = manifest.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    spec = _without(document["spec"], _OPERATOR_ONLY)
    where = {"name": manifest.metadata.name, "namespace": manifest.metadata.namespace}
    return {"apiVersion": manifest.api_version, "kind": manifest.kind, "metadata": where, "spec": spec}


@dataclass(frozen=True, slots=True)
class PodConfig:
    """The manifest as text for pods, and for each component a digest that changes if and only if something changed that it reads."""

    text: str
    digests: Mapping[Component, str]

    @classmethod
    def of(cls, manifest: AgentRun) -> "PodConfig":
        """That of a manifest."""
        document = pod_manifest(manifest)
        text = str(yaml.dump(document, Dumper=_DUMPER, sort_keys=True, allow_unicode=True))
        return cls(text, {part: digest(_without(document["spec"], paths)) for part, paths in _NOT_READ_BY.items()})


def ref_of(key: Key, found: PodConfig) -> Ref:
    """The ConfigMap of this text. Another text has another one, so that pods that run never see what came later."""
    return config(key, fingerprint=digest(found.text, length=8))


def config_map(key: Key, found: PodConfig, *, uid: str) -> dict[str, Any]:
    """The ConfigMap that pods mount as a folder."""
    body = new_object(ref_of(key, found), key.name, uid=uid)
    body["immutable"] = True
    body["data"] = {FILE: found.text}
    return body


def is_suspended(config_map: Mapping[str, Any]) -> bool:
    """Whether the manifest in a ConfigMap says spec.suspend."""
    text = str((config_map.get("data") or {}).get(FILE, ""))
    if "suspend" not in text:
        return False
    found = yaml.safe_load(text)
    return isinstance(found, dict) and bool((found.get("spec") or {}).get("suspend"))


def _without(spec: Mapping[str, Any], paths: _Paths) -> dict[str, Any]:
    """A copy of the spec without these members."""
    kept = dict(spec)
    for first, *rest in paths:
        if first in kept:
            if rest:
                kept[first] = {name: value for name, value in kept[first].items() if name != rest[0]}
            else:
                del kept[first]
    return {name: value for name, value in kept.items() if value != {}}
