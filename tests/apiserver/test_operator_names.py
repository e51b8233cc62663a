"""Names that others have: what is not ours is never touched, whatever the operator last saw, and finding out costs few requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kube_client import Document, Kube, agent_run
from kube_servers import KubeServer

from agentrun.telemetry import REGISTRY
from agentrun_operator import kube as operator_kube
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import NOTHING_SPENT, QueueFact, SchemaFact, SpendingFact
from agentrun_operator.observe import Observer
from agentrun_operator.reconcile import ReconcileAgentRun
from agentrun_operator.resources import AGENTRUNS, CHILDREN, CHILDREN_SELECTOR, Key
from agentrun_operator.situation import Defaults


class Stores:
    """Everything is there and ours."""

    async def schema(self, key: Key, _url: str) -> SchemaFact | None:
        return SchemaFact(required=2, present=2, oldest_accepted=1, owner=str(key))

    async def queue(self, _key: Key, _url: str) -> QueueFact | None:
        return QueueFact()

    def spending(self, url: str) -> SpendingFact:
        return NOTHING_SPENT

    def invalidate(self, url: str) -> None:
        pass


class Cluster:
    """One namespace. `look` tells the operator how things are; what happens after it, it does not know."""

    def __init__(self, kube: Kube, api: operator_kube.Kube, namespace: str) -> None:
        self.kube, self.api, self.namespace = kube, api, namespace
        self.cache = ObjectCache()
        defaults = Defaults("agentrun:own")
        observer = Observer(api, self.cache, Stores(), defaults=defaults, scaling=lambda _key: None)
        self._run = ReconcileAgentRun(api, self.cache, observer, defaults=defaults)

    async def create(self, name: str) -> None:
        body = agent_run(name, database={"secretRef": {"name": "database"}, "migrations": "Verify"})
        self.cache.put(AGENTRUNS, await self.kube.create("agentruns", self.namespace, body))

    async def look(self) -> None:
        for resource in CHILDREN:
            found = await self.api.list(resource, namespace=self.namespace, labels=CHILDREN_SELECTOR)
            self.cache.replace_all(resource, found.items)

    async def reconcile(self, name: str) -> None:
        await self._run(Key(self.namespace, name))

    async def says(self, name: str, kind: str) -> str:
        found = await self.kube.condition(self.namespace, name, kind)
        return f"{found['status']} {found['reason']}" if found else ""

    async def versions(self) -> dict[str, str]:
        found = {}
        for resource in CHILDREN:
            for body in (await self.api.list(resource, namespace=self.namespace)).items:
                found[f"{resource}/{body['metadata']['name']}"] = body["metadata"]["resourceVersion"]
        return found

    async def foreign(self, plural: str, name: str, **more: Any) -> Document:
        labels = {"app": "theirs"}
        kinds: dict[str, Document] = {
            "deployments": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "spec": {
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x"}]}},
                },
            },
            "services": {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 1}], "selector": labels}},
        }
        return await self.kube.create(plural, self.namespace, {**kinds[plural], "metadata": {"name": name, **more}})


@pytest.fixture
async def cluster(kube: Kube, namespace: str, crds_applied: KubeServer) -> AsyncIterator[Cluster]:
    await kube.store_secrets(namespace, database_url="postgresql://u:p@db:5432/x", redis_url="redis://redis:6379/0")
    api = await operator_kube.Kube.connect([crds_applied.kubeconfig])
    yield Cluster(kube, api, namespace)
    await api.aclose()


@pytest.mark.parametrize(("plural", "name"), [("deployments", "second-worker"), ("services", "second-gateway")])
async def test_what_somebody_makes_under_our_name_in_the_last_moment_is_not_touched(
    cluster: Cluster, plural: str, name: str
) -> None:
    await cluster.create("first")
    await cluster.reconcile("first")  # from here on the names of others are known, for a few seconds
    await cluster.create("second")
    made = await cluster.foreign(plural, name)
    await cluster.reconcile("second")
    assert await cluster.kube.get(plural, cluster.namespace, name) == made
    assert await cluster.says("second", "Accepted") == "False NameTaken"

    await cluster.kube.delete(plural, cluster.namespace, name)
    await cluster.look()
    await cluster.reconcile("second")
    assert await cluster.says("second", "Accepted") == "True Accepted"
    found = await cluster.kube.get(plural, cluster.namespace, name)
    assert [owner["name"] for owner in found["metadata"]["ownerReferences"]] == ["second"]


@pytest.mark.parametrize("labels", [{}, {"app.kubernetes.io/managed-by": "agentrun-operator"}], ids=["bare", "with our label"])
async def test_a_foreign_object_in_the_place_of_a_lost_child_is_not_touched(cluster: Cluster, labels: dict[str, str]) -> None:
    await cluster.create("first")
    await cluster.reconcile("first")
    await cluster.look()
    await cluster.kube.delete("deployments", cluster.namespace, "first-worker")
    made = await cluster.foreign("deployments", "first-worker", labels=labels)
    await cluster.kube.patch("agentruns", cluster.namespace, "first", {"spec": {"image": "agentrun:2"}})
    cluster.cache.put(AGENTRUNS, await cluster.kube.get("agentruns", cluster.namespace, "first"))
    await cluster.reconcile("first")
    assert await cluster.kube.get("deployments", cluster.namespace, "first-worker") == made
    assert await cluster.says("first", "Accepted") == "False NameTaken"
    await cluster.look()
    await cluster.reconcile("first")
    assert await cluster.kube.get("deployments", cluster.namespace, "first-worker") == made
    assert await cluster.says("first", "Accepted") == "False NameTaken"


async def test_a_child_that_vanished_unseen_is_made_again(cluster: Cluster) -> None:
    await cluster.create("first")
    await cluster.reconcile("first")
    await cluster.look()
    await cluster.kube.delete("deployments", cluster.namespace, "first-gateway")
    await cluster.kube.patch("agentruns", cluster.namespace, "first", {"spec": {"image": "agentrun:2"}})
    cluster.cache.put(AGENTRUNS, await cluster.kube.get("agentruns", cluster.namespace, "first"))
    await cluster.reconcile("first")
    found = await cluster.kube.get("deployments", cluster.namespace, "first-gateway")
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == "agentrun:2"


async def test_children_that_were_not_seen_yet_are_known_as_ours(cluster: Cluster) -> None:
    await cluster.create("first")
    await cluster.reconcile("first")
    await cluster.look()
    before = await cluster.versions()
    successor = Cluster(cluster.kube, cluster.api, cluster.namespace)
    successor.cache.put(AGENTRUNS, await cluster.kube.get("agentruns", cluster.namespace, "first"))
    await successor.reconcile("first")
    assert await successor.says("first", "Accepted") == "True Accepted"
    after = await cluster.versions()
    # A first apply after the scaler's changes the order of the managers, no more.
    assert {name for name in after if after[name] != before[name]} <= {"deployments.apps/first-worker"}


async def test_new_agent_runs_of_a_namespace_share_what_is_asked_about_its_names(cluster: Cluster) -> None:
    names = [f"agent-{number}" for number in range(12)]
    for name in names:
        await cluster.create(name)
    before = _gets()
    await asyncio.gather(*(cluster.reconcile(name) for name in names))
    secrets, itself = 3 * len(names), len(names)  # with a child missing, an AgentRun might be gone: it is asked for
    assert {await cluster.says(name, "Accepted") for name in names} == {"True Accepted"}
    assert _gets() - before == secrets + itself + len({resource for resource in CHILDREN if resource.plural != "jobs"})


def _gets() -> float:
    return sum(
        REGISTRY.get_sample_value("agentrun_operator_api_requests_total", {"method": "GET", "status": status}) or 0.0
        for status in ("200", "404")
    )
