"""Objects of the API server in tests: read, write, and do what a kubelet would do."""

import base64
import contextlib
import json
import ssl
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import httpx2
import yaml
from kube_servers import KubeServer

from agentrun.store.migrations import migrate

Document = dict[str, Any]

PLURALS = {
    "agentruns": "apis/agentrun.dev/v1alpha1",
    "crontasks": "apis/agentrun.dev/v1alpha1",
    "deployments": "apis/apps/v1",
    "replicasets": "apis/apps/v1",
    "jobs": "apis/batch/v1",
    "poddisruptionbudgets": "apis/policy/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "horizontalpodautoscalers": "apis/autoscaling/v2",
    "leases": "apis/coordination.k8s.io/v1",
    "customresourcedefinitions": "apis/apiextensions.k8s.io/v1",
    "roles": "apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "apis/rbac.authorization.k8s.io/v1",
    "clusterroles": "apis/rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "apis/rbac.authorization.k8s.io/v1",
}
"""Where resources are served; what is not here is of the core group."""


class Refused(Exception):
    """The API server said no."""

    def __init__(self, status: int, body: Document) -> None:
        super().__init__(f"{status}: {body.get('message', body)}")
        self.status = status
        self.body = body
        self.message = str(body.get("message", ""))


class Kube:
    """A client of one API server, as its administrator. Namespaces are given with each call; "" is for cluster-wide resources."""

    def __init__(self, server: KubeServer) -> None:
        self.server = server
        self._client = httpx2.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"},
            verify=ssl.create_default_context(cafile=str(server.certificate)),
            timeout=30,
            trust_env=False,
        )

    async def __aenter__(self) -> "Kube":
        return self

    async def __aexit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None) -> None:
        await self._client.aclose()

    async def get(self, plural: str, namespace: str, name: str) -> Document:
        return await self.request("GET", path(plural, namespace, name))

    async def find(self, plural: str, namespace: str, name: str) -> Document | None:
        """The object, None if there is none."""
        try:
            return await self.get(plural, namespace, name)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    async def list(self, plural: str, namespace: str, *, labels: str = "") -> list[Document]:
        found = await self.request("GET", path(plural, namespace), query={"labelSelector": labels} if labels else None)
        return list(found["items"])

    async def everything(self, namespace: str) -> Mapping[str, Sequence[Document]]:
        """All objects of a namespace, of whatever kind is served, by plural. Kinds without objects are left out."""
        groups = (await self.request("GET", "/apis"))["groups"]
        found: defaultdict[str, Any] = defaultdict(list)
        for version in ("api/v1", *(f"apis/{group['preferredVersion']['groupVersion']}" for group in groups)):
            for kind in (await self.request("GET", f"/{version}"))["resources"]:
                if kind["namespaced"] and "list" in kind["verbs"]:
                    objects = await self.request("GET", f"/{version}/namespaces/{namespace}/{kind['name']}")
                    found[kind["name"]] += objects["items"]
        return {plural: objects for plural, objects in found.items() if objects}

    async def create(self, plural: str, namespace: str, body: Mapping[str, Any]) -> Document:
        """Unknown fields are refused, as kubectl does it."""
        return await self.request("POST", path(plural, namespace), body=body, query={"fieldValidation": "Strict"})

    async def apply(
        self, plural: str, namespace: str, body: Mapping[str, Any], *, manager: str = "test", force: bool = True
    ) -> Document:
        """Server-side apply; apiVersion and kind must be in the body."""
        name = body["metadata"]["name"]
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        return await self.request("PATCH", path(plural, namespace, name), body=body, query=query, form="apply-patch+yaml")

    async def patch(self, plural: str, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str = "") -> Document:
        """A merge patch."""
        return await self.request("PATCH", path(plural, namespace, name, subresource), body=body, form="merge-patch+json")

    async def replace(
        self, plural: str, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str = ""
    ) -> Document:
        return await self.request("PUT", path(plural, namespace, name, subresource), body=body)

    async def delete(self, plural: str, namespace: str, name: str) -> None:
        """Nothing if it is not there. What it owns is collected if the controllers run."""
        try:
            await self.request("DELETE", path(plural, namespace, name), query={"propagationPolicy": "Background"})
        except Refused as refused:
            if refused.status != 404:
                raise

    async def history(self, plural: str, namespace: str, *, since: int) -> Sequence[Document]:
        """Every state that the objects have had after a revision, as a watch tells it, up to what there is now."""
        now = [one["metadata"]["resourceVersion"] for one in await self.list(plural, namespace)]
        left = {version for version in now if int(version) > since}
        query = {"watch": "true", "resourceVersion": str(since), "timeoutSeconds": "60"}
        told: list[Document] = []
        if not left:
            return told
        async with self._client.stream("GET", path(plural, namespace), params=query) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                told.append(json.loads(line)["object"])
                left.discard(told[-1]["metadata"].get("resourceVersion", ""))
                if not left:
                    return told
        raise AssertionError(f"the watch of {plural} since {since} ended without {left}")

    async def secret(self, namespace: str, name: str, **values: str) -> Document:
        """A Secret with these keys, made or changed."""
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
        return await self.apply("secrets", namespace, body)

    async def store_secrets(self, namespace: str, *, database_url: str, redis_url: str, database: str = "database") -> None:
        """The Secrets that `agent_run` names; `database` is the name of the first."""
        await self.secret(namespace, database, url=database_url)
        await self.secret(namespace, "redis", url=redis_url)
        await self.secret(namespace, "api-keys", **{"api-keys": "{}"})

    async def condition(self, namespace: str, name: str, kind: str, *, plural: str = "agentruns") -> Document | None:
        """A condition of an object, None if it has none of that type."""
        found = await self.find(plural, namespace, name)
        conditions = ((found or {}).get("status") or {}).get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), None)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        form: str = "json",
    ) -> Document:
        """Any request. Raises Refused for every status from 400 on."""
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": f"application/{form}"} if body is not None else {}
        answer = await self._client.request(method, path, content=content, params=dict(query or {}), headers=headers)
        if answer.status_code >= 400:
            try:
                refused = answer.json()
            except ValueError:
                refused = {"message": answer.text}
            raise Refused(answer.status_code, refused)
        document: Document = answer.json()
        return document


