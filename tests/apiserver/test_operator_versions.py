"""CRDs of another version than the operator's: an upgrade applies one of them first, and until the other follows everything goes on."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import yaml
from kube_client import Document, Kube, Refused, agent_run
from kube_servers import CRDS, KubeServer
from operator_cluster import PARTS, Cluster
from store_servers import short_folder
from waiting import eventually

from agentrun_operator import kube as operator_kube
from agentrun_operator.crontasks import CronTasks
from agentrun_operator.resources import CRONTASKS, Key, Ref

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def versions_server() -> Iterator[KubeServer]:
    """An API server of this file, whose CRDs change."""
    with short_folder() as folder:
        server = KubeServer(folder)
        try:
            server.start_now()
            server.apply_crds()
            yield server
        finally:
            server.discard()


@pytest.fixture
async def admin(versions_server: KubeServer) -> AsyncIterator[Kube]:
    async with Kube(versions_server) as client:
        yield client


@pytest.fixture
async def cluster(admin: Kube, versions_server: KubeServer, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    namespace = request.node.name.replace("_", "-")[:60].rstrip("-")
    await admin.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    api = await operator_kube.Kube.connect([versions_server.kubeconfig])
    found = Cluster(admin, api, namespace)
    await found.secrets()
    yield found
    await api.aclose()


async def change_crd(admin: Kube, plural: str, change: Change, *, probe: Document, holds: Callable[[Any], bool]) -> None:
    """Changes the schema as it is in the repository, and waits until a dry run of `probe` shows it."""
    crd = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())
    change(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"])
    await asyncio.to_thread(admin.server.kubectl, "replace", "-f", "-", stdin=yaml.safe_dump(crd))

    async def shows() -> bool:
        path = f"/apis/agentrun.dev/v1alpha1/namespaces/default/{plural}"
        try:
            await admin.list(plural, "default")  # for a moment after the change there are no lists
            return holds(await admin.request("POST", path, body=probe, query={"dryRun": "All"}))
        except Refused:
            return False

    await eventually(shows, within=30, what=f"the changed CRD of {plural} is in use")


def newer(properties: dict[str, Any]) -> None:
    """A version with new members, which every object has from then on."""
    spec = properties["spec"]["properties"]
    spec["archive"] = {
        "type": "object",
        "default": {"days": 30},
        "properties": {"days": {"type": "integer"}},
    }
    if "workers" in spec:
        spec["workers"]["properties"]["warmSeconds"] = {"type": "integer", "default": 5}


def older(properties: dict[str, Any]) -> None:
    """A version before the columns of `kubectl get`."""
    status = properties["status"]["properties"]
    for member in ("workers", "schema", "lastOutcome", "nextScheduleTime", "nextScheduleTimes", "recentSlots"):
        status.pop(member, None)


def cron_task(name: str) -> Document:
    return {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {"name": name},
        "spec": {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "input": "hello"},
    }


async def test_crds_newer_than_the_operator(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    before = {part: await cluster.deployment(part) for part in PARTS}
    await change_crd(cluster.kube, "agentruns", newer, probe=agent_run("probe"), holds=lambda made: "archive" in made["spec"])
    found = await cluster.kube.get("agentruns", cluster.namespace, "support")
    assert (found["spec"]["archive"], found["spec"]["workers"]["warmSeconds"]) == ({"days": 30}, 5)

    cluster.restart()  # defaults make no new version of an object, so that only a new process sees them at once
    await cluster.reconcile()
    assert await cluster.says("Ready") == "True Ready"
    assert await cluster.says("Accepted") == "True Accepted"
    said = await cluster.message("Accepted")
    assert "does not know spec." in said and "spec.archive" in said and "spec.workers.warmSeconds" in said
    assert "upgrade the operator" in said
    assert await cluster.says("Stalled") == ""
    for part in PARTS:
        assert (await cluster.deployment(part))["metadata"]["generation"] == before[part]["metadata"]["generation"]

    await cluster.edit({"image": "agentrun:2", "archive": {"days": 3}, "workers": {"retries": 7}})
    await cluster.settle()
    assert await cluster.image("worker") == "agentrun:2"
    config = await cluster.kube.get("configmaps", cluster.namespace, await cluster.config("worker"))
    assert "retries: 7" in config["data"]["agentrun.yaml"]
    assert not {"archive", "warmSeconds"} & set(config["data"]["agentrun.yaml"].replace(":", " ").split())


async def test_a_cron_task_of_newer_crds_is_judged_by_what_is_known(cluster: Cluster) -> None:
    await change_crd(cluster.kube, "crontasks", newer, probe=cron_task("probe"), holds=lambda made: "archive" in made["spec"])
    await cluster.create()
    await cluster.kube.create("crontasks", cluster.namespace, cron_task("nightly"))
    await cluster.look()
    cluster.cache.put(CRONTASKS, await cluster.kube.get("crontasks", cluster.namespace, "nightly"))
    tasks = CronTasks(cluster.api, cluster.cache, target_of=lambda _key: None)
    await tasks.reconcile(Key(cluster.namespace, "nightly"))
    found = cluster.cache.get(Ref(CRONTASKS, cluster.namespace, "nightly"))
    assert found is not None and found["spec"]["archive"] == {"days": 30}
    (condition,) = found["status"]["conditions"]
    assert condition["reason"] == "Pending", "it waits for the database, and is not invalid"


async def test_crds_older_than_the_operator(cluster: Cluster) -> None:
    probe = {**agent_run("probe"), "status": {"workers": {"replicas": 1}}}
    await change_crd(cluster.kube, "agentruns", older, probe=probe, holds=lambda made: "archive" not in made["spec"])

    async def is_old() -> bool:
        crd = await cluster.kube.get("customresourcedefinitions", "", "agentruns.agentrun.dev")
        return "workers" not in _status_of(crd)

    await eventually(is_old, within=30, what="the status has no workers")
    await cluster.create()
    await cluster.settle()
    assert await cluster.says("WorkersAvailable") == "True ScaledToZero"
    status = (await cluster.kube.get("agentruns", cluster.namespace, "support"))["status"]
    assert status["observedGeneration"] == 1
    assert "workers" not in status
    accepted = await cluster.message("Accepted")
    assert "the CRDs are older than this operator" in accepted and "apply the CRDs" in accepted
    before = await cluster.versions()
    await cluster.reconcile()
    assert await cluster.versions() == before, "what cannot be written is not tried in other words each time"

    await change_crd(cluster.kube, "agentruns", lambda _properties: None, probe=probe, holds=lambda _made: True)

    async def whole() -> bool:
        await cluster.reconcile()
        found = (await cluster.kube.get("agentruns", cluster.namespace, "support"))["status"]
        return found.get("workers", {}).get("summary") == "0/0"

    await eventually(whole, within=30, what="the status is whole with the CRDs of this version")
    assert await cluster.message("Accepted") == "the spec can be used"


def _status_of(crd: Document) -> Document:
    schema = copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return dict(schema["properties"]["status"]["properties"])
