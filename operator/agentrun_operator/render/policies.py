"""PodDisruptionBudgets and NetworkPolicies. What a policy does not name is refused for the pods that it selects."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from agentrun.manifests import AgentRun
from agentrun_operator.render.labels import new_object, selector
from agentrun_operator.render.names import Component, component
from agentrun_operator.render.pods import GATEWAY_PORT, HEALTH_PORT, plain
from agentrun_operator.resources import NETWORKPOLICIES, PDBS, Key

POSTGRES_PORT = 5432
REDIS_PORT = 6379

Json = dict[str, Any]


def disruption_budget(key: Key, part: Component, *, uid: str) -> Json:
    """One pod of a component at a time may be evicted."""
    body = new_object(component(key, part, resource=PDBS), key.name, uid=uid, component=part)
    body["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": selector(key.name, part)}}
    return body


def network_policy(key: Key, manifest: AgentRun, part: Component, *, uid: str, store_ports: Sequence[int]) -> Json:
    """In: HTTP, or health and metrics. Out: DNS, the stores, and what spec.networkPolicy.egress adds (not for the migration)."""
    listens = {Component.GATEWAY: GATEWAY_PORT, Component.MIGRATE: None}.get(part, HEALTH_PORT)
    further = [] if part is Component.MIGRATE else manifest.spec.network_policy.egress
    body = new_object(component(key, part, resource=NETWORKPOLICIES), key.name, uid=uid, component=part)
    body["spec"] = {
        "podSelector": {"matchLabels": selector(key.name, part)},
        "policyTypes": ["Ingress", "Egress"],
        **({"ingress": [{"ports": [_tcp(listens)]}]} if listens else {}),
        "egress": [
            {"ports": [{"protocol": "UDP", "port": 53}, _tcp(53)]},
            {"ports": [_tcp(port) for port in sorted(set(store_ports))]},
            *(_egress(rule) for rule in plain(further)),
        ],
    }
    return body


def _egress(rule: Json) -> Json:
    """A rule of the spec without empty members: the API server drops them, so that every apply would be a change."""
    peers = [
        {name: {kind: value for kind, value in chosen.items() if value} for name, chosen in peer.items()}
        for peer in rule.get("to", ())
    ]
    return {name: value for name, value in (("to", peers), ("ports", rule.get("ports"))) if value}


def ports_of(url: str, *, default: int) -> list[int]:
    """The ports of all hosts of a URL; a host without one has the default, and so has what is no URL.

    libpq allows several hosts, separated by commas.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return [default]
    hosts = parts.netloc.rpartition("@")[2]
    return sorted({*(_port(host, default) for host in hosts.split(",")), *_named(parts.query)})


def _port(host: str, default: int) -> int:
    """`host`, `host:port`, `[::1]:port`."""
    _, separator, port = host.rpartition("]")[2].rpartition(":")
    return int(port) if separator and port.isascii() and port.isdigit() and 0 < int(port) < 65536 else default


def _named(query: str) -> list[int]:
    """Ports given as ?port=5433, which libpq reads too."""
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [
        int(value)
        for name, _, value in pairs
        if name == "port" and value.isascii() and value.isdigit() and 0 < int(value) < 65536
    ]


def _tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}
