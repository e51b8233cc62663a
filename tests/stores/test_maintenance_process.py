"""The scheduler as a process: it waits for what it needs, survives the loss of it, and a crash between any two lines heals."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from processes import Product, ProductProcesses
from redis.asyncio import Redis
from run_factory import claimed, submitted
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import WorkStream
from agentrun.domain.states import RunStatus
from agentrun.store import migrations, runs
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool

KEYS = Keys("default", "agent")
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {model: "demo:chat"}
  workers: {leaseSeconds: 2}
  reaper: {idleSeconds: 2, intervalSeconds: 1}
"""


@pytest.fixture
def product(tmp_path: Path, database_url: str, redis_url: str) -> Product:
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(MANIFEST)
    return Product(manifest, database_url, redis_url, api_keys=tmp_path / "keys")


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 3)
    yield made
    await made.close()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    made = await connect(redis_url)
    yield made
    await made.aclose()


@pytest.fixture
async def stream(redis: Redis) -> AsyncIterator[WorkStream]:
    made = WorkStream(redis, KEYS)
    await made.ensure_group()
    yield made
    await made.aclose()


async def test_it_waits_for_the_schema_and_ends_with_0(
    product: Product, empty_database_url: str, product_processes: ProductProcesses
) -> None:
    unmigrated = Product(product.manifest, empty_database_url, product.redis_url, product.api_keys)
    scheduler = await product_processes.scheduler(unmigrated, ready=False)

    async def says_why() -> bool:
        return "run: agentrun migrate" in (await scheduler.get("/readyz")).text

    await eventually(says_why, within=20, what="readiness names the remedy")
    assert (await scheduler.get("/healthz")).status_code == 200
    await migrations.migrate(empty_database_url, say=lambda _: None)

    await scheduler.ready()
    assert (await scheduler.metrics()).total("agentrun_sweep_published_total") == 0
    assert await scheduler.terminate() == 0


async def test_it_refuses_the_database_of_another_agent_run(product: Product, product_processes: ProductProcesses) -> None:
    conn = await asyncpg.connect(product.database_url)
    await conn.execute("UPDATE meta SET owner = 'shop/other'")
    await conn.close()
    scheduler = await product_processes.scheduler(product, ready=False)

    async def says_why() -> bool:
        return "belongs to the AgentRun shop/other" in (await scheduler.get("/readyz")).text

    await eventually(says_why, within=20, what="readiness names the owner")
    assert await scheduler.terminate() == 0


async def test_it_starts_while_redis_is_away_and_works_when_it_comes(
    product: Product, private_redis: PrivateServer, pool: Pool, product_processes: ProductProcesses
) -> None:
    run = await submitted(pool)
    await private_redis.kill()
    away = Product(product.manifest, product.database_url, private_redis.url, product.api_keys)
    scheduler = await product_processes.scheduler(away)
    await private_redis.start()
    client = await connect(private_redis.url)

    async def published() -> bool:
        return bool(await client.hexists(KEYS.entries, str(run.run_id)))

    await eventually(published, within=20, what="the waiting run is published")
    await client.aclose()
    assert (await scheduler.get("/healthz")).status_code == 200
    assert await scheduler.terminate() == 0


@pytest.mark.parametrize("point", ["reaper.taken", "reaper.republished", "reaper.autoclaimed", "reaper.looked", "sweep.found"])
async def test_a_crash_between_two_lines_is_healed_by_the_next_scheduler(
    point: str, product: Product, pool: Pool, redis: Redis, stream: WorkStream, product_processes: ProductProcesses
) -> None:
    lost = await submitted(pool, session="lost")
    await stream.publish([lost.run_id])
    await stream.read("w-dead", count=1, block_ms=0)
    await claimed(pool, lost.run_id, owner="w-dead/n", lease=0.01)
    await stream.publish([new_id()])  # nothing but a look at forgotten entries ends this one
    (orphan,) = await stream.read("w-dead", count=1, block_ms=0)
    forgotten = await submitted(pool, session="forgotten")
    crashing = await product_processes.scheduler(product, failpoints=f"{point}=kill", ready=False)
    assert await crashing.wait(within=30) == -signal.SIGKILL

    healing = await product_processes.scheduler(product)
    heard = set()

    async def both_heard_of() -> bool:
        heard.update(one.run_id for one in await stream.read("w-2", count=10, block_ms=0))
        return heard >= {lost.run_id, forgotten.run_id}

    async def orphan_is_gone() -> bool:
        return not await redis.xpending_range(KEYS.runs, GROUP, orphan.entry_id, orphan.entry_id, 1)

    await eventually(both_heard_of, within=30, what="both runs reach a worker")
    await eventually(orphan_is_gone, within=30, what="the entry without a run is acknowledged")
    looks = await runs.look(pool, [lost.run_id, forgotten.run_id])
    assert {look.status for look in looks.values()} == {RunStatus.PENDING}
    assert await healing.terminate() == 0


async def test_an_outage_of_postgres_restarts_loops_and_not_the_process(
    product: Product, private_postgres: PrivateServer, product_processes: ProductProcesses
) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    fragile = Product(product.manifest, private_postgres.url, product.redis_url, product.api_keys)
    scheduler = await product_processes.scheduler(fragile)
    await private_postgres.kill()

    async def restarted() -> bool:
        return (await scheduler.metrics()).total("agentrun_loop_restarts_total", loop="reap-leases") > 0

    await eventually(restarted, within=20, what="the loop is started again")
    assert (await scheduler.get("/readyz")).status_code == 200  # an outage is no reason to stop a pod
    await private_postgres.start()
    made = await create_pool(private_postgres.url, 2)
    run = await submitted(made)
    await made.close()
    redis = await connect(product.redis_url)

    async def published() -> bool:
        return bool(await redis.hexists(KEYS.entries, str(run.run_id)))

    await eventually(published, within=20, what="the new run is published")
    await redis.aclose()
    assert await scheduler.terminate() == 0


async def test_a_redis_that_may_drop_keys_is_not_used(
    product: Product, private_redis: PrivateServer, pool: Pool, product_processes: ProductProcesses
) -> None:
    evicting = await connect(private_redis.url)
    await evicting.config_set("maxmemory-policy", "allkeys-lru")
    await submitted(pool)
    wrong = Product(product.manifest, product.database_url, private_redis.url, product.api_keys)
    scheduler = await product_processes.scheduler(wrong)

    async def said() -> bool:
        return "noeviction" in scheduler.log_tail()

    await eventually(said, within=20, what="the log says why")
    assert await evicting.keys() == []
    await evicting.config_set("maxmemory-policy", "noeviction")

    async def grouped() -> bool:
        return GROUP in {row["name"].decode() for row in await evicting.xinfo_groups(KEYS.runs)}

    await eventually(grouped, within=20, what="it goes on once the policy is right")
    await evicting.aclose()
