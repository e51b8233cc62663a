"""The tier's own tools: what is played for pods and jobs is what the API server and kubectl understand."""

from collections.abc import Callable
from typing import Any

from kube_client import REVISION, Kube, play_kubelet
from waiting import eventually

POD = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}
JOB = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": POD}}
LABELS = {"app": "w"}
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "w"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "c", "image": "x"}]}},
    },
}


async def test_jobs_end_and_deployments_come_up_as_played(namespace: str, kube: Kube, kubectl: Callable[..., str]) -> None:
    for name in ("good", "bad"):
        await kube.create("jobs", namespace, {**JOB, "metadata": {"name": name}})
    await kube.create("deployments", namespace, DEPLOYMENT)

    await play_kubelet(kube, namespace, name="bad", jobs="Failed")
    await play_kubelet(kube, namespace, ready=1)
    assert (await kube.get("deployments", namespace, "w"))["status"]["readyReplicas"] == 1
    await play_kubelet(kube, namespace)

    for wait in ("job/good --for=condition=Complete", "job/bad --for=condition=Failed", "deploy/w --for=condition=Available"):
        kubectl("wait", "-n", namespace, "--timeout=30s", *wait.split())
    assert "successfully rolled out" in kubectl("rollout", "status", "-n", namespace, "deploy/w", "--timeout=30s")


async def test_with_the_workload_controllers_pods_are_made_and_become_ready(
    namespace: str, kube: Kube, workload_controllers: None
) -> None:
    await kube.create("deployments", namespace, DEPLOYMENT)

    async def up() -> bool:
        await play_kubelet(kube, namespace)
        found: dict[str, Any] = await kube.get("deployments", namespace, "w")
        return REVISION in found["metadata"].get("annotations", {}) and found["status"].get("readyReplicas") == 2

    await eventually(up, within=60, what="two pods are ready")
    assert len(await kube.list("pods", namespace, labels="app=w")) == 2


async def test_what_an_owner_leaves_is_collected(namespace: str, kube: Kube) -> None:
    owner = await kube.secret(namespace, "owner", a="b")
    reference = {"apiVersion": "v1", "kind": "Secret", "name": "owner", "uid": owner["metadata"]["uid"], "controller": True}
    owned = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [reference]}}
    await kube.create("configmaps", namespace, owned)

    await kube.delete("secrets", namespace, "owner")

    async def gone() -> bool:
        return await kube.find("configmaps", namespace, "owned") is None

    await eventually(gone, within=60, what="the owned object is collected")
