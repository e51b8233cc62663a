"""Demand as Redis sees it, in the cases in which Redis' own figure is empty or wrong."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from agentrun.bus import lag
from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.lag import Demand, sample
from agentrun.bus.runs import Delivery, Held, WorkStream

KEYS = Keys("tests", "agent")
IDLE_MS = 30_000


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def work(redis: Redis) -> AsyncIterator[WorkStream]:
    stream = WorkStream(redis, KEYS)
    await stream.ensure_group()
    yield stream
    await stream.aclose()


async def deliver(work: WorkStream, *, publish: int, read: int) -> list[Delivery]:
    await work.publish([uuid4() for _ in range(publish)])
    return await work.read("a", count=read, block_ms=0) if read else []


async def entries(redis: Redis) -> list[str]:
    return [entry.decode() for entry, _ in await redis.xrange(KEYS.runs)]


async def test_rs_01_a_deleted_entry_does_not_hide_the_others(redis: Redis, work: WorkStream) -> None:
    await deliver(work, publish=5, read=2)
    await redis.xdel(KEYS.runs, (await entries(redis))[3])
    assert await sample(redis, KEYS, IDLE_MS) == Demand(undelivered=2, in_flight=2, reclaimable=0)


async def test_rs_02_after_a_trim_only_what_can_be_read_counts(redis: Redis, work: WorkStream) -> None:
    delivered = await deliver(work, publish=5, read=1)
    await redis.xtrim(KEYS.runs, maxlen=1, approximate=False)
    assert await sample(redis, KEYS, IDLE_MS) == Demand(undelivered=1, in_flight=1, reclaimable=0)
    delivered += await work.read("a", count=5, block_ms=0)
    await work.acknowledge([Held(one.run_id, one.entry_id) for one in delivered])
    assert await sample(redis, KEYS, IDLE_MS) == Demand(0, 0, 0)
    await deliver(work, publish=1, read=0)
    assert await sample(redis, KEYS, IDLE_MS) == Demand(1, 0, 0)


async def test_entries_untouched_for_long_are_reclaimable(redis: Redis, work: WorkStream) -> None:
    delivered = await deliver(work, publish=5, read=3)
    await redis.xclaim(KEYS.runs, GROUP, "a", 0, [delivered[0].entry_id], idle=IDLE_MS * 2, justid=True)
    demand = await sample(redis, KEYS, IDLE_MS)
    assert demand == Demand(undelivered=2, in_flight=2, reclaimable=1)
    assert demand.total == 5


async def test_a_long_backlog_is_the_reported_one(redis: Redis, work: WorkStream) -> None:
    await deliver(work, publish=1_500, read=100)
    assert await sample(redis, KEYS, IDLE_MS) == Demand(1_400, 100, 0)


async def test_a_long_backlog_that_is_not_reported_is_counted_up_to_a_bound(
    redis: Redis, work: WorkStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "COUNT_ALWAYS", 10)
    monkeypatch.setattr(lag, "COUNT_AT_MOST", 25)
    await deliver(work, publish=21, read=0)
    await redis.xdel(KEYS.runs, (await entries(redis))[10])
    assert await sample(redis, KEYS, IDLE_MS) == Demand(20, 0, 0)
    await deliver(work, publish=20, read=0)
    assert await sample(redis, KEYS, IDLE_MS) == Demand(25, 0, 0)


async def test_sc_03_a_missing_stream_or_group_is_created_and_is_no_demand(redis: Redis) -> None:
    assert await sample(redis, KEYS, IDLE_MS) == Demand(0, 0, 0)
    assert [group["name"] for group in await redis.xinfo_groups(KEYS.runs)] == [GROUP.encode()]


async def test_sc_03_what_was_added_before_the_group_is_demand(redis: Redis) -> None:
    await WorkStream(redis, KEYS).publish([uuid4(), uuid4()])
    assert await sample(redis, KEYS, IDLE_MS) == Demand(2, 0, 0)


async def test_demand_is_unknown_while_redis_is_away(tmp_path: Path) -> None:
    redis = await connect(f"unix://{tmp_path}/nobody.sock")
    assert await sample(redis, KEYS, IDLE_MS) is None
    await redis.aclose()
