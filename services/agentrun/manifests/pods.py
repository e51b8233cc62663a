"""The parts of an AgentRun that say how its pods are made. Outside Kubernetes they are accepted and have no effect."""

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from agentrun.manifests.base import (
    Annotations,
    DnsLabel,
    LabelKey,
    Labels,
    LabelValue,
    ObjectName,
    Spec,
    keyed,
    refuse,
)
from agentrun.manifests.quantities import Quantity, amount

OWN_PREFIXES = ("agentrun.dev/", "app.kubernetes.io/")
OWN_VARIABLES = ("DATABASE_URL", "REDIS_URL")
OWN_VARIABLE_PREFIX = "AGENTRUN_"
OWN_VOLUME_PREFIX = "agentrun-"
OWN_FOLDERS = ("/etc/agentrun", "/etc/agentrun-keys", "/tmp")
COMPUTE = ("cpu", "memory", "ephemeral-storage")

Quantities = Annotated[dict[LabelKey, Quantity], Field(max_length=8)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Resources(Spec):
    """What one container asks for and may use."""

    requests: Quantities = Field(
        default_factory=dict,
        description="What is reserved for a pod: cpu, memory, ephemeral-storage, or a device such as nvidia.com/gpu.",
    )
    limits: Quantities = Field(
        default_factory=dict, description="What a pod may use at most; a container that needs more memory is killed."
    )

    @model_validator(mode="after")
    def _fit(self) -> "Resources":
        for field in ("requests", "limits"):
            for name in getattr(self, field):
                if name not in COMPUTE and not name.startswith("hugepages-") and "/" not in name:
                    refuse((field, name), "is no resource of Kubernetes", f"use one of {', '.join(COMPUTE)}, or vendor/device")
        for name in self.requests.keys() & self.limits.keys():
            if amount(self.requests[name]) > amount(self.limits[name]):
                refuse(("requests", name), "the request exceeds the limit", "lower the request or raise the limit")
        return self


class Service(Spec):
    """The gateway's Service."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP",
        description="Where the Service is reached from: the cluster, a port of every node, or a load balancer.",
    )
    port: int = Field(default=80, ge=1, le=65535, description="Port of the Service.")
    annotations: Annotations = Field(
        default_factory=dict, description="Annotations of the Service, for example for the cloud's load balancer."
    )


class MatchLabels(Spec):
    """What carries these labels."""

    match_labels: Labels = Field(default_factory=dict, description="All of these labels; none selects everything.")


def _is_network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        refuse((), f"{text!r} is no network", "write it as address/bits, for example 10.0.0.0/8")
    return text


class IpBlock(Spec):
    """A range of addresses."""

    cidr: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64), AfterValidator(_is_network)
    ] = Field(description="The range as address/bits, for example 10.0.0.0/8.")


class Peer(Spec):
    """The far end of a connection: a range of addresses, or pods chosen by their labels and those of their namespace."""

    ip_block: IpBlock | None = Field(default=None, description="A range of addresses. Not together with selectors.")
    namespace_selector: MatchLabels | None = Field(default=None, description="Pods in namespaces with these labels.")
    pod_selector: MatchLabels | None = Field(
        default=None, description="Pods with these labels, here or in the selected namespaces."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "Peer":
        if (self.ip_block is not None) == (self.namespace_selector is not None or self.pod_selector is not None):
            refuse((), "needs either ipBlock or selectors", "set ipBlock, or namespaceSelector and podSelector")
        return self


class PeerPort(Spec):
    """A port, or a range of ports."""

    protocol: Literal["TCP", "UDP", "SCTP"] = Field(default="TCP", description="The protocol.")
    port: int = Field(ge=1, le=65535, description="The port, or the first of a range.")
    end_port: Port | None = Field(default=None, description="The last port of a range.")

    @model_validator(mode="after")
    def _ordered(self) -> "PeerPort":
        if self.end_port is not None and self.end_port < self.port:
            refuse(("endPort",), "endPort is below port", "raise endPort or remove it")
        return self


class EgressRule(Spec):
    """Connections that pods may open: to any of these peers on any of these ports."""

    to: list[Peer] = Field(default_factory=list, max_length=32, description="The far ends; none means everywhere.")
    ports: list[PeerPort] = Field(default_factory=list, max_length=32, description="The ports; none means all of them.")


class NetworkPolicy(Spec):
    """What the pods may be connected with."""

    enabled: bool = Field(default=True, description="Whether NetworkPolicies are made: only what is named here is allowed then.")
    egress: list[EgressRule] = Field(
        default=[EgressRule(ports=[PeerPort(port=443)])],
        max_length=32,
        description="Connections that pods may open besides DNS and both stores; unless given, TCP 443 to everywhere.",
    )


class Toleration(Spec):
    """A taint of nodes that the pods bear."""

    key: LabelKey | None = Field(default=None, description="The taint's key; without one all taints, which needs Exists.")
    operator: Literal["Equal", "Exists"] = Field(default="Equal", description="Equal compares the value, Exists does not.")
    value: LabelValue | None = Field(default=None, description="The taint's value, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect; without one all effects."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = Field(
        default=None, description="How long NoExecute is borne; without it for ever."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "Toleration":
        if self.key is None and self.operator != "Exists":
            refuse(("operator",), "a toleration without key needs Exists", "set operator: Exists or name the key")
        if self.value is not None and self.operator == "Exists":
            refuse(("value",), "Exists takes no value", "remove the value or use operator: Equal")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            refuse(("tolerationSeconds",), "tolerationSeconds goes with NoExecute only", "remove it or set effect: NoExecute")
        return self


class Affinity(Spec):
    """Rules on which nodes the pods go, as in a pod."""

    node_affinity: dict[str, JsonValue] = Field(default_factory=dict, description="As nodeAffinity of a pod.")
    pod_affinity: dict[str, JsonValue] = Field(default_factory=dict, description="As podAffinity of a pod.")
    pod_anti_affinity: dict[str, JsonValue] = Field(default_factory=dict, description="As podAntiAffinity of a pod.")


class TopologySpread(Spec):
    """How the pods of one component are spread; their own labels are the selector."""

    topology_key: LabelKey = Field(description="The label of nodes that names the place, such as topology.kubernetes.io/zone.")
    max_skew: int = Field(default=1, ge=1, le=100, description="By how many pods two places may differ.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        default="ScheduleAnyway", description="Whether a pod waits where the spread is not possible."
    )


class EnvVar(Spec):
    """An environment variable. Secrets are given by agent.secretRefs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] = Field(
        description="Name of the variable."
    )
    value: str = Field(default="", max_length=4096, description="Its value.")


