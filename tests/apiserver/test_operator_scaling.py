"""The operator as a process, with real stores and a real API server: workers follow the work. Where pods matter, the controllers that
make and delete them run, and the test says that they are ready.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest
from kube_client import Document, Kube, Refused, agent_run, play_kubelet
from processes import ProductProcess
from redis.asyncio import Redis
from store_servers import PrivateServer
from waiting import eventually, holds, rests

from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.store import cron_tasks
from agentrun.store.pool import create_pool

COST = "controller.kubernetes.io/pod-deletion-cost"
QUICK = {"targetPerWorker": 1, "cooldownSeconds": 0, "scaleDownStabilizationSeconds": 0}
RARE_TICKS = {"AGENTRUN_OPERATOR_TICK_SECONDS": "60"}
"""With these no test lives to see what a tick would do."""
SHORT_LEASE = {"AGENTRUN_OPERATOR_LEASE_SECONDS": "6", "AGENTRUN_OPERATOR_RENEW_SECONDS": "5"}
"""For tests in which an operator dies and the next one has to wait for its lease."""


@dataclass
class Shop:
    """One namespace with AgentRuns, their queues, and an operator."""

    kube: Kube
    namespace: str
    redis: Redis
    redis_url: str
    database_url: str
    start: Any
    operators: list[ProductProcess] = field(default_factory=list)
    streams: dict[str, WorkStream] = field(default_factory=dict)

    async def operator(self, environment: Mapping[str, str] | None = None, *, failpoints: str = "") -> ProductProcess:
        """Starts one, with ticks that come soon."""
        ticks = {"AGENTRUN_OPERATOR_TICK_SECONDS": "0.5"}
        started = await self.start(self.namespace, environment={**ticks, **(environment or {})}, failpoints=failpoints)
        self.operators.append(started)
        return self.operators[-1]

    async def counted(self, name: str, **labels: str) -> float:
        """A metric of the newest operator."""
        return (await self.operators[-1].metrics()).total(name, **labels)

    async def ticks(self) -> float:
        """How often the queues were looked at."""
        return await self.counted("agentrun_operator_tick_seconds_count")

    async def agent(
        self, name: str = "support", *, redis_url: str | None = None, database_url: str | None = None, **spec: Any
    ) -> None:
        """An AgentRun whose worker Deployment is there and counted as up."""
        database = f"database-of-{name}"
        spec.setdefault("database", {"secretRef": {"name": database}})
        await self.kube.store_secrets(
            self.namespace,
            database_url=database_url or self.database_url,
            redis_url=redis_url or self.redis_url,
            database=database,
        )
        await self.kube.create("agentruns", self.namespace, agent_run(name, **spec))

        async def is_there() -> bool:
            await self.kubelet()
            return await self.replicas(name) is not None

        await eventually(is_there, within=60, what=f"the workers of {name} have a Deployment")
        await eventually(lambda: self.says("ScalingActive", name), within=30, what="the scaler has looked at it")

    async def kubelet(self) -> None:
        """Pods and Deployments come up as they would."""
        await play_kubelet(self.kube, self.namespace, migrates=True)

    async def worker(self, name: str = "support") -> Document:
        return await self.kube.get("deployments", self.namespace, f"{name}-worker")

    async def replicas(self, name: str = "support") -> int | None:
        found = await self.kube.find("deployments", self.namespace, f"{name}-worker")
        return int(found["spec"]["replicas"]) if found and "agentrun.dev/creating" not in _annotations(found) else None

    async def has(self, count: int, name: str = "support", *, within: float = 30.0) -> None:
        async def is_so() -> bool:
            await self.kubelet()
            return await self.replicas(name) == count

        await eventually(is_so, within=within, what=f"{name} has {count} workers")

    async def stays(self, count: int, name: str = "support", *, kubelet: bool = True) -> None:
        """Over the next looks at the queues. The first may have begun before this, and what the last brings about takes a moment."""
        enough = await self.ticks() + 4

        async def is_so() -> bool:
            if kubelet:
                await self.kubelet()
            return await self.replicas(name) == count

        async def looked() -> bool:
            return await self.ticks() >= enough

        await holds(is_so, until=looked, within=30, what=f"{name} keeps {count} workers")

    async def says(self, kind: str, name: str = "support") -> str:
        found = await self.kube.condition(self.namespace, name, kind)
        return f"{found['status']} {found['reason']}" if found and found["reason"] != "Pending" else ""

    async def stream(self, name: str = "support") -> WorkStream:
        if name not in self.streams:
            self.streams[name] = WorkStream(self.redis, Keys(self.namespace, name))
        return self.streams[name]

    async def publish(self, count: int = 1, name: str = "support") -> None:
        await (await self.stream(name)).publish([uuid4() for _ in range(count)])

    async def publish_silently(self, name: str = "support") -> None:
        """A run whose wake message is lost."""
        await self.redis.xadd(Keys(self.namespace, name).runs, {"run": str(uuid4())})

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
async def shop(kube: Kube, namespace: str, redis_url: str, database_url: str, operator_process: Any) -> AsyncIterator[Shop]:
    redis = await connect(redis_url)
    made = Shop(kube, namespace, redis, redis_url, database_url, operator_process)
    yield made
    for stream in made.streams.values():
        await stream.aclose()
    await redis.aclose()


@pytest.fixture
async def operator(shop: Shop) -> ProductProcess:
    return await shop.operator()


async def test_sc_01_a_published_run_raises_the_replicas_without_a_tick(shop: Shop) -> None:
    await shop.operator(RARE_TICKS)
    await shop.agent(scaling=QUICK)
    await shop.has(0)
    await shop.publish()
    await shop.has(1)
    await shop.publish(2)
    await shop.has(3)
    assert await shop.ticks() <= 1


async def test_without_a_wake_message_and_a_tick_nobody_looks(shop: Shop) -> None:
    """What the test before this one takes for granted: a reconcile alone brings no look at the queue."""
    await shop.operator(RARE_TICKS)
    await shop.agent(scaling=QUICK)
    await shop.has(0)
    await shop.publish_silently()
    before = await shop.counted("agentrun_operator_reconciles_total", queue="agentruns", result="done")
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"gateway": {"replicas": 3}}})

    async def reconciled() -> bool:
        return await shop.counted("agentrun_operator_reconciles_total", queue="agentruns", result="done") > before + 1

    async def stands_at_zero() -> bool:
        await shop.kubelet()
        return await shop.replicas() == 0

    await holds(stands_at_zero, until=reconciled, within=30, what="nobody has seen the run")
    await shop.publish()
    await shop.has(2)
    assert await shop.ticks() <= 1


async def test_with_the_wake_message_lost_the_tick_raises_them(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.has(0)
    await shop.publish_silently()
    await shop.has(1)


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


async def test_sc_03_a_missing_stream_is_made_and_means_the_minimum(
    shop: Shop, operator: ProductProcess, empty_database_url: str
) -> None:
    await shop.agent("busy", scaling=QUICK)
    await shop.publish(3, "busy")
    await shop.has(3, "busy")
    await shop.agent("new", workers={"minReplicas": 2}, database_url=empty_database_url)
    await shop.has(2, "new")
    groups = await shop.redis.xinfo_groups(Keys(shop.namespace, "new").runs)
    assert [group["name"] for group in groups] == [GROUP.encode()]
    await shop.stays(3, "busy")


async def test_sc_05_a_scale_in_takes_idle_pods_and_no_cost_stays(
    shop: Shop, operator: ProductProcess, workload_controllers: None
) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(5)
    await shop.has(5)
    await eventually(lambda: _ready(shop, 5), within=30, what="five pods are ready")
    busy = [pod["metadata"]["name"] for pod in await shop.pods()][2:4]
    held = [one for name in busy for one in await shop.take(f"{name}-1a2b3c4d")]
    await shop.finish(await shop.take("support-worker-gone-00000000", 3))
    await shop.has(2)

    async def only_the_busy_are_left() -> bool:
        return sorted(pod["metadata"]["name"] for pod in await shop.pods()) == sorted(busy)

    await eventually(only_the_busy_are_left, within=30, what="the idle pods are gone and the busy ones are not")

    async def no_costs() -> bool:
        await shop.kubelet()
        return all(COST not in _annotations(pod) for pod in await shop.pods())

    await eventually(no_costs, within=30, what="the costs are taken away")
    await shop.finish(held)
    await shop.has(0)


@pytest.mark.parametrize("step", [pytest.param("costs", marks=pytest.mark.slow), "written"])
async def test_sc_05_an_operator_that_dies_in_the_middle_of_a_scale_in_leaves_it_to_the_next(
    shop: Shop, workload_controllers: None, step: str
) -> None:
    dying = await shop.operator(SHORT_LEASE, failpoints=f"operator.scale.{step}=kill@{1 if step == 'costs' else 2}")
    await shop.agent(scaling=QUICK)
    await shop.publish(3)
    await shop.has(3)
    await eventually(lambda: _ready(shop, 3), within=30, what="three pods are ready")
    busy = (await shop.pods())[1]["metadata"]["name"]
    held = await shop.take(f"{busy}-1a2b3c4d")
    await shop.finish(await shop.take("support-worker-gone-00000000", 2))
    assert await dying.wait(within=150) == -9
    await shop.operator()

    async def only_the_busy_is_left() -> bool:
        await shop.kubelet()
        pods = await shop.pods()
        return [pod["metadata"]["name"] for pod in pods] == [busy] and COST not in _annotations(pods[0])

    await eventually(only_the_busy_is_left, within=60, what="the idle pods are gone, the busy one carries no cost")
    await shop.finish(held)


async def _ready(shop: Shop, count: int) -> bool:
    await shop.kubelet()
    return bool((await shop.worker())["status"].get("readyReplicas") == count)


async def test_no_busy_worker_goes_where_fewer_would_do(shop: Shop, operator: ProductProcess, workload_controllers: None) -> None:
    """Four pods work on one run each, and one pod could do all of it: a scale-in would only move the work."""
    await shop.agent(scaling={**QUICK, "targetPerWorker": 10})
    await shop.publish(40)
    await shop.has(4)
    await eventually(lambda: _count(shop, 4), within=30, what="four pods are there")
    busy = [pod["metadata"]["name"] for pod in await shop.pods()]
    held = [one for name in busy for one in await shop.take(f"{name}-1a2b3c4d")]
    await shop.finish(await shop.take("support-worker-gone-00000000", 36))
    await shop.stays(4)
    assert sorted(pod["metadata"]["name"] for pod in await shop.pods()) == sorted(busy)
    await shop.finish(held[:1])
    await shop.has(3)
    await shop.stays(3)


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
    await shop.stays(4, kubelet=False)
    await shop.has(0)


async def test_sc_06_a_minimum_above_the_maximum_is_refused_and_nothing_moves(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(workers={"minReplicas": 1, "maxReplicas": 3})
    await shop.has(1)
    with pytest.raises(Refused):
        await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"workers": {"minReplicas": 5}}})
    await shop.stays(1)


async def test_sc_08_a_restarted_operator_moves_no_worker(shop: Shop, workload_controllers: None) -> None:
    """Also when there is less work at that moment: it does not know for how long."""
    first = await shop.operator(SHORT_LEASE)
    await shop.agent(scaling={"targetPerWorker": 1, "scaleDownStabilizationSeconds": 60}, workers={"leaseSeconds": 2})
    await shop.publish(3)
    await shop.has(3)
    held = await shop.take("support-worker-x-1-00000001", 3)
    await eventually(lambda: _count(shop, 3), within=30, what="three pods are there")
    pods = {pod["metadata"]["uid"] for pod in await shop.pods()}
    generation = (await shop.worker())["metadata"]["generation"]
    await shop.finish(held[:2])
    first.kill()
    second = await shop.operator(SHORT_LEASE)
    await eventually(lambda: _leads(second), within=60, what="the next operator leads")
    await shop.stays(3)
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

    await eventually(lambda: says("Unknown DemandUnknown"), within=60, what="the demand is said to be unknown")
    await eventually(lambda: says("Unknown RedisUnreachable", "QueueReady"), within=60, what="the queue is said to be away")
    await shop.stays(3)
    await private_redis.start()
    await eventually(lambda: says("True DemandKnown"), within=60, what="the demand is known again")
    await eventually(lambda: says("True QueueReady", "QueueReady"), within=60, what="the queue is back")
    await shop.publish(2)
    await shop.has(5)
    await shop.redis.aclose()


async def test_a_redis_that_lost_its_data_costs_no_busy_worker(
    shop: Shop, operator: ProductProcess, private_redis: PrivateServer, workload_controllers: None
) -> None:
    shop.redis = await connect(private_redis.url)
    await shop.agent(redis_url=private_redis.url, scaling=QUICK, workers={"leaseSeconds": 6})
    await shop.publish(4)
    await shop.has(4)
    await eventually(lambda: _ready(shop, 4), within=30, what="four pods are ready")
    consumers = [f"{pod['metadata']['name']}-1a2b3c4d" for pod in (await shop.pods())[:3]]
    pods = {pod["metadata"]["name"] for pod in (await shop.pods())[:3]}
    held = [one for consumer in consumers for one in await shop.take(consumer)]
    idle = await shop.take("support-worker-gone-00000000")
    await shop.redis.flushall()
    await shop.stays(4)
    stream = await shop.stream()
    entries = [(await stream.keep(*one))[0] for one in zip(consumers, ([each] for each in held), strict=True)]
    await shop.finish(idle)
    await shop.has(3)
    await shop.stays(3)
    assert {pod["metadata"]["name"] for pod in await shop.pods()} == pods
    await shop.finish([Held(one.run_id, entry) for one, entry in zip(held, entries, strict=True)])
    await shop.has(0)
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
    await eventually(lambda: shop.says("ScalingActive"), within=30, what="a state")

    async def is_external() -> bool:
        return (await shop.says("ScalingActive")).endswith(" External")

    await eventually(is_external, within=30, what="the mode shows")
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

    await eventually(is_foreign, within=30, what="the autoscaler is noticed")
    await shop.stays(6)


async def test_a_suspended_agentrun_has_no_workers(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(scaling=QUICK)
    await shop.publish(3)
    await shop.has(3)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"suspend": True}})
    await shop.has(0)
    await shop.stays(0)
    await shop.kube.patch("agentruns", shop.namespace, "support", {"spec": {"suspend": False}})
    await shop.has(3)


async def test_counters_reach_the_status_and_an_idle_one_is_not_rewritten(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent(workers={"maxReplicas": 2})

    async def shows(undelivered: int, in_flight: int) -> bool:
        await shop.kubelet()
        status = (await shop.kube.get("agentruns", shop.namespace, "support"))["status"]
        queue = status.get("queue") or {}
        return (queue.get("undelivered"), queue.get("inFlight")) == (undelivered, in_flight)

    async def version() -> str:
        await shop.kubelet()
        return str((await shop.kube.get("agentruns", shop.namespace, "support"))["metadata"]["resourceVersion"])

    await eventually(lambda: shows(0, 0), within=30, what="an empty queue shows")
    await shop.publish(30)
    await shop.take("support-worker-x-1-00000001", 5)
    await eventually(lambda: shows(25, 5), within=60, what="the queue shows")
    await rests(version, turns=shop.ticks, count=4, within=60, what="the AgentRun's version")
    assert await shows(25, 5)


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

    await eventually(accepted, within=30, what="it is accepted")
    (row,) = await cron_tasks.all_of(pool)
    assert (row.schedule.uid, row.deleted_at) == (UUID(made["metadata"]["uid"]), None)
    await shop.kube.delete("crontasks", shop.namespace, "nightly")

    async def deleted() -> bool:
        (row,) = await cron_tasks.all_of(pool)
        return row.deleted_at is not None

    await eventually(deleted, within=30, what="the deletion is in the database")
    await pool.close()


async def test_a_crontask_says_at_once_that_its_agentrun_is_gone_or_there(shop: Shop, operator: ProductProcess) -> None:
    await shop.agent()
    body = {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {"name": "nightly"},
        "spec": {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "input": "report"},
    }
    await shop.kube.create("crontasks", shop.namespace, body)

    async def says(expected: str) -> bool:
        found = await shop.kube.condition(shop.namespace, "nightly", "Accepted", plural="crontasks")
        return bool(found and found["reason"] == expected)

    await eventually(lambda: says("Accepted"), within=30, what="it is accepted")
    await shop.kube.delete("agentruns", shop.namespace, "support")
    await eventually(lambda: says("AgentRunMissing"), within=30, what="its AgentRun is said to be gone")
