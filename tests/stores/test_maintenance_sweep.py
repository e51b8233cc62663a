"""The sweep and the tidying on real stores: nothing that waits stays unknown, nothing that is over stays behind."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID

import pytest
from redis.asyncio import Redis
from run_factory import claimed, submitted
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.domain.errors import BusUnavailable
from agentrun.maintenance import sweep as sweep_module
from agentrun.maintenance import tidying as tidying_module
from agentrun.maintenance.sweep import Sweep
from agentrun.maintenance.tidying import Tidying
from agentrun.store import transitions
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Reason, TakeOver

KEYS = Keys("test", "agent")


@dataclass
class Stores:
    pool: Pool
    redis: Redis
    stream: WorkStream

    def sweep(self, *, idle_seconds: float = 60) -> Sweep:
        return Sweep(self.pool, self.redis, self.stream, idle_seconds=idle_seconds)

    async def new_run(self, session: str) -> UUID:
        return (await submitted(self.pool, session=session)).run_id

    async def waiting(self) -> list[UUID | None]:
        """The runs whose entries a worker gets now."""
        return [one.run_id for one in await self.stream.read("w-1", count=1000, block_ms=0)]


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Stores]:
    pool = await create_pool(database_url, 5)
    redis = await connect(redis_url)
    stream = WorkStream(redis, KEYS)
    await stream.ensure_group()
    yield Stores(pool, redis, stream)
    await stream.aclose()
    await redis.aclose()
    await pool.close()


async def test_what_was_never_published_is_published_once(stores: Stores) -> None:
    waiting = [await stores.new_run(f"s{number}") for number in range(3)]
    sweep = stores.sweep()

    await sweep.tick()
    await sweep.tick()

    assert await stores.waiting() == waiting


async def test_only_the_head_of_a_session_is_published(stores: Stores) -> None:
    head = await stores.new_run("s")
    await stores.new_run("s")

    await stores.sweep().tick()

    assert await stores.waiting() == [head]


async def test_running_work_is_not_published(stores: Stores) -> None:
    run = await stores.new_run("s")
    await claimed(stores.pool, run)

    await stores.sweep().tick()

    assert await stores.waiting() == []


async def test_a_retry_is_published_when_its_time_has_come(stores: Stores) -> None:
    run = await stores.new_run("s")
    claim = await claimed(stores.pool, run)
    await transitions.take_over(stores.pool, [TakeOver(run, Reason.RETRYING, claim.epoch, last_seq=-1, retry_after=0.3)])
    sweep = stores.sweep()

    await sweep.tick()
    assert await stores.waiting() == []
    await asyncio.sleep(0.35)
    await sweep.tick()

    assert await stores.waiting() == [run]


async def test_everything_that_waits_is_published_anew_after_redis_lost_it(stores: Stores) -> None:
    waiting = [await stores.new_run(f"s{number}") for number in range(5)]
    sweep = stores.sweep()
    await sweep.tick()
    await stores.redis.flushall()

    await sweep.tick()
    await stores.stream.ensure_group()  # as a worker's read does

    assert await stores.waiting() == waiting


async def test_an_entry_in_the_hands_of_a_worker_is_left_to_the_reaper(stores: Stores) -> None:
    run = await stores.new_run("s")
    await stores.stream.publish([run])
    assert await stores.waiting() == [run]

    await stores.sweep(idle_seconds=-1).tick()

    assert await stores.waiting() == []


@pytest.mark.parametrize("how", ["deleted", "trimmed", "acknowledged by hand"])
async def test_an_old_entry_that_is_gone_is_replaced(stores: Stores, how: str) -> None:
    run = await stores.new_run("s")
    await stores.stream.publish([run])
    (entry,) = (await stores.stream.entries([run])).values()
    if how == "deleted":
        await stores.redis.xdel(KEYS.runs, entry)
    elif how == "trimmed":
        await stores.redis.xtrim(KEYS.runs, maxlen=0, approximate=False)
    else:
        await stores.stream.read("w-1", count=1, block_ms=0)
        await stores.redis.xack(KEYS.runs, GROUP, entry)

    await stores.sweep(idle_seconds=60).tick()
    assert await stores.waiting() == []  # too young to be doubted
    await stores.sweep(idle_seconds=-1).tick()

    assert await stores.waiting() == [run]


async def test_a_backlog_of_many_pages_is_published_over_several_ticks(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "PAGE", 4)
    monkeypatch.setattr(sweep_module, "MOST_PAGES", 2)
    waiting = [await stores.new_run(f"s{number}") for number in range(18)]
    sweep = stores.sweep()
    counts = []
    for _ in range(3):
        await sweep.tick()
        counts.append(await stores.redis.xlen(KEYS.runs))

    assert counts == [8, 16, 18]
    assert await stores.waiting() == waiting


async def test_sweeps_of_several_processes_publish_once(stores: Stores) -> None:
    waiting = [await stores.new_run(f"s{number}") for number in range(20)]

    await asyncio.gather(*(stores.sweep().tick() for _ in range(5)))

    assert await stores.waiting() == waiting


async def test_an_outage_of_redis_is_told(stores: Stores) -> None:
    await stores.new_run("s")
    nowhere = await connect("redis://127.0.0.1:1/0")

    with pytest.raises(BusUnavailable):
        await Sweep(stores.pool, nowhere, WorkStream(nowhere, KEYS), idle_seconds=60).tick()
    await nowhere.aclose()


async def test_rs_05_consumers_of_restarted_workers_do_not_pile_up(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying_module, "SHORTEST_GRACE_SECONDS", 0.3)
    tidying = Tidying(stores.stream, idle_seconds=60, grace_seconds=0.3)
    run = new_id()
    await stores.stream.publish([run])
    (held,) = await stores.stream.read("worker-0", count=1, block_ms=0)

    async def work(worker: str) -> None:
        run_id = new_id()
        await stores.stream.publish([run_id])
        (read,) = await stores.stream.read(worker, count=1, block_ms=0)
        await stores.stream.acknowledge([Held(run_id, read.entry_id)])

    for restart in range(1, 51):
        await work(f"worker-{restart}")
    await asyncio.sleep(0.4)
    await work("worker-51")

    await tidying.tick()

    left = {row["name"].decode() for row in await stores.redis.xinfo_consumers(KEYS.runs, GROUP)}
    assert left == {"worker-0", "worker-51"}
    await stores.stream.acknowledge([Held(run, held.entry_id)])
    await asyncio.sleep(0.4)
    await tidying.tick()
    assert await stores.redis.xinfo_consumers(KEYS.runs, GROUP) == []


async def test_entries_that_are_done_with_are_trimmed_and_no_others(stores: Stores) -> None:
    ids = [new_id() for _ in range(10)]
    await stores.stream.publish(ids)
    first, second, *_ = await stores.stream.read("w-1", count=4, block_ms=0)
    await stores.stream.acknowledge([Held(first.run_id, first.entry_id)])

    await Tidying(stores.stream, idle_seconds=60, grace_seconds=60).tick()

    assert await stores.redis.xlen(KEYS.runs) == 9
    assert (await stores.redis.xrange(KEYS.runs, count=1))[0][0].decode() == second.entry_id
    assert await stores.waiting() == ids[4:]


async def test_what_is_remembered_of_lost_entries_goes_and_nothing_else(stores: Stores) -> None:
    """The stream was lost and the hash kept, a worker died before its ack: nobody looks at a finished run's entry again."""
    lost, waiting, young = new_id(), new_id(), new_id()
    await stores.stream.publish([lost, waiting])
    entry = (await stores.stream.entries([lost]))[lost]
    await stores.redis.xdel(KEYS.runs, entry)
    await stores.redis.hset(KEYS.entries, str(young), f"{int(time.time() * 1000)}-0")
    await eventually(lambda: forgotten(stores), within=5, what="an entry older than 50 ms is looked up")
    assert await stores.stream.entries([lost]) == {lost: None}
    assert (await stores.stream.entries([waiting]))[waiting] is not None
    assert await stores.stream.forget_lost(idle_ms=60_000) == (0, 0)


async def forgotten(stores: Stores) -> bool:
    return (await stores.stream.forget_lost(idle_ms=50))[1] > 0
