"""What happens to an entry when its holder dies over it: each row of the table in docs/architecture.md, worker's and reaper's column.

The holder is a process that kills itself between two lines. Then a second reaper passes, and the row's own end must be reached.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from lone_reaper import reap_entries_until_killed
from processes import Product, ProductProcesses
from redis.asyncio import Redis
from run_factory import claimed, submitted
from waiting import eventually
from whole_path import System, attempt_is_under_way, system

from agentrun.bus.connection import connect
from agentrun.bus.events import EventStream
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.domain.states import Outcome, RunStatus
from agentrun.maintenance.reaper import Limits, Reaper
from agentrun.maintenance.sweep import Sweep
from agentrun.store import attempts, runs, transitions
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish, Reason, TakeOver

KEYS = Keys("default", "agent")
OWNER = "w-owner"
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {model: "demo:chat"}
  workers: {concurrency: 1, leaseSeconds: 2}
  reaper: {idleSeconds: 2}
"""
AT_ONCE = Limits(lease_seconds=0, idle_seconds=0.0, interval_seconds=1, max_lost_attempts=3)


@dataclass
class Stores:
    pool: Pool
    redis: Redis
    work: WorkStream

    async def publish(self, run_id: UUID) -> None:
        assert await self.work.publish([run_id]) == 1

    async def finish(self, run_id: UUID, epoch: int = 1) -> None:
        (done,) = await transitions.finish(self.pool, [Finish(run_id, epoch, RunStatus.SUCCEEDED, result="{}")])
        assert done.ok

    async def pending(self) -> dict[str, str]:
        """Entries on the pending list, and whose they are."""
        rows = await self.redis.xpending_range(KEYS.runs, GROUP, "-", "+", 100)
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    async def waiting(self) -> list[UUID | None]:
        """The runs whose entries a worker would get now."""
        return [one.run_id for one in await self.work.read("probe", count=100, block_ms=0)]

    async def status(self, run_id: UUID) -> RunStatus:
        return (await runs.look(self.pool, [run_id]))[run_id].status

    async def outcomes(self, run_id: UUID) -> list[Outcome]:
        return [row.outcome for row in await attempts.of_run(self.pool, run_id)]

    async def reap_entries(self) -> None:
        """A second reaper passes, and looks at entries alone."""
        events = EventStream(self.redis, KEYS)
        await Reaper(self.pool, self.work, events, consumer="reaper-second", limits=AT_ONCE).reap_entries()

    async def sweep(self) -> None:
        await Sweep(self.pool, self.redis, self.work, idle_seconds=3600).tick()

    async def nothing_is_left(self) -> None:
        assert await self.pending() == {}
        assert await self.redis.hgetall(KEYS.entries) == {}
        assert await self.waiting() == []

    async def is_published(self, run_id: UUID) -> None:
        """Exactly one entry, known by the hash, and a worker gets it."""
        assert await self.pending() == {}
        assert list(await self.redis.hgetall(KEYS.entries)) == [str(run_id).encode()]
        assert await self.waiting() == [run_id]


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Stores]:
    pool, redis = await create_pool(database_url, 3), await connect(redis_url)
    work = WorkStream(redis, KEYS)
    await work.ensure_group()
    yield Stores(pool, redis, work)
    await work.aclose()
    await redis.aclose()
    await pool.close()


# ---------------------------------------------------------------- the rows: how a run gets there, and where it must end


async def no_run(stores: Stores) -> UUID:
    run_id = new_id()
    await stores.publish(run_id)
    return run_id


async def a_finished_run(stores: Stores) -> UUID:
    run_id = (await submitted(stores.pool)).run_id
    await claimed(stores.pool, run_id)
    await stores.finish(run_id)
    await stores.publish(run_id)
    return run_id


async def a_due_head(stores: Stores) -> UUID:
    run_id = (await submitted(stores.pool)).run_id
    await stores.publish(run_id)
    return run_id


async def a_blocked_run(stores: Stores) -> UUID:
    head = (await submitted(stores.pool)).run_id
    run_id = (await submitted(stores.pool)).run_id
    await claimed(stores.pool, head)
    await stores.publish(run_id)
    return run_id


async def a_run_that_is_not_due(stores: Stores) -> UUID:
    run_id = (await submitted(stores.pool)).run_id
    await claimed(stores.pool, run_id)
    wish = TakeOver(run_id, Reason.RETRYING, 1, last_seq=-1, retry_after=3600)
    await transitions.take_over(stores.pool, [wish])
    await stores.publish(run_id)
    return run_id


