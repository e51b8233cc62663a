"""Pods that do not come up: what of their status, as a kubelet writes it, becomes the AgentRun's, and how often they are asked for."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kube_client import Document, Kube, set_pod_container, set_pod_ready
from kube_front import KubeFront, kube_front
from kube_servers import KubeServer
from operator_cluster import PARTS, Cluster
from waiting import eventually

from agentrun_operator import kube as operator_kube

pytestmark = pytest.mark.usefixtures("workload_controllers")
NO_IMAGE = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}


@pytest.fixture
async def front(crds_applied: KubeServer, tmp_path: Path) -> AsyncIterator[KubeFront]:
    async with kube_front(crds_applied, tmp_path) as front:
        yield front


@pytest.fixture
async def cluster(front: KubeFront, kube: Kube, namespace: str) -> AsyncIterator[Cluster]:
    """Behind the front, with an AgentRun whose first pods have been made, and are not ready."""
    api = await operator_kube.Kube.connect([front.kubeconfig])
    found = Cluster(kube, api, namespace)
    await found.secrets()
    await found.create(workers={"minReplicas": 1})
    await found.migrate()
    await found.reconcile()
    await eventually(lambda: _each_has_a_pod(found), within=60, what="the pods are made")
    yield found
    await api.aclose()


async def _each_has_a_pod(cluster: Cluster) -> bool:
    for part in PARTS:
        status = (await cluster.deployment(part)).get("status", {})
        if not await pods(cluster, part) or not status.get("unavailableReplicas"):
            return False
    return True


async def pods(cluster: Cluster, part: str) -> list[Document]:
    return await cluster.kube.list("pods", cluster.namespace, labels=f"app.kubernetes.io/component={part}")


async def say(cluster: Cluster, part: str, **state: Any) -> None:
    """All pods of a component say this."""
    for pod in await pods(cluster, part):
        await set_pod_container(cluster.kube, pod, **state)


async def looks(cluster: Cluster, front: KubeFront, *, within: float) -> list[float]:
    """Reconciles whenever that was asked for. At how many seconds the pods were asked for."""
    asked, passed = [], 0.0
    while passed < within:
        before = len(front.requests)
        again = await cluster.reconcile()
        asked += [passed] * front.requests[before:].count(f"GET /api/v1/namespaces/{cluster.namespace}/pods")
        assert again is not None, "pods are not watched, so somebody has to look"
        cluster.later += timedelta(seconds=again)
        passed += again
    return asked


async def test_pods_that_never_start_are_asked_for_less_and_less_often_and_new_troubles_soon(
    cluster: Cluster, front: KubeFront
) -> None:
    await say(cluster, "gateway", waiting=NO_IMAGE)
    first_hour = await looks(cluster, front, within=3600)
    assert 5 <= sum(at < 120 for at in first_hour) <= 12, first_hour
    assert len(first_hour) < 40, first_hour
    before = await cluster.versions()
    second_hour = await looks(cluster, front, within=3600)
    assert len(second_hour) <= 12, second_hour
    assert await cluster.versions() == before, "nothing was written"

    await say(cluster, "gateway", waiting={"reason": "InvalidImageName", "message": "x"})
    again = await looks(cluster, front, within=60)
    assert len(again) >= 4, again
    assert "is no name of an image" in await cluster.message("GatewayAvailable")


async def says(cluster: Cluster, kind: str, words: str) -> None:
    """After a reconcile the condition has these words, and a second reconcile writes nothing."""
    await cluster.reconcile()
    assert words in await cluster.message(kind), await cluster.message(kind)
    before = await cluster.versions()
    assert await cluster.reconcile() is not None, "and it is looked at again"
    assert await cluster.versions() == before


@pytest.mark.parametrize(("part", "kind"), [("gateway", "GatewayAvailable"), ("worker", "WorkersAvailable")])
async def test_a_crash_is_told_once_and_also_when_it_comes_after_available_was_false(
    cluster: Cluster, part: str, kind: str
) -> None:
    await says(cluster, kind, "starts")
    cluster.later += timedelta(seconds=180)
    await cluster.reconcile()
    assert await cluster.says(kind) == "False Unavailable"

    ended = {"terminated": {"exitCode": 3, "reason": "Error"}}
    await say(cluster, part, restarts=4, last=ended, waiting={"reason": "CrashLoopBackOff", "message": "back-off 40s"})
    await says(cluster, kind, "its container ends soon after each start, with exit code 3; kubectl logs --previous")
    before = await cluster.versions()
    await say(cluster, part, restarts=5, **ended)
    await cluster.reconcile()
    await say(cluster, part, restarts=6, last=ended, waiting={"reason": "CrashLoopBackOff", "message": "back-off 1m20s"})
    await cluster.reconcile()
    after = await cluster.versions()
    assert after["agentruns/support"] == before["agentruns/support"], "each phase is the same news"

    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    await say(cluster, part, restarts=7, last=killed, waiting={"reason": "CrashLoopBackOff", "message": "back-off 2m40s"})
    await says(cluster, kind, f"(OOMKilled); raise spec.{'workers' if part == 'worker' else part}.resources.limits")


async def test_a_scheduler_that_crashes_is_told_where_ready_says_that_it_is_away(cluster: Cluster) -> None:
    for part in ("gateway", "worker"):
        for pod in await pods(cluster, part):
            await set_pod_ready(cluster.kube, pod)
    ended = {"terminated": {"exitCode": 2, "reason": "Error"}}
    await say(cluster, "scheduler", restarts=1, last=ended, waiting={"reason": "CrashLoopBackOff", "message": "back-off 10s"})

    async def is_told() -> bool:
        await cluster.reconcile()
        return "with exit code 2" in await cluster.message("Ready")

    await eventually(is_told, within=30, what="Ready tells of the scheduler")
    assert await cluster.says("GatewayAvailable") == "True Available"


async def test_messages_with_ids_that_change_each_time_are_written_once(cluster: Cluster) -> None:
    message = 'failed to reserve container name "worker_x_{}": name "worker_x_{}" is reserved for "{}"'
    versions = set()
    for number, container in enumerate(("ab12" * 16, "cd34" * 16, "ef56" * 16)):
        waits = {"reason": "CreateContainerError", "message": message.format(number, number, container)}
        await say(cluster, "worker", waiting=waits)
        await cluster.reconcile()
        versions.add((await cluster.versions())["agentruns/support"])
    assert len(versions) == 1
    assert "failed to reserve container name" in await cluster.message("WorkersAvailable")


async def test_the_present_template_is_meant_and_not_the_former_one(cluster: Cluster) -> None:
    await say(cluster, "gateway", waiting={"reason": "CreateContainerConfigError", "message": "of the former one"})
    await says(cluster, "GatewayAvailable", "of the former one")
    former = {pod["metadata"]["name"] for pod in await pods(cluster, "gateway")}
    await cluster.edit({"podTemplate": {"env": [{"name": "A", "value": "b"}]}})
    await cluster.reconcile()

    async def new() -> list[Document]:
        return [pod for pod in await pods(cluster, "gateway") if pod["metadata"]["name"] not in former]

    await eventually(new, within=60, what="pods of the new template are made")
    await cluster.reconcile()
    assert former & {pod["metadata"]["name"] for pod in await pods(cluster, "gateway")}, "and the former ones are still there"
    assert "of the former one" not in await cluster.message("GatewayAvailable")
    for pod in await new():
        await set_pod_container(
            cluster.kube, pod, waiting={"reason": "CreateContainerConfigError", "message": "of the present one"}
        )
    await says(cluster, "GatewayAvailable", "of the present one")


async def test_a_quota_that_refuses_pods_is_passed_on_and_forgotten_when_it_is_gone(cluster: Cluster) -> None:
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "1"}},
    }
    await cluster.kube.create("resourcequotas", cluster.namespace, quota)
    full = {"status": {"hard": {"pods": "1"}, "used": {"pods": "1"}}}
    await cluster.kube.patch("resourcequotas", cluster.namespace, "small", full, subresource="status")
    for pod in await pods(cluster, "worker"):
        await cluster.kube.delete("pods", cluster.namespace, pod["metadata"]["name"])

    async def is_refused() -> bool:
        await cluster.reconcile()
        return "exceeded quota: small" in await cluster.message("WorkersAvailable")

    await eventually(is_refused, within=60, what="the quota is named")
    await says(cluster, "WorkersAvailable", "its pods are refused (pods is forbidden: exceeded quota: small, requested: pods=1")
    await cluster.kube.delete("resourcequotas", cluster.namespace, "small")

    async def is_forgotten() -> bool:
        await cluster.reconcile()
        return "quota" not in await cluster.message("WorkersAvailable")

    await eventually(is_forgotten, within=120, what="the quota is forgotten")


def job_pod(job: Document) -> Document:
    """As the controller of Jobs makes it."""
    template, name = job["spec"]["template"], job["metadata"]["name"]
    labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
    metadata = {"name": f"{name}-x", "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


async def migrating(cluster: Cluster, name: str) -> Document:
    """A new AgentRun's Job; its pod has not been made."""
    cluster.stores.has(0)
    await cluster.create(name, image="nope:1")
    await cluster.reconcile(name)
    (job,) = [one for one in await cluster.kube.list("jobs", cluster.namespace) if one["metadata"]["name"].startswith(f"{name}-")]
    status = {"status": {"active": 1, "ready": 0}}
    return await cluster.kube.patch("jobs", cluster.namespace, job["metadata"]["name"], status, subresource="status")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"containerStatuses": [{"state": {"waiting": NO_IMAGE}}]}, "the image nope:1 cannot be pulled"),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes are available: 2 Too many pods."}
                ]
            },
            "no node has room for its pods (Too many pods)",
        ),
    ],
)
async def test_a_migration_whose_pod_cannot_start_says_why_at_once_and_until_it_runs(
    cluster: Cluster, status: Document, said: str
) -> None:
    job = await migrating(cluster, "other")
    pod = await cluster.kube.create("pods", cluster.namespace, job_pod(job))
    await set_pod_container(cluster.kube, pod, waiting={"reason": "ContainerCreating"})
    for container in status.get("containerStatuses", ()):
        await set_pod_container(cluster.kube, pod, **container["state"])
    if "conditions" in status:
        conditions = [{"status": "False", **one} for one in status["conditions"]]
        await cluster.kube.patch(
            "pods", cluster.namespace, pod["metadata"]["name"], {"status": {"conditions": conditions}}, subresource="status"
        )
    for later in (0, 400, 86_400):
        cluster.later += timedelta(seconds=later)
        assert await cluster.reconcile("other") is not None
        assert await cluster.says("Ready", "other") == "Unknown Migrating"
        assert said in await cluster.message("Ready", "other")
        assert await cluster.kube.find("jobs", cluster.namespace, job["metadata"]["name"]), "it has no deadline"
    await cluster.kube.patch(
        "jobs", cluster.namespace, job["metadata"]["name"], {"status": {"active": 1, "ready": 1}}, subresource="status"
    )
    await set_pod_ready(cluster.kube, pod)
    await cluster.reconcile("other")
    assert "brings the schema up to date" in await cluster.message("Ready", "other")


async def test_a_migration_of_which_no_pod_is_made_says_so_after_five_minutes(cluster: Cluster) -> None:
    job = await migrating(cluster, "other")
    cluster.later += timedelta(seconds=200)
    assert await cluster.reconcile("other") is not None
    assert "brings the schema up to date" in await cluster.message("SchemaReady", "other")
    cluster.later += timedelta(seconds=101)
    await cluster.reconcile("other")
    name = job["metadata"]["name"]
    assert f"the pod of the Job {name} has not started for minutes" in await cluster.message("Ready", "other")
    assert f"job/{name}" in await cluster.message("Ready", "other")
