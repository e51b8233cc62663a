"""AgentRuns for scenarios: secrets, code and the object itself, in a namespace of their own."""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrun.domain import keys
from harness.kubectl import Document

CODE = Path(__file__).parents[1] / "agents"
PROVIDER = Path(__file__).parents[2] / "tests" / "support" / "fake_provider.py"
PROVIDER_PORT = 8080
SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}}
"""Many pods have room on one small node."""
CONTAINER: Document = {
    "imagePullPolicy": "IfNotPresent",
    "resources": SMALL,
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True},
}
POD: Document = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
    "terminationGracePeriodSeconds": 1,
}
"""What the `restricted` standard asks of pods that are not the product's."""


def namespace(name: str) -> Document:
    """A namespace in which only pods of the `restricted` standard may run."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def secret(name: str, values: Mapping[str, str]) -> Document:
    """A Secret by its values."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


@dataclass(frozen=True)
class Credentials:
    """The Secrets that an AgentRun needs, and the key of user `tester`, which may do everything."""

    api_key: str
    documents: Sequence[Document]


def credentials(database_url: str, redis_url: str) -> Credentials:
    """Secrets under the names that an AgentRun looks for."""
    key, record = keys.generate(os.urandom(keys.RANDOM_BYTES), user="tester", scopes=keys.Scope, created=datetime.now(UTC))
    documents = [
        secret("database", {"url": database_url}),
        secret("redis", {"url": redis_url}),
        secret("api-keys", {"api-keys": keys.record_line(record)}),
    ]
    return Credentials(key, documents)


def code() -> Document:
    """A ConfigMap with the modules of e2e/agents, for pods that mount it as /agents."""
    modules = {path.name: path.read_text() for path in sorted(CODE.glob("*.py"))}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "agents"}, "data": modules}


def agent_run(name: str, agent: Mapping[str, Any], **spec: Any) -> Document:
    """An AgentRun with the code of e2e/agents and the provider of this namespace. `spec` is laid over what is here."""
    whole = {
        "agent": agent,
        "database": {"secretRef": {"name": "database", "key": "url"}},
        "redis": {"secretRef": {"name": "redis", "key": "url"}},
        "gateway": {"auth": {"keysSecretRef": {"name": "api-keys", "key": "api-keys"}}, "resources": SMALL},
        "workers": {"resources": SMALL},
        "networkPolicy": {"egress": [{"ports": [{"port": PROVIDER_PORT}]}]},
        "podTemplate": {
            "env": [
                {"name": "PYTHONPATH", "value": "/agents"},
                {"name": "OPENAI_BASE_URL", "value": f"http://provider:{PROVIDER_PORT}/v1"},
                {"name": "OPENAI_API_KEY", "value": "none"},
            ],
            "volumes": [{"name": "agents", "configMap": {"name": "agents"}}],
            "volumeMounts": [{"name": "agents", "mountPath": "/agents", "readOnly": True}],
        },
    }
    for key, value in spec.items():
        whole[key] = {**whole[key], **value} if isinstance(whole.get(key), dict) and isinstance(value, Mapping) else value
    return {"apiVersion": "agentrun.dev/v1alpha1", "kind": "AgentRun", "metadata": {"name": name}, "spec": whole}


def cron_task(name: str, agent_run: str) -> Document:
    """A CronTask that fires each minute."""
    spec = {"agentRunRef": {"name": agent_run}, "schedule": "* * * * *", "input": "0.1"}
    return {"apiVersion": "agentrun.dev/v1alpha1", "kind": "CronTask", "metadata": {"name": name}, "spec": spec}


def pod(name: str, image: str, command: Sequence[str], *, env: Sequence[Document] = ()) -> Document:
    """A pod of the `restricted` standard that is nobody's, and runs a command once."""
    container = {**CONTAINER, "name": "main", "image": image, "command": list(command), "env": list(env)}
    spec = {**POD, "restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def provider(image: str) -> list[Document]:
    """An OpenAI-compatible server as a pod: it answers what the message tells it to, and counts."""
    labels = {"app": "provider"}
    container = {
        **CONTAINER,
        "name": "provider",
        "image": image,
        "command": ["python", "/provider/fake_provider.py", "--host", "0.0.0.0", "--port", str(PROVIDER_PORT)],
        "ports": [{"containerPort": PROVIDER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/counts", "port": PROVIDER_PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "code", "mountPath": "/provider", "readOnly": True}],
    }
    pod = {**POD, "containers": [container], "volumes": [{"name": "code", "configMap": {"name": "provider"}}]}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "provider"},
            "data": {PROVIDER.name: PROVIDER.read_text()},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "provider"},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "provider"},
            "spec": {"selector": labels, "ports": [{"port": PROVIDER_PORT}]},
        },
    ]