async def a_living_attempt(stores: Stores) -> UUID:
    run_id = (await submitted(stores.pool)).run_id
    await claimed(stores.pool, run_id, owner=f"{OWNER}/n", lease=3600)
    await stores.publish(run_id)
    return run_id


async def a_dead_attempt(stores: Stores) -> UUID:
    run_id = (await submitted(stores.pool)).run_id
    await claimed(stores.pool, run_id, owner="w-gone/n", lease=0.001)
    await asyncio.sleep(0.002)
    await stores.publish(run_id)
    return run_id


async def the_entry_goes(stores: Stores, run_id: UUID) -> None:
    await stores.nothing_is_left()


async def a_worker_gets_it(stores: Stores, run_id: UUID) -> None:
    assert await stores.status(run_id) is RunStatus.PENDING
    assert await stores.outcomes(run_id) == []
    await stores.is_published(run_id)


async def it_goes_and_comes_when_its_turn_is(stores: Stores, run_id: UUID) -> None:
    await stores.nothing_is_left()
    head = await stores.pool.fetchval("SELECT id FROM runs WHERE status = 'running'")
    await stores.finish(head)
    await stores.sweep()
    await stores.is_published(run_id)


async def it_goes_and_comes_when_it_is_due(stores: Stores, run_id: UUID) -> None:
    await stores.nothing_is_left()
    await stores.sweep()
    await stores.nothing_is_left()
    await stores.pool.execute("UPDATE runs SET not_before = now() WHERE id = $1", run_id)
    await stores.sweep()
    await stores.is_published(run_id)


async def the_owner_has_it_and_ends_it(stores: Stores, run_id: UUID) -> None:
    assert await stores.outcomes(run_id) == [Outcome.RUNNING]
    assert await stores.waiting() == []
    ((entry, consumer),) = (await stores.pending()).items()
    assert consumer == OWNER
    await stores.finish(run_id)
    await stores.work.acknowledge([Held(run_id, entry)])
    await stores.nothing_is_left()


async def it_is_lost_once_and_a_worker_gets_it(stores: Stores, run_id: UUID) -> None:
    assert await stores.status(run_id) is RunStatus.PENDING
    assert await stores.outcomes(run_id) == [Outcome.LOST]
    await stores.is_published(run_id)


@dataclass(frozen=True)
class Row:
    given: Callable[[Stores], Awaitable[UUID]]
    then: Callable[[Stores, UUID], Awaitable[None]]


ROWS = {
    "no row": Row(no_run, the_entry_goes),
    "finished": Row(a_finished_run, the_entry_goes),
    "pending, head, due": Row(a_due_head, a_worker_gets_it),
    "pending, blocked": Row(a_blocked_run, it_goes_and_comes_when_its_turn_is),
    "pending, not due": Row(a_run_that_is_not_due, it_goes_and_comes_when_it_is_due),
    "running, lease alive": Row(a_living_attempt, the_owner_has_it_and_ends_it),
    "running, lease expired": Row(a_dead_attempt, it_is_lost_once_and_a_worker_gets_it),
}

# ---------------------------------------------------------------- the worker's column


@pytest.fixture
def product(tmp_path: Path, database_url: str, redis_url: str) -> Product:
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(MANIFEST)
    return Product(manifest, database_url, redis_url, api_keys=tmp_path / "keys")


@pytest.mark.parametrize("point", ["worker.read", "worker.looked"])
@pytest.mark.parametrize("row", ROWS)
async def test_a_worker_that_dies_over_a_new_delivery(
    row: str, point: str, stores: Stores, product: Product, product_processes: ProductProcesses
) -> None:
    """Before it has looked the run up, or between that and what it does."""
    run_id = await ROWS[row].given(stores)
    victim = await product_processes.worker(product, failpoints=f"{point}=kill", ready=False)
    assert await victim.wait(within=30) == -signal.SIGKILL
    (holder,) = (await stores.pending()).values()
    assert holder.startswith(victim.name)

    await stores.reap_entries()

    await ROWS[row].then(stores, run_id)


async def test_a_worker_that_dies_after_its_claim(stores: Stores, product: Product, product_processes: ProductProcesses) -> None:
    run_id = await a_due_head(stores)
    victim = await product_processes.worker(product, failpoints="worker.claimed=kill", ready=False)
    assert await victim.wait(within=30) == -signal.SIGKILL
    assert await stores.outcomes(run_id) == [Outcome.RUNNING]

    async def taken() -> bool:
        await stores.reap_entries()
        return await stores.status(run_id) is RunStatus.PENDING

    await eventually(taken, within=10, what="the lease runs out and the run is taken over")
    await it_is_lost_once_and_a_worker_gets_it(stores, run_id)


