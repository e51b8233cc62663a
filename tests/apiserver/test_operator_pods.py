"""Pods that do not come up: what of their status, as a kubelet writes it, becomes the AgentRun's, and how often they are asked for."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kube_client import Document, Kube, set_pod_container
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