def path(plural: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """`/apis/apps/v1/namespaces/x/deployments/y/status`."""
    pieces = [PLURALS.get(plural, "api/v1"), *(["namespaces", namespace] if namespace else []), plural, name, subresource]
    return "/" + "/".join(piece for piece in pieces if piece)


def agent_run(name: str = "support", **spec: Any) -> Document:
    """A small AgentRun whose stores are in the secrets `database` and `redis`; `spec` replaces whole members."""
    return {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "AgentRun",
        "metadata": {"name": name},
        "spec": {
            "agent": {"model": "demo:chat"},
            "image": "agentrun:test",
            "database": {"secretRef": {"name": "database"}},
            "redis": {"secretRef": {"name": "redis"}},
            "gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}},
            **spec,
        },
    }


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


async def comes_up(kube: Kube, namespace: str, name: str) -> bool:
    """Plays the kubelet once; whether the AgentRun is Ready, as it is now."""
    await play_kubelet(kube, namespace, migrates=True)
    found = await kube.get("agentruns", namespace, name)
    ready = await kube.condition(namespace, name, "Ready")
    return ready is not None and (ready["status"], ready["observedGeneration"]) == ("True", found["metadata"]["generation"])


async def play_kubelet(
    kube: Kube,
    namespace: str,
    *,
    name: str | None = None,
    ready: int | None = None,
    jobs: Literal["Complete", "Failed"] | None = "Complete",
    migrates: bool = False,
) -> None:
    """One look at the namespace, as controllers and kubelets would do it: Deployments come up, unfinished Jobs end as `jobs`.

    name    only the Deployment or Job of this name
    ready   how many replicas are ready; None means all of them
    jobs    None leaves Jobs alone
    migrates  Jobs that are completed do what `agentrun migrate` does in their pods, with the database in their Secret
    Where the deployment controller runs, its pods are made ready and it says the rest itself. What goes meanwhile is left out.
    """
    for deployment in await kube.list("deployments", namespace):
        if name in (None, deployment["metadata"]["name"]) and REVISION not in deployment["metadata"].get("annotations", {}):
            with _may_be_gone():
                await set_deployment_status(kube, deployment, ready=ready)
    for pod in await kube.list("pods", namespace):
        if "deletionTimestamp" not in pod["metadata"] and not _is_ready(pod):
            with _may_be_gone():
                await set_pod_ready(kube, pod)
    for job in await kube.list("jobs", namespace) if jobs else []:
        finished = any(one["status"] == "True" for one in job.get("status", {}).get("conditions") or [])
        if jobs and not finished and name in (None, job["metadata"]["name"]):
            with _may_be_gone():
                if migrates and jobs == "Complete":
                    await run_migration(kube, job)
                await set_job_status(kube, job, jobs)


@contextlib.contextmanager
def _may_be_gone() -> Iterator[None]:
    """Controllers delete what was listed a moment ago."""
    try:
        yield
    except Refused as refused:
        if refused.status != 404:
            raise


REVISION = "deployment.kubernetes.io/revision"


async def set_deployment_status(kube: Kube, deployment: Document, *, ready: int | None = None) -> Document:
    """The status of a Deployment whose wanted pods exist and of which `ready` are ready (None: all)."""
    wanted = deployment["spec"]["replicas"]
    up = wanted if ready is None else min(ready, wanted)
    available = up >= wanted
    said = [
        ("Available", available, "MinimumReplicasAvailable" if available else "MinimumReplicasUnavailable"),
        ("Progressing", True, "NewReplicaSetAvailable" if available else "ReplicaSetUpdated"),
    ]
    status = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": wanted,
        "updatedReplicas": wanted,
        "readyReplicas": up,
        "availableReplicas": up,
        "unavailableReplicas": wanted - up,
        "conditions": [_condition(kind, true, reason) for kind, true, reason in said],
    }
    return await _status(kube, "deployments", deployment, status)