ACKNOWLEDGED = ["no row", "finished", "pending, blocked", "pending, not due", "running, lease alive"]


@pytest.mark.parametrize("row", [*ACKNOWLEDGED, "running, lease expired"])
async def test_a_worker_that_lives_does_not_touch_the_run(
    row: str, stores: Stores, product: Product, product_processes: ProductProcesses
) -> None:
    """The control: the entry is acknowledged, or left to the reaper, and the run stays as it is."""
    run_id = await ROWS[row].given(stores)
    before = (await runs.look(stores.pool, [run_id])).get(run_id)
    worker = await product_processes.worker(product)
    label = {"no row": "orphan", "running, lease expired": "leave"}.get(row, "ack")

    async def counted() -> bool:
        return (await worker.metrics()).total("agentrun_entries_total", action=label) == 1

    await eventually(counted, within=10, what=f"the entry is counted as {label}")
    left = 0 if row in ACKNOWLEDGED else 1
    await eventually(lambda: _has_pending(stores, left), within=10, what="the entry is handled")
    assert (await runs.look(stores.pool, [run_id])).get(run_id) == before


async def _has_pending(stores: Stores, count: int) -> bool:
    return len(await stores.pending()) == count


# ---------------------------------------------------------------- the reaper's column


@pytest.mark.parametrize(
    ("row", "point"),
    [
        *((row, point) for row in ROWS for point in ("reaper.autoclaimed", "reaper.looked")),
        ("pending, head, due", "reaper.republished"),
        ("running, lease expired", "reaper.taken"),
        ("running, lease expired", "reaper.republished"),
    ],
)
async def test_a_reaper_that_dies_over_a_forgotten_entry(row: str, point: str, stores: Stores, product: Product) -> None:
    """After XAUTOCLAIM, between its look and what it does, or in the middle of that. The entry was forgotten by a worker."""
    run_id = await ROWS[row].given(stores)
    (delivery,) = await stores.work.read("w-forgetful", count=1, block_ms=0)
    assert delivery.run_id == run_id
    await reap_entries_until_killed(product.database_url, product.redis_url, failpoints=f"{point}=kill")
    if point in ("reaper.autoclaimed", "reaper.looked"):
        assert await stores.pending() == {delivery.entry_id: "reaper-dying"}

    await stores.reap_entries()

    await ROWS[row].then(stores, run_id)


# ---------------------------------------------------------------- an attempt that gives back its run


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        yield made


async def test_a_worker_that_dies_after_its_hand_back(whole: System, stores: Stores) -> None:
    await asyncio.gather(whole.gateway(), whole.scheduler())
    victim = await whole.worker(failpoints="worker.handback.committed=kill")
    run_id = await whole.submit("[[slow ms=50]] [[deltas n=60]]")
    await attempt_is_under_way(whole, run_id, events=3)
    assert await victim.terminate(within=20) == -signal.SIGKILL
    assert await whole.outcomes(run_id) == ["handed_back"]
    assert len(await stores.pending()) == 1

    await whole.worker()
    seen = await whole.follow(run_id)

    assert seen.transcript.end == "completed"
    assert await whole.outcomes(run_id) == ["handed_back", "finished"]
    assert "void" not in seen.kinds
    assert seen.transcript.text == await whole.log_text(run_id)
    await eventually(lambda: _has_pending(stores, 0), within=10, what="no entry is held any more")


async def test_a_worker_that_dies_after_its_retry_was_stored(whole: System, stores: Stores) -> None:
    await asyncio.gather(whole.gateway(), whole.scheduler())
    victim = await whole.worker(failpoints="worker.retry.committed=kill")
    run_id = await whole.submit("[[fail status=503 times=3]] hello")
    assert await victim.wait(within=30) == -signal.SIGKILL
    assert await whole.outcomes(run_id) == ["retrying"]
    assert len(await stores.pending()) == 1

    await whole.worker()
    seen = await whole.follow(run_id)

    assert seen.transcript.end == "completed"
    assert await whole.outcomes(run_id) == ["retrying", "finished"]
    assert await whole.has_no_holes()
    await eventually(lambda: _has_pending(stores, 0), within=10, what="no entry is held any more")
