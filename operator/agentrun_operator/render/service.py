"""The gateway's Service."""

from typing import Any

from agentrun.manifests import AgentRun
from agentrun_operator.render.labels import new_object, selector
from agentrun_operator.render.names import Component, component
from agentrun_operator.resources import SERVICES, Key


def service(key: Key, manifest: AgentRun, *, uid: str) -> dict[str, Any]:
    """The Service in front of all gateways."""
    wanted = manifest.spec.gateway.service
    ref = component(key, Component.GATEWAY, resource=SERVICES)
    body = new_object(ref, key.name, uid=uid, component=Component.GATEWAY, annotations=wanted.annotations)
    body["spec"] = {
        "type": wanted.type,
        "selector": selector(key.name, Component.GATEWAY),
        "ports": [{"name": "http", "port": wanted.port, "protocol": "TCP", "targetPort": "http"}],
    }
    return body


def url(key: Key, manifest: AgentRun) -> str:
    """Where the gateway is reached inside the cluster."""
    port = manifest.spec.gateway.service.port
    return f"http://{component(key, Component.GATEWAY).name}.{key.namespace}.svc" + ("" if port == 80 else f":{port}")
