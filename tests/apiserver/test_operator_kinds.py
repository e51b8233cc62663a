"""An operator as shipped on an API server that does not serve CronTasks: AgentRuns do not wait for them."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from kube_client import Document, Kube, agent_run, comes_up, set_deployment_status
from kube_servers import CRDS, KubeServer
from processes import ProductProcess
from waiting import eventually, holds

from agentrun.bus.connection import connect
from agentrun.bus.keys import Keys
from agentrun.store import cron_tasks
from agentrun.store.migrations import migrate
from agentrun.store.pool import create_pool
from agentrun_operator.schedules import valid

NAMESPACE = "default"
QUICK = {"AGENTRUN_OPERATOR_TICK_SECONDS": "0.5"}
MISSING = "agentrun_operator_kind_missing"


def nightly() -> Document:
    return {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {"name": "nightly"},
        "spec": {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "input": "report"},
    }


async def make(kube: Kube, database_url: str, redis_url: str) -> None:
    await kube.store_secrets(NAMESPACE, database_url=database_url, redis_url=redis_url)
    await kube.create("agentruns", NAMESPACE, agent_run(scaling={"targetPerWorker": 1}))
    await eventually(lambda: comes_up(kube, NAMESPACE, "support"), within=60, what="the AgentRun is Ready")


async def is_stored(kube: Kube, pool: Any, made: Document) -> bool:
    found = await kube.condition(NAMESPACE, "nightly", "Accepted", plural="crontasks")
    return bool(found and found["status"] == "True") and UUID(made["metadata"]["uid"]) in await stored(pool)


async def stored(pool: Any) -> set[UUID]:
    """The schedules that are fired."""
    return {row.schedule.uid for row in await cron_tasks.all_of(pool) if row.deleted_at is None}


async def missing(process: ProductProcess) -> float:
    return (await process.metrics()).total(MISSING, resource="crontasks")


async def goes_on_with_agentruns(kube: Kube, process: ProductProcess, redis_url: str) -> None:
    """Reconciles, scales and reaps."""
    await kube.patch("agentruns", NAMESPACE, "support", {"spec": {"workers": {"retries": 7}}})
    await eventually(lambda: comes_up(kube, NAMESPACE, "support"), within=60, what="an edit is rolled out")
    redis = await connect(redis_url)
    await redis.xadd(Keys(NAMESPACE, "support").runs, {"run": str(uuid4())})
    await redis.aclose()

    async def has_one_worker() -> bool:
        return bool((await kube.get("deployments", NAMESPACE, "support-worker"))["spec"]["replicas"] == 1)

    async def reaps() -> bool:
        return (await process.metrics()).total("agentrun_operator_reap_ticks_total", result="done") > reaped

    await eventually(has_one_worker, within=30, what="a worker is asked for")
    await set_deployment_status(kube, await kube.get("deployments", NAMESPACE, "support-scheduler"), ready=0)
    reaped = (await process.metrics()).total("agentrun_operator_reap_ticks_total", result="done")
    await eventually(reaps, within=90, what="it reaps, as the scheduler is away")
    assert (await process.get("/readyz")).status_code == (await process.get("/healthz")).status_code == 200


@pytest.mark.slow
async def test_agentruns_go_on_while_the_crontask_kind_is_removed_and_crontasks_when_it_is_back(
    private_api_server: KubeServer, operator_process: Any, database_url: str, redis_url: str
) -> None:
    await asyncio.to_thread(private_api_server.apply_crds)
    process: ProductProcess = await operator_process(NAMESPACE, server=private_api_server, environment=QUICK)
    pool = await create_pool(database_url, 1)
    async with Kube(private_api_server) as kube:
        await make(kube, database_url, redis_url)
        first = await kube.create("crontasks", NAMESPACE, nightly())
        await eventually(lambda: is_stored(kube, pool, first), within=30, what="the CronTask is stored")
        assert await missing(process) == 0

        await asyncio.to_thread(private_api_server.kubectl, "delete", "-f", str(CRDS / "crontasks.yaml"))

        async def is_said() -> bool:
            return await missing(process) == 1 and "goes on without CronTasks" in process.log.read_text()

        async def is_deleted() -> bool:
            return await stored(pool) == set()

        await eventually(is_said, within=30, what="it is said what is missing")
        await eventually(is_deleted, within=30, what="the CronTask that went with its kind is not fired any more")
        await goes_on_with_agentruns(kube, process, redis_url)
        assert process.returncode is None

        await asyncio.to_thread(private_api_server.apply_crds)
        second = await kube.create("crontasks", NAMESPACE, nightly())
        await eventually(lambda: is_stored(kube, pool, second), within=30, what="a new CronTask is stored")
        assert await missing(process) == 0
        await kube.delete("crontasks", NAMESPACE, "nightly")
        await eventually(is_deleted, within=30, what="its deletion is seen")
        await pool.close()
        assert await process.terminate() == 0


@pytest.mark.parametrize("comes_back", [True, False], ids=["with-the-crontask", "empty"])
async def test_a_start_without_the_crontask_kind_leaves_schedules_alone_until_it_is_there(
    private_api_server: KubeServer, operator_process: Any, database_url: str, redis_url: str, comes_back: bool
) -> None:
    """A schedule that was stored before is not taken for deleted: nobody can say whether its CronTask will be there."""
    await asyncio.to_thread(private_api_server.kubectl, "apply", "--server-side", "-f", str(CRDS / "agentruns.yaml"))
    pool = await create_pool(database_url, 1)
    await migrate(database_url, owner=f"{NAMESPACE}/support", say=lambda _: None)
    task = nightly()
    task["metadata"] |= {"namespace": NAMESPACE, "uid": str(uuid4()), "generation": 1}
    manifest, uid = valid(task), UUID(task["metadata"]["uid"])
    assert manifest is not None
    async with pool.acquire() as conn:
        await cron_tasks.replace(conn, [cron_tasks.Schedule(uid, 1, manifest.as_row(), datetime.now(UTC))], keep=[uid])

    process: ProductProcess = await operator_process(NAMESPACE, server=private_api_server, environment=QUICK)
    async with Kube(private_api_server) as kube:
        await make(kube, database_url, redis_url)
        assert await missing(process) == 1
        before = (await process.metrics())["agentrun_operator_tick_seconds_count"]

        async def is_there() -> bool:
            return uid in await stored(pool)

        async def looked() -> bool:
            return (await process.metrics())["agentrun_operator_tick_seconds_count"] >= before + 16

        async def is_said() -> bool:
            found = await kube.condition(NAMESPACE, "support", "Accepted")
            return found is not None and "schedules go on although the kind CronTask is not installed" in found["message"]

        async def is_not_said() -> bool:
            return not await is_said()

        await eventually(is_said, within=60, what="the AgentRun says that nobody looks after its schedules")
        await holds(is_there, until=looked, within=60, what="the schedule stays, also when databases were looked at")

        await asyncio.to_thread(private_api_server.apply_crds)
        if comes_back:
            made = await kube.create("crontasks", NAMESPACE, nightly())
            await eventually(lambda: is_stored(kube, pool, made), within=30, what="the CronTask is stored")

        async def is_gone() -> bool:
            return uid not in await stored(pool)

        await eventually(is_gone, within=30, what="the schedule without a CronTask is not fired any more")
        await eventually(is_not_said, within=30, what="it is said no more")
        assert await missing(process) == 0
        assert process.returncode is None
        await pool.close()
        assert await process.terminate() == 0
