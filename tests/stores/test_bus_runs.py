"""The work stream on a real server: its scripts' invariants, and what survives lost groups, lost data and lost readers."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest
from redis.asyncio import Redis
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import BEGINNING, Delivery, Held, WorkStream
from agentrun.domain.errors import BusMisconfigured, BusUnavailable

KEYS = Keys("tests", "agent")


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


def ids(count: int) -> list[UUID]:
    return [uuid4() for _ in range(count)]


async def take(work: WorkStream, *, count: int = 100, consumer: str = "a") -> list[Delivery]:
    return await work.read(consumer, count=count, block_ms=0)


def held(deliveries: list[Delivery]) -> list[Held]:
    return [Held(delivery.run_id, delivery.entry_id) for delivery in deliveries]


async def pending(redis: Redis) -> dict[str, str]:
    """Consumer by pending entry."""
    found = await redis.xpending_range(KEYS.runs, GROUP, "-", "+", 10_000)
    return {one["message_id"].decode(): one["consumer"].decode() for one in found}


async def delivery_counts(redis: Redis) -> set[int]:
    found = await redis.xpending_range(KEYS.runs, GROUP, "-", "+", 10_000)
    return {one["times_delivered"] for one in found}


async def make_stale(redis: Redis, consumer: str, entries: list[str], *, idle_ms: int = 60_000) -> None:
    await redis.xclaim(KEYS.runs, GROUP, consumer, 0, entries, idle=idle_ms, justid=True)


def order(entry: str) -> tuple[int, int]:
    ms, seq = entry.split("-")
    return int(ms), int(seq)


async def assert_the_hash_equals_the_stream(redis: Redis) -> None:
    """The hash holds a run, with its newest entry, exactly if that entry is waiting or pending."""
    groups = await redis.xinfo_groups(KEYS.runs)
    delivered = order(groups[0]["last-delivered-id"].decode())
    waiting_for_ack = await pending(redis)
    newest: dict[str, str] = {}
    for entry, fields in await redis.xrange(KEYS.runs):
        newest[fields[b"run"].decode()] = entry.decode()
    expected = {run: entry for run, entry in newest.items() if order(entry) > delivered or entry in waiting_for_ack}
    assert {run.decode(): entry.decode() for run, entry in (await redis.hgetall(KEYS.entries)).items()} == expected


async def test_a_published_run_is_delivered_once_with_its_id(work: WorkStream) -> None:
    runs = ids(3)
    assert await work.publish(runs) == 3
    assert [delivery.run_id for delivery in await take(work)] == runs
    assert await take(work) == []


async def test_publishing_twice_is_harmless(redis: Redis, work: WorkStream) -> None:
    runs = ids(3)
    await work.publish(runs)
    assert await work.publish([*runs, *runs, uuid4()]) == 1
    delivered = await take(work)
    assert await work.publish(runs) == 0  # a pending entry counts, too
    assert len(delivered) == await redis.xlen(KEYS.runs) == 4


async def test_publishing_wakes_once_a_call(redis: Redis, work: WorkStream) -> None:
    async with redis.pubsub() as listener:
        await listener.subscribe(KEYS.wake)
        await listener.get_message(timeout=1)
        await work.publish(ids(3))
        await work.republish([Held(uuid4(), None)])
        messages = [await listener.get_message(timeout=1) for _ in range(2)]
        assert [message["data"] for message in messages if message] == [b"3", b"1"]
        assert await listener.get_message(timeout=0) is None


async def test_an_acknowledged_run_can_be_published_again(redis: Redis, work: WorkStream) -> None:
    runs = ids(2)
    await work.publish(runs)
    assert await work.acknowledge(held(await take(work))) == 2
    assert await redis.hlen(KEYS.entries) == 0
    assert await work.publish(runs) == 2


async def test_acknowledging_an_older_entry_keeps_the_newer_one_known(redis: Redis, work: WorkStream) -> None:
    (run,) = ids(1)
    await work.publish([run])
    (old,) = await take(work)
    (new,) = await work.republish([Held(run, None)])
    await work.acknowledge(held([old]))
    assert await work.entries([run]) == {run: new}
    assert await work.publish([run]) == 0


async def test_republishing_acknowledges_the_held_entry_and_the_known_one(redis: Redis, work: WorkStream) -> None:
    (run,) = ids(1)
    await work.publish([run])
    (first,) = await take(work)
    await redis.hdel(KEYS.entries, str(run))  # as if the hash had forgotten it
    await work.publish([run])
    (second,) = await take(work)
    assert set(await pending(redis)) == {first.entry_id, second.entry_id}
    (third,) = await work.republish(held([first]))
    assert await pending(redis) == {}
    assert await work.entries([run]) == {run: third}
    assert await take(work) == [Delivery(third, run)]


async def test_republishing_needs_a_run(work: WorkStream) -> None:
    with pytest.raises(ValueError, match="names no run"):
        await work.republish([Held(None, "1-1")])


async def test_entries_tells_who_has_none(work: WorkStream) -> None:
    known, unknown = ids(2)
    await work.publish([known])
    found = await work.entries([known, unknown])
    assert found[unknown] is None
    assert await work.existing([found[known] or ""]) == {found[known]}


async def test_an_entry_exists_while_somebody_will_handle_it(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(1))
    entry = (await redis.xrange(KEYS.runs))[0][0].decode()
    assert await work.exists(entry)  # waiting
    (delivery,) = await take(work)
    assert await work.exists(entry)  # pending
    await work.acknowledge(held([delivery]))
    assert not await work.exists(entry)  # in the stream, and nobody will look at it
    await redis.delete(KEYS.runs)
    assert not await work.exists(entry)


async def test_an_entry_without_a_proper_run_is_delivered_without_one(redis: Redis, work: WorkStream) -> None:
    for fields in ({"other": "x"}, {"run": "no id"}, {"run": b"\xff\xfe"}, {"run": str(uuid4()).upper()}):
        await redis.xadd(KEYS.runs, fields)
    delivered = await take(work)
    assert [delivery.run_id for delivery in delivered] == [None] * 4
    assert await work.acknowledge(held(delivered)) == 4


async def test_a_script_is_loaded_again_when_the_server_forgot_it(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(1))
    await redis.script_flush()
    assert await work.publish(ids(1)) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_the_hash_equals_the_stream_whatever_happens(redis: Redis, work: WorkStream, seed: int) -> None:
    dice = random.Random(seed)
    runs = ids(8)
    holding: dict[str, list[Delivery]] = defaultdict(list)

    async def publish() -> None:
        await work.publish(dice.sample(runs, dice.randint(1, 4)))

    async def read() -> None:
        consumer = dice.choice("abc")
        holding[consumer] += await take(work, count=dice.randint(1, 3), consumer=consumer)

    async def acknowledge() -> None:
        consumer = dice.choice("abc")
        taken = dice.sample(holding[consumer], min(len(holding[consumer]), 2))  # kept: it may be acknowledged again
        await work.acknowledge(held(taken))

    async def republish() -> None:
        known = [delivery for deliveries in holding.values() for delivery in deliveries]
        await work.republish(held(dice.sample(known, min(len(known), 2))) or [Held(dice.choice(runs), None)])

    async def reclaim() -> None:
        claimed = await work.autoclaim("reaper", idle_ms=0, cursor=BEGINNING, count=3)
        if dice.random() < 0.5:
            await work.give_back([(delivery.entry_id, dice.choice("abc")) for delivery in claimed.deliveries])
        else:
            await work.republish(held(claimed.deliveries))

    async def keep() -> None:
        consumer = dice.choice("abc")
        wanted = held(dice.sample(holding[consumer], min(len(holding[consumer]), 2)))
        kept = await work.keep(consumer, wanted)
        holding[consumer] += [Delivery(entry, one.run_id) for one, entry in zip(wanted, kept, strict=True) if entry]

    async def tidy() -> None:
        await work.trim()
        await work.retire_consumers(0)

    async def lose_everything() -> None:
        if dice.random() < 0.1:
            await redis.flushall()
            await work.ensure_group()

    acts = [publish, read, read, acknowledge, acknowledge, republish, reclaim, keep, tidy]
    for _ in range(40):
        await asyncio.gather(*(dice.choice(acts)() for _ in range(4)))
        await lose_everything()
        await assert_the_hash_equals_the_stream(redis)


async def test_after_flushall_the_bus_recovers_by_itself(redis: Redis, work: WorkStream) -> None:
    runs = ids(5)
    await work.publish(runs)
    await redis.flushall()
    assert set((await work.entries(runs)).values()) == {None}
    await work.publish(runs)
    assert await take(work) == []  # the group is made anew
    assert [delivery.run_id for delivery in await take(work)] == runs


async def test_a_waiting_reader_survives_flushall(redis: Redis, work: WorkStream) -> None:
    runs = ids(2)

    async def first_delivery() -> list[Delivery]:
        while True:
            if found := await work.read("a", count=10, block_ms=300):
                return found

    reading = asyncio.create_task(first_delivery())
    await eventually(lambda: blocked(redis), within=5, what="a reader waits")
    await redis.flushall()
    await work.publish(runs)
    async with asyncio.timeout(5):
        assert [delivery.run_id for delivery in await reading] == runs


async def blocked(redis: Redis) -> int:
    return int((await redis.info("clients"))["blocked_clients"])


async def test_refreshing_resets_idle_time_and_keeps_the_delivery_count(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(2))
    mine, other = (delivery.entry_id for delivery in await take(work))
    await make_stale(redis, "a", [mine])
    await make_stale(redis, "b", [other])
    assert await work.refresh("a", [mine, other, "1-1"]) == {mine}
    assert await pending(redis) == {mine: "a", other: "b"}
    reclaimed = await work.autoclaim("reaper", idle_ms=30_000, cursor=BEGINNING, count=10)
    assert [delivery.entry_id for delivery in reclaimed.deliveries] == [other]
    assert await delivery_counts(redis) == {1}


async def test_kept_entries_are_refreshed_and_those_of_others_stay_theirs(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(3))
    mine, claimed, done = held(await take(work))
    await make_stale(redis, "a", [mine.entry_id or ""])
    await make_stale(redis, "b", [claimed.entry_id or ""])
    await work.acknowledge([done])
    await work.publish([done.run_id or uuid4()])
    assert await work.keep("a", [mine, claimed, done]) == [mine.entry_id, None, None]
    assert await pending(redis) == {mine.entry_id: "a", claimed.entry_id: "b"}
    assert await delivery_counts(redis) == {1}
    reclaimed = await work.autoclaim("reaper", idle_ms=30_000, cursor=BEGINNING, count=10)
    assert [delivery.entry_id for delivery in reclaimed.deliveries] == [claimed.entry_id]
    await assert_the_hash_equals_the_stream(redis)


@pytest.mark.parametrize("group", ["missing", "made anew"])
async def test_what_is_worked_on_is_put_back_after_flushall(redis: Redis, work: WorkStream, group: str) -> None:
    await work.publish(ids(2))
    before = held(await take(work))
    await redis.flushall()
    if group == "made anew":
        await work.ensure_group()
    entries = await work.keep("a", before)
    assert await pending(redis) == dict.fromkeys(entries, "a")
    assert await work.keep("a", before) == entries, "it is put back once, although the caller has not heard of it"
    assert await take(work, consumer="b") == [], "it is delivered to nobody else"
    await assert_the_hash_equals_the_stream(redis)
    await work.acknowledge([Held(one.run_id, entry) for one, entry in zip(before, entries, strict=True)])
    assert await pending(redis) == {} and await work.publish([one.run_id for one in before if one.run_id]) == 2


async def test_what_is_put_back_lets_what_waits_be_delivered(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(1))
    before = held(await take(work))
    await redis.flushall()
    await work.ensure_group()
    (waiting,) = ids(1)
    await work.publish([waiting])
    (entry,) = await work.keep("a", before)
    await assert_the_hash_equals_the_stream(redis)
    delivered = await take(work, consumer="b")
    assert [one.run_id for one in delivered] == [waiting, before[0].run_id]
    await work.acknowledge(held(delivered[1:]))  # as for any run whose lease is alive
    (again,) = await work.keep("a", [Held(before[0].run_id, entry)])
    assert await take(work, consumer="b") == []
    assert await pending(redis) == {delivered[0].entry_id: "b", again: "a"}
    await assert_the_hash_equals_the_stream(redis)


async def test_an_entry_is_given_back_to_its_owner_unless_it_is_done(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(2))
    delivered = await take(work)
    open_entry, done = (delivery.entry_id for delivery in delivered)
    await make_stale(redis, "a", [open_entry, done])
    await work.autoclaim("reaper", idle_ms=30_000, cursor=BEGINNING, count=10)
    await work.acknowledge(held(delivered[1:]))
    await work.give_back([(open_entry, "a"), (done, "a")])
    assert await pending(redis) == {open_entry: "a"}
    assert await delivery_counts(redis) == {1}


async def test_without_a_group_nothing_is_claimed_refreshed_or_removed(redis: Redis) -> None:
    work = WorkStream(redis, KEYS)
    assert await work.refresh("a", ["1-1"]) == set()
    await work.give_back([("1-1", "a")])
    assert await work.acknowledge([Held(uuid4(), "1-1")]) == 0
    assert await work.trim() == 0
    assert await work.retire_consumers(0) == []
    assert await work.existing(["1-1"]) == set()


async def test_rs_03_deleted_entries_are_reported_and_cleared(redis: Redis, work: WorkStream) -> None:
    runs = ids(3)
    await work.publish(runs)
    first, second, third = await take(work)
    await redis.xdel(KEYS.runs, second.entry_id)
    await make_stale(redis, "a", [first.entry_id, third.entry_id])
    reclaimed = await work.autoclaim("reaper", idle_ms=0, cursor=BEGINNING, count=10)
    assert reclaimed.deliveries == [first, third]
    known = await work.entries(runs)
    gone = await redis.xpending_range(KEYS.runs, GROUP, second.entry_id, second.entry_id, 1)
    assert reclaimed.deleted == [second.entry_id] or not gone  # XCLAIM above may have found it first
    await work.acknowledge([Held(None, entry) for entry in reclaimed.deleted])
    assert set(await pending(redis)) == {first.entry_id, third.entry_id}
    assert await work.existing([entry for entry in known.values() if entry]) == {first.entry_id, third.entry_id}
    (new,) = await work.republish([Held(second.run_id, known[runs[1]])])  # what a comparison with Postgres leads to
    assert await take(work, consumer="b") == [Delivery(new, second.run_id)]


async def test_rs_05_idle_consumers_without_work_are_removed(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(1))
    await take(work, consumer="busy")
    for n in range(50):
        await work.publish(ids(1))
        await work.acknowledge(held(await take(work, consumer=f"worker-{n}")))
    assert await work.retire_consumers(60_000) == []
    assert len(await work.retire_consumers(0)) == 50
    assert [one["name"] for one in await redis.xinfo_consumers(KEYS.runs, GROUP)] == [b"busy"]
    assert len(await pending(redis)) == 1


async def test_a_consumer_that_waits_while_it_is_removed_still_gets_work(redis: Redis, work: WorkStream) -> None:
    (run,) = ids(1)
    reading = asyncio.create_task(work.read("idle", count=1, block_ms=5_000))
    await eventually(lambda: blocked(redis), within=5, what="a reader waits")
    await work.retire_consumers(0)
    await work.publish([run])
    assert [delivery.run_id for delivery in await reading] == [run]
    assert set((await pending(redis)).values()) == {"idle"}


async def test_rs_08_a_lost_group_begins_at_the_beginning(redis: Redis, work: WorkStream) -> None:
    before, meanwhile = ids(2)
    await work.publish([before])
    await take(work)
    await redis.xgroup_destroy(KEYS.runs, GROUP)
    await work.publish([meanwhile])
    assert await take(work) == []
    assert [delivery.run_id for delivery in await take(work)] == [before, meanwhile]


async def test_rs_09_an_idle_read_outlasts_the_client_librarys_limit(redis: Redis, work: WorkStream) -> None:
    reading = asyncio.create_task(work.read("a", count=1, block_ms=5_600))  # redis-py gives up after 5 s
    await eventually(lambda: blocked(redis), within=5, what="a reader waits")
    assert await blocked(redis) == 1
    assert await reading == []


async def test_rs_11_cancelled_reads_leave_nothing_behind(redis_url: str) -> None:
    redis = await connect(redis_url, size=2)
    work = WorkStream(redis, KEYS)
    await work.ensure_group()
    await redis.mset({f"known:{n}": n for n in range(20)})
    dice = random.Random(11)
    finished = asyncio.Event()

    async def check_known_keys() -> int:
        count = 0
        while not finished.is_set():
            n = dice.randrange(20)
            async with asyncio.timeout(5):
                assert int(await redis.get(f"known:{n}") or -1) == n
            count += 1
        return count

    async def range_read() -> None:
        assert await redis.xrange("no stream") == []

    checking = [asyncio.create_task(check_known_keys()) for _ in range(3)]
    cancelled = 0
    for n in range(200):
        read = work.read("a", count=1, block_ms=5_000) if n % 2 else range_read()
        task = asyncio.ensure_future(read)
        await asyncio.sleep(dice.random() * 0.004)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert result is None or isinstance(result, asyncio.CancelledError)
        cancelled += isinstance(result, asyncio.CancelledError)
    finished.set()
    assert min(await asyncio.gather(*checking)) > 0
    assert cancelled >= 100
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(redis.get("known:7") for _ in range(10))) == [b"7"] * 10
    await eventually(lambda: nobody_blocked(redis), within=5, what="no read is left on the server")
    (run,) = ids(1)
    await work.publish([run])
    assert [delivery.run_id for delivery in await take(work)] == [run]
    await work.aclose()
    await redis.aclose()


async def nobody_blocked(redis: Redis) -> bool:
    return await blocked(redis) == 0


async def test_rs_12_a_kept_cursor_reaches_every_page(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(250))
    entries = [delivery.entry_id for delivery in await take(work, count=250)]
    await make_stale(redis, "a", entries)
    cursor, seen = BEGINNING, set()
    for _ in range(3):
        page = await work.autoclaim("reaper", idle_ms=30_000, cursor=cursor, count=100)
        cursor = page.cursor
        failed = [delivery.entry_id for delivery in page.deliveries]
        seen.update(failed)
        await make_stale(redis, "reaper", failed)  # none can be handled: all are due again at once
    assert seen == set(entries)
    assert cursor == BEGINNING
    page = await work.autoclaim("reaper", idle_ms=0, cursor=cursor, count=100)
    assert page.cursor != BEGINNING
    await redis.xgroup_destroy(KEYS.runs, GROUP)
    assert await work.autoclaim("reaper", idle_ms=0, cursor=page.cursor, count=100) == (BEGINNING, [], [])
    assert len(await take(work, count=500)) == 250


async def test_rs_18_a_worked_off_stream_stays_short_and_loses_nothing(redis: Redis, work: WorkStream) -> None:
    stuck, unread = ids(2)
    for _ in range(20):
        await work.publish(ids(500))
        await work.acknowledge(held(await take(work, count=500)))
        assert await work.trim() == 500
        assert await redis.xlen(KEYS.runs) == 0
    await work.publish([stuck])
    (entry,) = await take(work)
    await work.publish(ids(500))
    await work.acknowledge(held(await take(work, count=500)))
    await work.publish([unread])
    assert await work.trim() == 0  # nothing goes from the oldest pending entry on
    await work.republish(held([entry]))
    assert await work.trim() == 501
    assert [delivery.run_id for delivery in await take(work)] == [unread, stuck]


async def test_trimming_leaves_everything_to_a_group_that_was_made_anew(redis: Redis, work: WorkStream) -> None:
    await work.publish(ids(3))
    await work.acknowledge(held(await take(work)))
    await redis.xgroup_destroy(KEYS.runs, GROUP)
    assert await work.trim() == 0
    await work.ensure_group()
    assert await work.trim() == 0


async def test_rs_24_a_server_that_may_evict_keys_is_refused(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    work = WorkStream(redis, KEYS)
    with pytest.raises(BusMisconfigured, match="noeviction"):
        await work.read("a", count=1, block_ms=0)
    await redis.config_set("maxmemory-policy", "noeviction")
    assert await take(work) == []
    await work.aclose()
    await redis.aclose()


async def test_a_restarted_server_is_used_again(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    work = WorkStream(redis, KEYS)
    runs = ids(4)
    await work.publish(runs[:1])
    assert len(await take(work)) == 1

    reading = asyncio.create_task(work.read("a", count=10, block_ms=20_000))
    await eventually(lambda: blocked(redis), within=5, what="a reader waits")
    await private_redis.stop()
    with pytest.raises(BusUnavailable):
        await reading
    with pytest.raises(BusUnavailable):
        await work.publish(runs[1:])
    with pytest.raises(BusUnavailable):
        await take(work)
    await private_redis.start()
    assert await work.publish(runs[1:]) == 3
    assert [delivery.run_id for delivery in await take(work)] == runs[1:]
    await work.aclose()
    await redis.aclose()


async def test_a_cut_read_is_answered_with_nothing_and_a_second_one_is_reported(redis: Redis, work: WorkStream) -> None:
    async def cut_read() -> list[Delivery]:
        reading = asyncio.create_task(work.read("a", count=10, block_ms=20_000))
        await eventually(lambda: blocked(redis), within=5, what="a reader waits")
        clients = await redis.client_list()
        await redis.client_kill_filter(_id=next(one["id"] for one in clients if one["cmd"] == "xreadgroup"))
        async with asyncio.timeout(5):
            return await reading

    assert await cut_read() == []
    with pytest.raises(BusUnavailable):  # whoever reads in a loop is slowed down
        await cut_read()
    await work.publish(ids(1))
    assert len(await take(work)) == 1


async def test_rs_22_a_replica_is_reported_and_left(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    work = WorkStream(redis, KEYS)
    await work.ensure_group()
    await redis.replicaof("127.0.0.1", 1)
    connection = (await redis.client_list())[0]["id"]
    for attempt in (work.publish(ids(1)), work.ensure_group()):
        with pytest.raises(BusUnavailable, match="replica"):
            await attempt
    await redis.replicaof("NO", "ONE")
    assert connection not in [one["id"] for one in await redis.client_list()]
    assert await work.publish(ids(1)) == 1
    await work.aclose()
    await redis.aclose()


async def test_a_full_server_is_unavailable_and_still_takes_acknowledgements(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    work = WorkStream(redis, KEYS)
    await work.publish(ids(1))
    delivered = await take(work)
    await redis.config_set("maxmemory", 1)
    with pytest.raises(BusUnavailable, match="OOM"):
        await work.publish(ids(1))
    assert await work.acknowledge(held(delivered)) == 1
    await work.aclose()
    await redis.aclose()
