"""The names of an AgentRun's objects. No other module builds one.

A Service's name is a DNS label (RFC 1035): at most 63 characters, no dots, a letter first. What does not fit is cut and gets a digest of
the whole name, so that two long names that differ only at their ends stay apart. https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
"""

import re
from enum import StrEnum

from agentrun_operator.digests import digest
from agentrun_operator.resources import CONFIGMAPS, DEPLOYMENTS, NETWORKPOLICIES, PDBS, SERVICES, Key, Ref, Resource

LONGEST = 63
_HASH = 8


class Component(StrEnum):
    """The parts of an AgentRun that run as pods."""

    GATEWAY = "gateway"
    WORKER = "worker"
    SCHEDULER = "scheduler"
    MIGRATE = "migrate"


SERVING = (Component.GATEWAY, Component.WORKER, Component.SCHEDULER)
"""The components that are Deployments."""


def name_of(agent_run: str, suffix: str) -> str:
    """`<agent_run>-<suffix>` as a DNS label, distinct for distinct arguments."""
    whole = f"{agent_run}-{suffix}"
    label = re.sub(r"[^a-z0-9-]", "-", agent_run.lower()).strip("-")
    if label == agent_run and len(whole) <= LONGEST and label[:1].isalpha():
        return whole
    if not label[:1].isalpha():
        label = f"a-{label}" if label else "a"
    tail = f"-{digest(whole, length=_HASH)}-{suffix}"
    return label[: LONGEST - len(tail)].rstrip("-") + tail


def instance_of(agent_run: str) -> str:
    """The AgentRun's name as a label value (at most 63 characters)."""
    if len(agent_run) <= LONGEST:
        return agent_run
    return f"{agent_run[: LONGEST - _HASH - 1].rstrip('-._')}-{digest(agent_run, length=_HASH)}"


def component(key: Key, part: Component, *, resource: Resource = DEPLOYMENTS) -> Ref:
    """A component's Deployment, Service, PodDisruptionBudget or NetworkPolicy: they all have its name."""
    return Ref(resource, key.namespace, name_of(key.name, part))


def config(key: Key, *, fingerprint: str) -> Ref:
    """The ConfigMap with a manifest of that fingerprint."""
    return Ref(CONFIGMAPS, key.namespace, name_of(key.name, f"config-{fingerprint}"))


def migration(key: Key, *, fingerprint: str) -> str:
    """The name of the migration Job for a fingerprint of image, schema and secret."""
    return name_of(key.name, f"migrate-{fingerprint}")


def fixed(key: Key) -> frozenset[Ref]:
    """All objects whose name depends on the AgentRun's name alone."""
    return frozenset(
        {
            component(key, Component.GATEWAY, resource=SERVICES),
            *(component(key, part) for part in SERVING),
            *(component(key, part, resource=NETWORKPOLICIES) for part in Component),
            *(component(key, part, resource=PDBS) for part in (Component.GATEWAY, Component.WORKER)),
        }
    )
