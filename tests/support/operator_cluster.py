"""One namespace of a real API server, reconciled on demand by observe, plan and apply. What the stores say is the test's."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kube_client import Document, Kube, agent_run, play_kubelet

from agentrun_operator import kube as operator_kube
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import QueueFact, ScalingFact, SchemaFact, SpendingFact
from agentrun_operator.observe import Observer
from agentrun_operator.reconcile import ReconcileAgentRun
from agentrun_operator.resources import AGENTRUNS, CHILDREN, Key
from agentrun_operator.situation import Defaults

KINDS = ("deployments", "jobs", "services", "configmaps", "poddisruptionbudgets", "networkpolicies")
PARTS = ("gateway", "worker", "scheduler")


class Stores:
    """What probes would say; a database with a schema is reserved for whoever asks, unless `fact` names an owner."""

    def __init__(self) -> None:
        self.fact: SchemaFact | None = SchemaFact(required=2, present=2, oldest_accepted=1)
        self.queue_fact: QueueFact | None = QueueFact()
        self.urls: set[str] = set()
        self.reserved = True
        self.spending_fact = SpendingFact()

    def has(self, present: int, *, required: int = 2, oldest_accepted: int = 1) -> None:
        self.fact = SchemaFact(required=required, present=present, oldest_accepted=oldest_accepted)

    async def schema(self, key: Key, url: str) -> SchemaFact | None:
        self.urls.add(url)
        if self.fact is None or not self.fact.present or not self.reserved:
            return self.fact
        return replace(self.fact, owner=self.fact.owner or str(key))

    async def queue(self, _key: Key, url: str) -> QueueFact | None:
        self.urls.add(url)
        return self.queue_fact

    def spending(self, url: str) -> SpendingFact:
        return self.spending_fact

    def invalidate(self, url: str) -> None:
        pass


class Cluster:
    """One namespace, reconciled on demand by an operator that has just listed everything."""

    def __init__(self, kube: Kube, api: operator_kube.Kube, namespace: str) -> None:
        self.kube, self.api, self.namespace = kube, api, namespace
        self.stores = Stores()
        self.scaling: ScalingFact | None = None
        self.later = timedelta()
        """By how much the operator's clock is ahead of the API server's."""
        self.restart()

    def restart(self) -> None:
        """A new operator process: it knows nothing."""
        self.cache = ObjectCache()
        defaults = Defaults("agentrun:own")
        observer = Observer(self.api, self.cache, self.stores, defaults=defaults, scaling=lambda _key: self.scaling)
        self.run = ReconcileAgentRun(
            self.api, self.cache, observer, defaults=defaults, clock=lambda: datetime.now(UTC) + self.later
        )

    async def secrets(self) -> None:
        await self.kube.store_secrets(self.namespace, database_url="postgresql://u:p@db:5432/x", redis_url="redis://redis:6379/0")

    async def create(self, name: str = "support", **spec: Any) -> Document:
        return await self.kube.create("agentruns", self.namespace, agent_run(name, **spec))

    async def edit(self, spec: Document, name: str = "support") -> Document:
        return await self.kube.patch("agentruns", self.namespace, name, {"spec": spec})

    async def look(self) -> None:
        """What watches and resync do."""
        for resource in (AGENTRUNS, *CHILDREN):
            found = await self.api.list(resource, namespace=self.namespace)
            ours = found.items if resource == AGENTRUNS else [item for item in found.items if _is_labelled(item)]
            self.cache.replace_all(resource, ours)

    async def reconcile(self, name: str = "support") -> float | None:
        await self.look()
        return await self.run(Key(self.namespace, name))

    async def migrate(self, name: str = "support") -> None:
        """The migration that comes before a roll-out of a new image has been, and nothing else."""
        await self.reconcile(name)
        await play_kubelet(self.kube, self.namespace)
        assert await self.kube.list("jobs", self.namespace) != []

    async def settle(self, name: str = "support") -> None:
        """Reconciles and does what a kubelet does, until it is Ready."""
        for _ in range(6):
            await self.reconcile(name)
            await play_kubelet(self.kube, self.namespace)
            if await self.says("Ready", name) == "True Ready":
                break
        await self.reconcile(name)
        assert await self.says("Ready", name) == "True Ready", await self.kube.condition(self.namespace, name, "Ready")

    async def says(self, kind: str, name: str = "support") -> str:
        found = await self.kube.condition(self.namespace, name, kind)
        return f"{found['status']} {found['reason']}" if found else ""

    async def message(self, kind: str, name: str = "support") -> str:
        found = await self.kube.condition(self.namespace, name, kind)
        return str(found["message"]) if found else ""

    async def deployment(self, part: str, name: str = "support") -> Document:
        return await self.kube.get("deployments", self.namespace, f"{name}-{part}")

    async def config(self, part: str) -> str:
        """The ConfigMap that the pods mount."""
        volumes = (await self.deployment(part))["spec"]["template"]["spec"]["volumes"]
        return next(str(volume["configMap"]["name"]) for volume in volumes if volume["name"] == "agentrun-config")

    async def image(self, part: str) -> str:
        return str((await self.deployment(part))["spec"]["template"]["spec"]["containers"][0]["image"])

    async def objects(self) -> dict[str, Document]:
        """Everything of ours in the namespace."""
        found = {}
        for plural in ("agentruns", *KINDS):
            for body in await self.kube.list(plural, self.namespace):
                if plural == "agentruns" or _is_labelled(body):
                    found[f"{plural}/{body['metadata']['name']}"] = body
        return found

    async def versions(self) -> dict[str, str]:
        return {name: body["metadata"]["resourceVersion"] for name, body in (await self.objects()).items()}

    async def revision(self) -> int:
        """The server's revision now. Tests may compare revisions; the product never does."""
        found = await self.kube.request("GET", f"/apis/apps/v1/namespaces/{self.namespace}/deployments")
        return int(found["metadata"]["resourceVersion"])

    async def history(self, since: int) -> list[tuple[int, Document]]:
        """Every state that Deployments have had since a revision."""
        found = await self.kube.history("deployments", self.namespace, since=since)
        return [(int(body["metadata"]["resourceVersion"]), body) for body in found]

    async def events(self) -> list[str]:
        found = await self.kube.list("events", self.namespace)
        return sorted(event["reason"] for event in found if event["source"].get("component") == "agentrun-operator")


def _is_labelled(body: Document) -> bool:
    return (body["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == "agentrun-operator"