async def set_job_status(kube: Kube, job: Document, outcome: Literal["Complete", "Failed"]) -> Document:
    """The status of a Job that has ended."""
    now, count = _now(), {"Complete": {"succeeded": 1}, "Failed": {"failed": 1}}[outcome]
    before, reason = {
        "Complete": ("SuccessCriteriaMet", "CompletionsReached"),
        "Failed": ("FailureTarget", "BackoffLimitExceeded"),
    }[outcome]
    status = {
        "startTime": job.get("status", {}).get("startTime", now),
        "active": 0,
        **({"completionTime": now} if outcome == "Complete" else {}),
        **count,
        "ready": 0,
        "terminating": 0,
        "uncountedTerminatedPods": {},
        "conditions": [_condition(before, True, reason), _condition(outcome, True, reason)],
    }
    return await _status(kube, "jobs", job, status)


async def run_migration(kube: Kube, job: Document) -> None:
    """What the pod of a migration Job does."""
    namespace = job["metadata"]["namespace"]
    env = {one["name"]: one for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    ref = env["DATABASE_URL"]["valueFrom"]["secretKeyRef"]
    secret = await kube.get("secrets", namespace, ref["name"])
    url = base64.b64decode(secret["data"][ref["key"]]).decode()
    owner = f"{env['AGENTRUN_NAMESPACE']['value']}/{env['AGENTRUN_NAME']['value']}"
    await migrate(url, owner=owner, say=lambda _: None)


async def set_pod_ready(kube: Kube, pod: Document) -> Document:
    """The status of a pod that runs and is ready."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    running = {"running": {"startedAt": _now()}}
    status = {
        "phase": "Running",
        "conditions": [_condition(kind, True, "") for kind in ("Initialized", "ContainersReady", "Ready", "PodScheduled")],
        "containerStatuses": [
            {"name": name, "ready": True, "restartCount": 0, "image": "x", "imageID": "x", "state": running} for name in names
        ],
    }
    return await _status(kube, "pods", pod, status)


async def set_pod_container(
    kube: Kube, pod: Document, *, last: Mapping[str, Any] | None = None, restarts: int = 0, **state: Mapping[str, Any]
) -> Document:
    """The status of a pod on a node whose one container is not ready: its `state` (waiting, running, terminated) and the one before."""
    container = pod["spec"]["containers"][0]
    status = {
        "phase": "Pending" if "waiting" in state and not restarts else "Running",
        "conditions": [
            *(_condition(kind, True, "") for kind in ("Initialized", "PodScheduled")),
            *(_condition(kind, False, "ContainersNotReady") for kind in ("ContainersReady", "Ready")),
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": False,
                "restartCount": restarts,
                "state": state,
                "lastState": dict(last or {}),
            }
        ],
    }
    return await _status(kube, "pods", pod, status)


async def _status(kube: Kube, plural: str, document: Document, status: Document) -> Document:
    where = document["metadata"]
    return await kube.patch(plural, where["namespace"], where["name"], {"status": status}, subresource="status")


def _condition(kind: str, true: bool, reason: str) -> Document:
    return {"type": kind, "status": "True" if true else "False", "reason": reason, "message": "", "lastTransitionTime": _now()}


def _is_ready(pod: Document) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod.get("status", {}).get("conditions") or [])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
