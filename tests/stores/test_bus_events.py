"""A run's events on the bus: numbered, in order, once."""

from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest
from redis.asyncio import Redis
from store_servers import PrivateServer

from agentrun.bus.connection import connect
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.domain.errors import BusUnavailable
from agentrun.domain.events import Event, Kind

KEYS = Keys("tests", "agent")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def events(redis: Redis) -> EventStream:
    return EventStream(redis, KEYS)


def text(seq: int, words: str = "word") -> Event:
    return Event(seq, 1, Kind.TEXT_DELTA, b'{"item":0,"part":0,"text":"%s"}' % words.encode())


def of(run_id: UUID, *seqs: int) -> list[tuple[UUID, Event]]:
    return [(run_id, text(seq)) for seq in seqs]


async def test_events_are_read_back_in_order_from_any_number(events: EventStream) -> None:
    run = uuid4()
    assert await events.append(of(run, 0, 1, 2, 3), ttl_seconds=60) == [True] * 4
    assert await events.read(run, after=-1, limit=100) == [text(n) for n in range(4)]
    assert await events.read(run, after=1, limit=100) == [text(2), text(3)]
    assert await events.read(run, after=-1, limit=2) == [text(0), text(1)]
    assert await events.read(run, after=3, limit=100) == []
    assert await events.read(uuid4(), after=-1, limit=100) == []


async def test_a_number_goes_out_once(redis: Redis, events: EventStream) -> None:
    run = uuid4()
    async with redis.pubsub() as listener:
        await listener.subscribe(KEYS.live(run))
        await listener.get_message(timeout=1)
        await events.append(of(run, 0, 1), ttl_seconds=60)
        late = [(run, text(1, "late")), (run, text(0, "late")), (run, text(2))]
        assert await events.append(late, ttl_seconds=60) == [False, False, True]
        messages = [await listener.get_message(timeout=1) for _ in range(3)]
        assert [message["data"] for message in messages if message] == [text(n).encode() for n in range(3)]
        assert await listener.get_message(timeout=0) is None
    assert await events.read(run, after=-1, limit=10) == [text(0), text(1), text(2)]


async def test_one_refused_member_does_not_stop_the_others(redis: Redis, events: EventStream) -> None:
    broken, sound = uuid4(), uuid4()
    await redis.set(KEYS.run(broken), "not a stream")
    batch = [*of(sound, 0), *of(broken, 0), *of(sound, 1)]
    assert await events.append(batch, ttl_seconds=60) == [True, False, True]
    assert await redis.ttl(KEYS.run(sound)) > 0


async def test_a_stream_lives_on_after_its_last_event_only(redis: Redis, events: EventStream) -> None:
    run = uuid4()
    await events.append(of(run, 0), ttl_seconds=1_000)
    await events.append(of(run, 1), ttl_seconds=10)
    assert 0 < await redis.ttl(KEYS.run(run)) <= 10
    await events.append(of(run, 1), ttl_seconds=1_000)
    assert await redis.ttl(KEYS.run(run)) <= 10


async def test_a_stream_that_was_lost_goes_on_with_a_hole(redis: Redis, events: EventStream) -> None:
    run = uuid4()
    await events.append(of(run, 0, 1), ttl_seconds=60)
    await redis.flushall()
    assert await events.append(of(run, 2), ttl_seconds=60) == [True]
    assert await events.read(run, after=-1, limit=10) == [text(2)]


async def test_an_entry_of_somebody_else_is_passed_over(redis: Redis, events: EventStream) -> None:
    run = uuid4()
    await events.append(of(run, 0), ttl_seconds=60)
    await redis.xadd(KEYS.run(run), {"e": "not an event"}, id="2-0")
    await redis.xadd(KEYS.run(run), {"other": "x"}, id="3-0")
    await events.append(of(run, 3), ttl_seconds=60)
    assert await events.read(run, after=-1, limit=10) == [text(0), text(3)]


async def test_a_full_server_is_unavailable(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    await redis.config_set("maxmemory", 1)
    with pytest.raises(BusUnavailable, match="OOM"):
        await EventStream(redis, KEYS).append(of(uuid4(), 0), ttl_seconds=60)
    await redis.aclose()


async def test_a_replica_is_unavailable(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    await redis.replicaof("127.0.0.1", 1)
    with pytest.raises(BusUnavailable, match="replica"):
        await EventStream(redis, KEYS).append(of(uuid4(), 0), ttl_seconds=60)
    await redis.aclose()
