"""Fixtures of the API server tier; the whole tier is skipped, with the reason, on a machine that has no API server.

api_server          the session's server: .url .token .kubeconfig .kubectl(*args, stdin=None) .kubeconfig_of("operator")
crds_applied        the same server with both CRDs, and with the controllers that collect what a deleted owner leaves
namespace           a fresh namespace of this test alone (applies the CRDs)
kube                a Kube client of the session's server: get find list create apply patch replace delete secret condition
kubectl             api_server.kubectl
collected           collects, when the test is over, what an operator inside this process has left
cluster             reconciles AgentRuns of this test's namespace step by step, against the session's server
workload_controllers  the deployment and replica set controllers run during this test, so Deployments get pods
private_api_server  an API server of this test alone: await .stop() .start() .kill() .pause() .resume() .compact(), .apply_crds()
operator_process    starts `agentrun operator`; its log is shown when the test fails
"""

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from kube_client import Kube
from kube_servers import ADMIN, WORKLOADS, KubeServer, why_not
from operator_cluster import Cluster
from operator_running import collect_what_kopf_left
from processes import ProductProcess, ProductProcesses, clean_environment, free_port
from product_launch import FORKS
from store_servers import short_folder

from agentrun_operator import kube as operator_kube

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def api_server() -> Iterator[KubeServer]:
    with short_folder() as folder:
        server = KubeServer(folder)
        try:
            server.start_now()
            yield server
        finally:
            server.discard()


@pytest.fixture(scope="session")
def crds_applied(api_server: KubeServer) -> KubeServer:
    api_server.apply_crds()
    # After the CRDs: the collector looks for new kinds of owners only every 30 seconds.
    api_server.start_controllers()
    return api_server


@pytest.fixture
async def kube(api_server: KubeServer) -> AsyncIterator[Kube]:
    async with Kube(api_server) as client:
        yield client


@pytest.fixture
def kubectl(api_server: KubeServer) -> Callable[..., str]:
    return api_server.kubectl


@pytest.fixture
async def namespace(crds_applied: KubeServer, kube: Kube) -> AsyncIterator[str]:
    name = f"t-{uuid.uuid4().hex[:10]}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    await kube.delete("namespaces", "", name)


@pytest.fixture
async def cluster(kube: Kube, namespace: str, crds_applied: KubeServer) -> AsyncIterator[Cluster]:
    api = await operator_kube.Kube.connect([crds_applied.kubeconfig])
    found = Cluster(kube, api, namespace)
    await found.secrets()
    yield found
    await api.aclose()


@pytest.fixture
def collected() -> Iterator[None]:
    yield
    collect_what_kopf_left()


@pytest.fixture
def workload_controllers(crds_applied: KubeServer) -> Iterator[None]:
    stop = crds_applied.start_controllers(WORKLOADS)
    yield
    stop()


@pytest.fixture
async def private_api_server() -> AsyncIterator[KubeServer]:
    with short_folder() as folder:
        server = KubeServer(folder)
        try:
            await server.start()
            yield server
        finally:
            server.discard()


class StartsOperator(Protocol):
    """Starts one operator. `server` is the session's unless given; `namespaces` "" means all; `user` ADMIN or OPERATOR.

    ready=False returns at once; `await process.ready()` later.
    """

    def __call__(
        self,
        namespaces: str,
        *,
        server: KubeServer | None = None,
        environment: Mapping[str, str] | None = None,
        failpoints: str = "",
        user: str = ADMIN,
        pod_namespace: str | None = None,
        ready: bool = True,
    ) -> Awaitable[ProductProcess]: ...


@pytest.fixture
def operator_process(product_processes: ProductProcesses, tmp_path: Path, request: pytest.FixtureRequest) -> StartsOperator:
    async def start(
        namespaces: str,
        *,
        server: KubeServer | None = None,
        environment: Mapping[str, str] | None = None,
        failpoints: str = "",
        user: str = ADMIN,
        pod_namespace: str | None = None,
        ready: bool = True,
    ) -> ProductProcess:
        if server is None:
            server = request.getfixturevalue("crds_applied")
        port, name = free_port(), f"operator-{len(product_processes.started)}"
        settings = {
            **clean_environment(),
            "KUBECONFIG": str(server.kubeconfig_of(user)),
            "POD_NAME": name,
            "POD_NAMESPACE": pod_namespace or namespaces.partition(",")[0] or "default",
            "AGENTRUN_OPERATOR_NAMESPACES": namespaces,
            "AGENTRUN_OPERATOR_IMAGE": "agentrun:test",
            "AGENTRUN_OPERATOR_HEALTH_PORT": str(port),
            **({"AGENTRUN_FAILPOINTS": failpoints} if failpoints else {}),
            **(environment or {}),
        }
        command = ["agentrun", "operator"] if FORKS else [sys.executable, "-m", "agentrun", "operator"]
        process = ProductProcess(name, command, settings, port, tmp_path / f"{name}.log")
        product_processes.started.append(process)
        if ready:
            await process.ready(within=180)  # the first one waits for the fork server's imports
        return process

    return start
