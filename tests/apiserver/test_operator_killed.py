"""SIGKILL of the operator's process after each of the writes that bring up an AgentRun; a fresh process goes on from there."""

import asyncio
import contextlib
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from kube_client import Document, Kube, agent_run, play_kubelet
from kube_servers import KubeServer
from store_servers import Databases
from waiting import eventually

KINDS = ("deployments", "services", "configmaps", "jobs", "poddisruptionbudgets", "networkpolicies")
TOGETHER = 3
"""AgentRuns that are brought up at the same time, each by an operator of its own."""
MOST = 60


class Life:
    """One AgentRun in a namespace of its own, from its creation to Ready."""

    def __init__(self, kube: Kube, namespace: str, start: Any) -> None:
        self.kube = kube
        self.namespace = namespace
        self._start = start

    async def operator(self, lease: str, *, failpoints: str = "") -> Any:
        """With a Lease of its own: that of the killed one need not run out."""
        environment = {"AGENTRUN_OPERATOR_LEASE": lease}
        return await self._start(self.namespace, environment=environment, failpoints=failpoints, ready=False)

    async def is_ready(self) -> bool:
        await play_kubelet(self.kube, self.namespace, migrates=True)
        ready = await self.kube.condition(self.namespace, "a", "Ready")
        return ready is not None and ready["status"] == "True"

    async def objects(self) -> list[tuple[str, Document]]:
        """With their kinds in the plural."""
        mine = "app.kubernetes.io/managed-by=agentrun-operator"
        return [(kind, one) for kind in KINDS for one in await self.kube.list(kind, self.namespace, labels=mine)]

    async def shape(self) -> Counter[str]:
        """How many objects there are of each kind and name; names without the hash at their end."""
        hashed = re.compile(r"(?<=-config|migrate)-\w+$")
        return Counter(f"{kind}/{hashed.sub('', one['metadata']['name'])}" for kind, one in await self.objects())


@contextlib.asynccontextmanager
async def life(kube: Kube, databases: Databases, redis_url: str, start: Any) -> AsyncIterator[Life]:
    namespace = f"t-{uuid.uuid4().hex[:10]}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    async with databases.migrated() as url:
        await kube.store_secrets(namespace, database_url=url, redis_url=redis_url)
        await kube.create("agentruns", namespace, agent_run("a", workers={"minReplicas": 2}))
        yield Life(kube, namespace, start)
        await kube.delete("namespaces", "", namespace)


async def test_an_operator_that_is_killed_after_any_of_its_first_writes_leaves_the_rest_to_the_next(
    operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    places = asyncio.Semaphore(TOGETHER)
    async with life(kube, databases, redis_url, operator_process) as undisturbed:
        process = await undisturbed.operator("one")
        await eventually(undisturbed.is_ready, within=180, what="the undisturbed one is Ready")  # waits for the fork server
        expected = await undisturbed.shape()
        process.kill()

    async def killed_after(number: int) -> bool:
        """Whether there were as many writes until it was Ready."""
        async with places, life(kube, databases, redis_url, operator_process) as one:
            first = await one.operator("one", failpoints=f"operator.kube.written=kill@{number}")

            async def is_over() -> bool:
                return first.returncode is not None or await one.is_ready()

            await eventually(is_over, within=60, what=f"it is killed after write {number}, or Ready")
            if first.returncode is None:
                first.kill()
                return False
            assert first.returncode == -9, first.log_tail()
            before = {body["metadata"]["uid"] for _, body in await one.objects()}

            second = await one.operator("two")
            await eventually(one.is_ready, within=60, what=f"the next one makes it Ready after write {number}")
            assert await one.shape() == expected, f"after write {number}"
            found = await one.objects()
            assert before <= {body["metadata"]["uid"] for _, body in found}, "what was made is kept"
            (worker,) = [body for kind, body in found if kind == "deployments" and body["metadata"]["name"] == "a-worker"]
            assert worker["spec"]["replicas"] == 2
            assert "agentrun.dev/creating" not in worker["metadata"].get("annotations", {})
            assert second.returncode is None
            second.kill()
            return True

    deaths, more = 0, True
    while more:
        assert deaths < MOST, "it never comes to an end"
        killed = await asyncio.gather(*(killed_after(deaths + number) for number in range(1, TOGETHER + 1)))
        deaths, more = deaths + sum(killed), all(killed)
    assert deaths > len(expected), "each object is a write at least"
