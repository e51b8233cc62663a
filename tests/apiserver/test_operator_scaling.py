"""The operator as a process, with real stores and a real API server: workers follow the work. Where pods matter, the controllers that
make and delete them run, and the test says that they are ready.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest
from kube_client import Document, Kube, Refused, agent_run, play_kubelet
from processes import ProductProcess
from redis.asyncio import Redis
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.store import cron_tasks
from agentrun.store.pool import create_pool

COST = "controller.kubernetes.io/pod-deletion-cost"
QUICK = {"targetPerWorker": 1, "cooldownSeconds": 0, "scaleDownStabilizationSeconds": 0}


@dataclass
class Shop:
    """One namespace with AgentRuns, their queues, and an operator."""

    kube: Kube
    namespace: str
    redis: Redis
    redis_url: str
    database_url: str
    streams: dict[str, WorkStream] = field(default_factory=dict)

    async def agent(self, name: str = "support", *, redis_url: str | None = None, **spec: Any) -> None:
        """An AgentRun whose worker Deployment is there and counted as up."""
        await self.kube.secret(self.namespace, "database", url=self.database_url)
        await self.kube.secret(self.namespace, "redis", url=redis_url or self.redis_url)
        await self.kube.secret(self.namespace, "api-keys", **{"api-keys": "{}"})
        await self.kube.create("agentruns", self.namespace, agent_run(name, **spec))

        async def is_there() -> bool:
            await self.kubelet()
            return await self.replicas(name) is not None

        await eventually(is_there, within=30, what=f"the workers of {name} have a Deployment")
        await eventually(lambda: self.says("ScalingActive", name), within=10, what="the scaler has looked at it")

    async def kubelet(self) -> None:
        """Pods and Deployments come up as they would."""
        await play_kubelet(self.kube, self.namespace)

    async def worker(self, name: str = "support") -> Document:
        return await self.kube.get("deployments", self.namespace, f"{name}-worker")

    async def replicas(self, name: str = "support") -> int | None:
        found = await self.kube.find("deployments", self.namespace, f"{name}-worker")
        return int(found["spec"]["replicas"]) if found and "agentrun.dev/creating" not in _annotations(found) else None

    async def has(self, count: int, name: str = "support", *, within: float = 10.0) -> None:
        async def is_so() -> bool:
            await self.kubelet()
            return await self.replicas(name) == count

        await eventually(is_so, within=within, what=f"{name} has {count} workers")

    async def stays(self, count: int, name: str = "support", *, seconds: float = 5.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.kubelet()
            assert await self.replicas(name) == count
            await asyncio.sleep(0.1)

    async def says(self, kind: str, name: str = "support") -> str:
        found = await self.kube.condition(self.namespace, name, kind)
        return f"{found['status']} {found['reason']}" if found and found["reason"] != "Pending" else ""

    async def stream(self, name: str = "support") -> WorkStream:
        if name not in self.streams:
            self.streams[name] = WorkStream(self.redis, Keys(self.namespace, name))
        return self.streams[name]

    async def publish(self, count: int = 1, name: str = "support") -> None:
        await (await self.stream(name)).publish([uuid4() for _ in range(count)])

    async def take(self, consumer: str, count: int = 1, name: str = "support") -> list[Held]:
        """A worker of that consumer name reads entries and works on them."""
        taken = await (await self.stream(name)).read(consumer, count=count, block_ms=0)
        assert len(taken) == count
        return [Held(one.run_id, one.entry_id) for one in taken]

    async def finish(self, held: list[Held], name: str = "support") -> None:
        await (await self.stream(name)).acknowledge(held)

    async def pods(self) -> list[Document]:
        labels = "app.kubernetes.io/component=worker"
        found = await self.kube.list("pods", self.namespace, labels=labels)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def _annotations(body: Document) -> dict[str, str]:
    return body["metadata"].get("annotations") or {}


@pytest.fixture
async def shop(kube: Kube, namespace: str, redis_url: str, database_url: str) -> AsyncIterator[Shop]:
    redis = await connect(redis_url)
    made = Shop(kube, namespace, redis, redis_url, database_url)
    yield made
    for stream in made.streams.values():
        await stream.aclose()
    await redis.aclose()


@pytest.fixture
async def operator(shop: Shop, operator_process: Any) -> ProductProcess:
    return await operator_process(shop.namespace)


async def test_sc_01_a_published_run_at_zero_raises_the_replicas_within_half_a_second(
    shop: Shop, operator: ProductProcess, workload_controllers: None
) -> None:
    await shop.agent(scaling=QUICK)
    await shop.has(0)
    delays = []
    for _ in range(20):
        begun = time.monotonic()
        await shop.publish()
        while await shop.replicas() == 0:
            assert time.monotonic() - begun < 5
            await asyncio.sleep(0.01)
        delays.append(time.monotonic() - begun)
        await shop.finish(await shop.take("support-worker-gone-00000000"))
        await shop.has(0)
    print(f"replicas raised after: median {statistics.median(delays):.3f} s, longest {max(delays):.3f} s")
    assert statistics.median(delays) <= 0.5
    assert max(delays) <= 3


async def test_with_the_wake_message_lost_the_tick_raises_them(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent()
    await shop.has(0)
    begun = time.monotonic()
    await shop.redis.xadd(Keys(shop.namespace, "support").runs, {"run": str(uuid4())})
    while await shop.replicas() == 0:
        assert time.monotonic() - begun < 3
        await asyncio.sleep(0.01)


async def test_sc_02_waiting_work_scales_in_one_step_and_work_in_progress_holds(
    shop: Shop, operator: ProductProcess, workload_controllers: None
) -> None:
    await shop.agent(scaling=QUICK)
    before = (await shop.worker())["metadata"]["generation"]
    await shop.publish(8)
    await shop.has(8)
    assert (await shop.worker())["metadata"]["generation"] == before + 1, "from zero to eight in one step"
    held = await shop.take("support-worker-x-1-00000001", 4)
    await shop.finish(await shop.take("support-worker-x-2-00000002", 4))
    await shop.has(4)
    await shop.stays(4)
    await shop.finish(held)
    await shop.has(0)


async def test_sc_03_a_missing_stream_is_made_and_means_the_minimum(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent("busy", scaling=QUICK)
    await shop.publish(3, "busy")
    await shop.has(3, "busy")
    await shop.agent("new", workers={"minReplicas": 2})
    await shop.has(2, "new")
    groups = await shop.redis.xinfo_groups(Keys(shop.namespace, "new").runs)
    assert [group["name"] for group in groups] == [GROUP.encode()]
    await shop.stays(3, "busy", seconds=3)


async def test_sc_05_a_scale_in_takes_idle_pods_and_no_cost_stays(
    shop: Shop, operator: ProductProcess, workload_controllers: None
) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(5)
    await shop.has(5)
    await eventually(lambda: _ready(shop, 5), within=20, what="five pods are ready")
    busy = [pod["metadata"]["name"] for pod in await shop.pods()][2:4]
    held = [one for name in busy for one in await shop.take(f"{name}-1a2b3c4d")]
    await shop.finish(await shop.take("support-worker-gone-00000000", 3))
    await shop.has(2)

    async def only_the_busy_are_left() -> bool:
        return sorted(pod["metadata"]["name"] for pod in await shop.pods()) == sorted(busy)

    await eventually(only_the_busy_are_left, within=10, what="the idle pods are gone and the busy ones are not")

    async def no_costs() -> bool:
        await shop.kubelet()
        return all(COST not in _annotations(pod) for pod in await shop.pods())

    await eventually(no_costs, within=10, what="the costs are taken away")
    await shop.finish(held)
    await shop.has(0)


@pytest.mark.parametrize("step", ["costs", "written"])
async def test_sc_05_an_operator_that_dies_in_the_middle_of_a_scale_in_leaves_it_to_the_next(
    shop: Shop, operator_process: Any, workload_controllers: None, step: str
) -> None:
    dying = await operator_process(shop.namespace, failpoints=f"operator.scale.{step}=kill@{1 if step == 'costs' else 2}")
    await shop.agent(scaling=QUICK)
    await shop.publish(3)
    await shop.has(3)
    await eventually(lambda: _ready(shop, 3), within=20, what="three pods are ready")
    busy = (await shop.pods())[1]["metadata"]["name"]
    held = await shop.take(f"{busy}-1a2b3c4d")
    await shop.finish(await shop.take("support-worker-gone-00000000", 2))
    assert await dying.wait() == -9
    await operator_process(shop.namespace)

    async def only_the_busy_is_left() -> bool:
        await shop.kubelet()
        pods = await shop.pods()
        return [pod["metadata"]["name"] for pod in pods] == [busy] and COST not in _annotations(pods[0])

    await eventually(only_the_busy_is_left, within=60, what="the idle pods are gone, the busy one carries no cost")
    await shop.finish(held)


async def _ready(shop: Shop, count: int) -> bool:
    await shop.kubelet()
    return bool((await shop.worker())["status"].get("readyReplicas") == count)


async def test_no_scale_in_while_a_roll_out_is_unfinished(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(4)
    await shop.has(4)
    worker = await shop.worker()
    rolling = {
        "observedGeneration": worker["metadata"]["generation"],
        "replicas": 5,
        "updatedReplicas": 1,
        "readyReplicas": 4,
        "availableReplicas": 4,
        "unavailableReplicas": 1,
    }
    await shop.kube.patch("deployments", shop.namespace, "support-worker", {"status": rolling}, subresource="status")
    await shop.finish(await shop.take("support-worker-gone-00000000", 4))
    until = time.monotonic() + 5
    while time.monotonic() < until:
        assert await shop.replicas() == 4
        await asyncio.sleep(0.1)
    await shop.has(0)


async def test_sc_06_a_minimum_above_the_maximum_is_refused_and_nothing_moves(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(workers={"minReplicas": 1, "maxReplicas": 3})
    await shop.has(1)
    with pytest.raises(Refused):
        await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"workers": {"minReplicas": 5}}})
    await shop.stays(1, seconds=3)


async def test_sc_08_a_restarted_operator_moves_no_worker(shop: Shop, operator_process: Any, workload_controllers: None) -> None:
    first = await operator_process(shop.namespace)
    await shop.agent(scaling={"targetPerWorker": 1})
    await shop.publish(3)
    await shop.has(3)
    await shop.take("support-worker-x-1-00000001", 3)
    await eventually(lambda: _count(shop, 3), within=10, what="three pods are there")
    pods = {pod["metadata"]["uid"] for pod in await shop.pods()}
    generation = (await shop.worker())["metadata"]["generation"]
    first.kill()
    second = await operator_process(shop.namespace)
    await eventually(lambda: _leads(second), within=40, what="the next operator leads")
    await shop.stays(3, seconds=6)
    assert {pod["metadata"]["uid"] for pod in await shop.pods()} == pods
    assert (await shop.worker())["metadata"]["generation"] == generation


async def _count(shop: Shop, count: int) -> bool:
    return len(await shop.pods()) == count


async def _leads(operator: ProductProcess) -> bool:
    return (await operator.metrics())["agentrun_operator_leader"] == 1


async def test_redis_away_holds_the_workers_and_the_status_says_so(
    shop: Shop, operator: ProductProcess, private_redis: PrivateServer
) -> None:
    shop.redis = await connect(private_redis.url)
    await shop.agent(redis_url=private_redis.url, scaling=QUICK)
    await shop.publish(3)
    await shop.has(3)
    await private_redis.kill()

    async def says(expected: str, kind: str = "ScalingActive") -> bool:
        return await shop.says(kind) == expected

    await eventually(lambda: says("Unknown DemandUnknown"), within=20, what="the demand is said to be unknown")
    await eventually(lambda: says("Unknown RedisUnreachable", "QueueReady"), within=20, what="the queue is said to be away")
    await shop.stays(3, seconds=4)
    await private_redis.start()
    await eventually(lambda: says("True DemandKnown"), within=20, what="the demand is known again")
    await eventually(lambda: says("True QueueReady", "QueueReady"), within=20, what="the queue is back")
    await shop.publish(2)
    await shop.has(5)
    await shop.redis.aclose()


async def test_kubectl_scale_is_corrected(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(2)
    await shop.has(2)
    for other in (7, 0):
        shop.kube.server.kubectl("scale", "deployment/support-worker", f"--replicas={other}", "-n", shop.namespace)
        await shop.has(2)


async def test_mode_external_leaves_the_workers_to_somebody_else_and_back(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(2)
    await shop.has(2)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"scaling": {"mode": "External"}}})
    await eventually(lambda: shop.says("ScalingActive"), within=10, what="a state")

    async def is_external() -> bool:
        return (await shop.says("ScalingActive")).endswith(" External")

    await eventually(is_external, within=10, what="the mode shows")
    assert await shop.replicas() == 2, "the number is not let go"
    shop.kube.server.kubectl("scale", "deployment/support-worker", "--replicas=6", "-n", shop.namespace)
    await shop.stays(6)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"scaling": {"mode": "Managed"}}})
    await shop.has(2)


async def test_an_autoscaler_on_the_workers_is_noticed_and_let_alone(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(2)
    await shop.has(2)
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "mine"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "support-worker"},
            "minReplicas": 1,
            "maxReplicas": 9,
        },
    }
    await shop.kube.create("horizontalpodautoscalers", shop.namespace, hpa)
    # What the HPA controller does, as the manager that it is: a write of the scale subresource.
    scale = {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {"name": "support-worker", "namespace": shop.namespace},
        "spec": {"replicas": 6},
    }
    path = f"/apis/apps/v1/namespaces/{shop.namespace}/deployments/support-worker/scale"
    await shop.kube.request("PUT", path, body=scale, query={"fieldManager": "kube-controller-manager"})

    async def is_foreign() -> bool:
        return (await shop.says("ScalingActive")).endswith(" ForeignScaler")

    await eventually(is_foreign, within=10, what="the autoscaler is noticed")
    await shop.stays(6)


async def test_a_suspended_agentrun_has_no_workers(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(3)
    await shop.has(3)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"suspend": True}})
    await shop.has(0)
    await shop.stays(0, seconds=3)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"suspend": False}})
    await shop.has(3)


async def test_counters_reach_the_status_and_an_idle_one_is_not_rewritten(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(workers={"maxReplicas": 2})

    async def shows(undelivered: int, in_flight: int) -> bool:
        await shop.kubelet()
        status = (await shop.kube.get("agentruns", shop.namespace, "support"))["status"]
        queue = status.get("queue") or {}
        return (queue.get("undelivered"), queue.get("inFlight")) == (undelivered, in_flight)

    await eventually(lambda: shows(0, 0), within=20, what="an empty queue shows")
    await shop.publish(30)
    await shop.take("support-worker-x-1-00000001", 5)
    await eventually(lambda: shows(25, 5), within=25, what="the queue shows")
    quiet_since = time.monotonic()
    version = ""
    while time.monotonic() - quiet_since < 10:
        await shop.kubelet()
        now = (await shop.kube.get("agentruns", shop.namespace, "support"))["metadata"]["resourceVersion"]
        if now != version:
            version, quiet_since = now, max(quiet_since, time.monotonic() if not version else quiet_since)
        await asyncio.sleep(0.5)
    await asyncio.sleep(4)
    assert (await shop.kube.get("agentruns", shop.namespace, "support"))["metadata"]["resourceVersion"] == version


async def test_a_crontask_reaches_the_database_and_its_deletion_too(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent()
    body = {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {"name": "nightly"},
        "spec": {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "input": "report"},
    }
    made = await shop.kube.create("crontasks", shop.namespace, body)
    pool = await create_pool(shop.database_url, 1)

    async def accepted() -> bool:
        found = await shop.kube.condition(shop.namespace, "nightly", "Accepted", plural="crontasks")
        return bool(found and found["status"] == "True")

    await eventually(accepted, within=20, what="it is accepted")
    (row,) = await cron_tasks.all_of(pool)
    assert (row.schedule.uid, row.deleted_at) == (UUID(made["metadata"]["uid"]), None)
    await shop.kube.delete("crontasks", shop.namespace, "nightly")

    async def deleted() -> bool:
        (row,) = await cron_tasks.all_of(pool)
        return row.deleted_at is not None

    await eventually(deleted, within=10, what="the deletion is in the database")
    await pool.close()