class ConfigMapVolume(Spec):
    """The keys of a ConfigMap as files."""

    name: ObjectName = Field(description="Name of the ConfigMap.")


class SecretVolume(Spec):
    """The keys of a Secret as files."""

    secret_name: ObjectName = Field(description="Name of the Secret.")


class EmptyDirVolume(Spec):
    """An empty folder that lives as long as the pod."""

    size_limit: Quantity | None = Field(default=None, description="Its largest size; a pod that exceeds it is evicted.")


class ClaimVolume(Spec):
    """A PersistentVolumeClaim, which all pods must be able to mount."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim.")


class Volume(Spec):
    """A volume of the pods, from one source."""

    name: DnsLabel = Field(description="Name that volumeMounts refer to.")
    config_map: ConfigMapVolume | None = Field(default=None, description="The keys of a ConfigMap as files.")
    secret: SecretVolume | None = Field(default=None, description="The keys of a Secret as files.")
    empty_dir: EmptyDirVolume | None = Field(default=None, description="An empty folder that lives as long as the pod.")
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A claim that all pods can mount.")

    @model_validator(mode="after")
    def _one_source(self) -> "Volume":
        if sum(getattr(self, name) is not None for name in VOLUME_SOURCES) != 1:
            refuse((), "a volume has exactly one source", f"set one of {', '.join(map(to_camel, VOLUME_SOURCES))}")
        return self


VOLUME_SOURCES = ("config_map", "secret", "empty_dir", "persistent_volume_claim")


class VolumeMount(Spec):
    """Where a volume is seen in the containers."""

    name: DnsLabel = Field(description="Name of the volume.")
    mount_path: Annotated[str, StringConstraints(pattern=r"^/[!-9;-~]*$", max_length=255)] = Field(description="The folder.")
    sub_path: Annotated[str, StringConstraints(pattern=r"^[!-.0-9;-~][!-9;-~]*$", max_length=255)] | None = Field(
        default=None, description="A path inside the volume to mount instead of its top."
    )
    read_only: bool = Field(default=True, description="Whether containers may only read it.")


class PodTemplate(Spec):
    """What is added to every pod of this AgentRun."""

    labels: Labels = Field(default_factory=dict, description="Labels of the pods.")
    annotations: Annotations = Field(default_factory=dict, description="Annotations of the pods.")
    node_selector: Labels = Field(default_factory=dict, description="Labels that nodes must have.")
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32, description="Taints of nodes that the pods bear.")
    affinity: Affinity = Field(default_factory=Affinity, description="Rules on which nodes the pods go, as in a pod.")
    topology_spread_constraints: Annotated[list[TopologySpread], keyed("topology_key", "when_unsatisfiable")] = Field(
        default_factory=list, max_length=8, description="How the pods of one component are spread."
    )
    env: Annotated[list[EnvVar], keyed("name")] = Field(
        default_factory=list, max_length=64, description="Environment variables of the containers."
    )
    volumes: Annotated[list[Volume], keyed("name")] = Field(
        default_factory=list,
        max_length=32,
        description="Volumes of the pods, for example a ConfigMap of Python modules. A Secret that changes rolls the pods, a ConfigMap "
        "that changes does not.",
    )
    volume_mounts: Annotated[list[VolumeMount], keyed("mount_path")] = Field(
        default_factory=list, max_length=32, description="Where the containers see the volumes."
    )

    @model_validator(mode="after")
    def _leaves_what_is_ours(self) -> "PodTemplate":
        for field in ("labels", "annotations"):
            for key in getattr(self, field):
                if key.startswith(OWN_PREFIXES):
                    refuse((field, key), f"{' and '.join(OWN_PREFIXES)} belong to agentrun", "use another prefix")
        for variable in self.env:
            if variable.name in OWN_VARIABLES or variable.name.startswith(OWN_VARIABLE_PREFIX):
                refuse(("env",), f"{variable.name} belongs to agentrun", "use another name, or the field that sets it")
        for volume in self.volumes:
            if volume.name.startswith(OWN_VOLUME_PREFIX):
                refuse(("volumes",), f"names that begin with {OWN_VOLUME_PREFIX} belong to agentrun", "use another name")
        known = {volume.name for volume in self.volumes}
        for mount in self.volume_mounts:
            if mount.name not in known:
                refuse(("volumeMounts",), f"there is no volume {mount.name}", "add it to podTemplate.volumes")
            if any(mount.mount_path == folder or mount.mount_path.startswith(f"{folder}/") for folder in OWN_FOLDERS):
                refuse(("volumeMounts",), f"{', '.join(OWN_FOLDERS)} belong to agentrun", "mount it somewhere else")
        return self
