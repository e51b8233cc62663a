"""The kinds of objects that the operator deals with, and how one of them is named. Pure."""

from dataclasses import dataclass
from urllib.parse import quote

AGENTRUN_LABEL = "agentrun.dev/agentrun"
"""On every child: the name of its AgentRun."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "agentrun-operator"
CHILDREN_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
"""Children are listed and watched with this selector, so that the API server sends nothing else."""


@dataclass(frozen=True, slots=True, order=True)
class Resource:
    """A kind as the API server's paths spell it. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, *, subresource: str | None = None) -> str:
        """The URL path of one object, or of the collection in a namespace (None: of all namespaces)."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An AgentRun (or a CronTask): what the work queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """One object. `namespace` is empty for kinds without namespaces."""

    resource: Resource
    namespace: str
    name: str

    def path(self, *, subresource: str | None = None) -> str:
        return self.resource.path(self.namespace, self.name, subresource=subresource)

    def __str__(self) -> str:
        return f"{self.resource.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.resource.kind} {self.name}"


AGENTRUNS = Resource("agentrun.dev", "v1alpha1", "agentruns", "AgentRun")
CRONTASKS = Resource("agentrun.dev", "v1alpha1", "crontasks", "CronTask")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
JOBS = Resource("batch", "v1", "jobs", "Job")
SERVICES = Resource("", "v1", "services", "Service")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
PDBS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORKPOLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
PODS = Resource("", "v1", "pods", "Pod")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("", "v1", "events", "Event")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)

OURS = (AGENTRUNS, CRONTASKS)
CHILDREN = (DEPLOYMENTS, JOBS, SERVICES, CONFIGMAPS, PDBS, NETWORKPOLICIES)
"""Kinds that the operator makes: watched and listed by CHILDREN_SELECTOR."""
WATCHED = OURS + CHILDREN
OPTIONAL = (CRONTASKS,)
"""Kinds without which the rest goes on. They are watched apart from it, as soon as they are served."""
