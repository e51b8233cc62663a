"""The live feed and the control channels: one connection, which comes back."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import hiredis
import pytest
from redis.asyncio import Redis
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus import pubsub
from agentrun.bus.connection import connect
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.live import LiveFeed
from agentrun.bus.runs import WorkStream
from agentrun.domain.events import Event, Kind

KEYS = Keys("tests", "agent")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def feed(redis_url: str) -> AsyncIterator[LiveFeed]:
    async with LiveFeed(redis_url, KEYS) as live:
        yield live


def event(seq: int) -> Event:
    return Event(seq, 1, Kind.VOID, b"{}")


async def send(redis: Redis, run_id: UUID, *seqs: int) -> None:
    await EventStream(redis, KEYS).append([(run_id, event(seq)) for seq in seqs], ttl_seconds=60)


async def got(events: list[Event], *seqs: int) -> None:
    await eventually(lambda: len(events) >= len(seqs), within=5, what=f"the events {seqs}")
    assert [one.seq for one in events] == list(seqs)


async def listeners(redis: Redis, run_id: UUID) -> int:
    return int((await redis.pubsub_numsub(KEYS.live(run_id)))[0][1])


async def pubsub_clients(redis: Redis) -> list[str]:
    return [one["id"] for one in await redis.client_list(_type="pubsub")]


async def test_nothing_published_after_the_confirmation_is_missed(redis: Redis, feed: LiveFeed) -> None:
    for _ in range(20):
        run, events = uuid4(), list[Event]()
        assert await feed.subscribe(run, events.append)
        await send(redis, run, 0, 1, 2)
        await got(events, 0, 1, 2)


async def test_subscribers_of_a_run_share_and_leave_one_by_one(redis: Redis, feed: LiveFeed) -> None:
    run = uuid4()
    first, second = list[Event](), list[Event]()
    hear_first, hear_second = first.append, second.append
    await feed.subscribe(run, hear_first)
    await feed.subscribe(run, hear_second)
    await send(redis, run, 0)
    await got(first, 0)
    feed.unsubscribe(run, hear_first)
    await send(redis, run, 1)
    await got(second, 0, 1)
    assert len(first) == 1
    assert await listeners(redis, run) == 1
    feed.unsubscribe(run, hear_second)
    feed.unsubscribe(run, hear_second)
    await eventually(lambda: nobody(redis, run), within=5, what="the channel is left")


async def nobody(redis: Redis, run_id: UUID) -> bool:
    return await listeners(redis, run_id) == 0


async def test_one_connection_serves_all_runs(redis: Redis, feed: LiveFeed) -> None:
    runs = [uuid4() for _ in range(1_000)]
    events: dict[UUID, list[Event]] = {run: [] for run in runs}
    assert all(await asyncio.gather(*(feed.subscribe(run, events[run].append) for run in runs)))
    assert len(await pubsub_clients(redis)) == 1
    await EventStream(redis, KEYS).append([(run, event(0)) for run in runs], ttl_seconds=60)
    await eventually(lambda: all(events.values()), within=5, what="each run's event")


async def test_an_exception_in_one_subscriber_is_not_the_others_loss(redis: Redis, feed: LiveFeed) -> None:
    run, events = uuid4(), list[Event]()

    def fail(_: Event) -> None:
        raise RuntimeError("a subscriber's fault")

    await feed.subscribe(run, fail)
    await feed.subscribe(run, events.append)
    await redis.publish(KEYS.live(run), "not an event")
    await send(redis, run, 0, 1)
    await got(events, 0, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_a_confirmation_is_never_an_older_ones(redis: Redis, feed: LiveFeed, seed: int) -> None:
    """Subscribing and leaving in quick succession: whoever is told that it works hears the next event."""
    dice = random.Random(seed)
    runs = [uuid4() for _ in range(3)]
    seqs = dict.fromkeys(runs, 0)

    async def come_and_go(run: UUID) -> None:
        events: list[Event] = []
        listener = events.append
        confirmed = await feed.subscribe(run, listener)
        assert confirmed
        seq = seqs[run]
        seqs[run] += 1
        await send(redis, run, seq)
        await eventually(lambda: seq in [one.seq for one in events], within=5, what=f"event {seq}")
        feed.unsubscribe(run, listener)

    async def come_and_be_cancelled(run: UUID) -> None:
        task = asyncio.create_task(feed.subscribe(run, print))
        await asyncio.sleep(dice.random() * 0.002)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            feed.unsubscribe(run, print)

    for _ in range(60):
        run = dice.choice(runs)
        await asyncio.gather(come_and_be_cancelled(run), come_and_be_cancelled(run), come_and_go(run))
    for run in runs:
        await eventually(lambda run=run: nobody(redis, run), within=5, what="every channel is left")


class SlowServer:
    """Speaks just enough of Redis, and confirms subscriptions only when it is told to."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.path = path
        self.verbs: list[bytes] = []
        self.writer: asyncio.StreamWriter | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._serve, self.path):
            yield
            if self.writer:
                self.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        parser = hiredis.Reader()
        while received := await reader.read(65_536):
            parser.feed(received)
            while (command := parser.gets()) is not False:
                if command[0].endswith(b"SUBSCRIBE"):
                    self.verbs.append(command[0])
                else:
                    writer.write(b"+OK\r\n")

    def confirm(self, verb: bytes, channel: str) -> None:
        assert self.writer
        name = channel.encode()
        self.writer.write(b"*3\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n:1\r\n" % (len(verb), verb, len(name), name))


async def test_an_older_confirmation_is_not_taken_for_the_newer_one(tmp_path: Path) -> None:
    server, run = SlowServer(tmp_path / "redis.sock"), uuid4()
    async with server.serving(), LiveFeed(server.url, KEYS) as feed:
        first = asyncio.create_task(feed.subscribe(run, print))
        await eventually(lambda: len(server.verbs) == 1, within=5, what="the first subscription")
        first.cancel()
        await eventually(lambda: len(server.verbs) == 2, within=5, what="the end of the first")
        second = asyncio.create_task(feed.subscribe(run, print))
        await eventually(lambda: len(server.verbs) == 3, within=5, what="the second subscription")
        assert server.verbs == [b"SUBSCRIBE", b"UNSUBSCRIBE", b"SUBSCRIBE"]
        server.confirm(b"subscribe", KEYS.live(run))
        server.confirm(b"unsubscribe", KEYS.live(run))
        await asyncio.wait([second], timeout=0.1)
        assert not second.done()
        server.confirm(b"subscribe", KEYS.live(run))
        assert await second


async def test_a_cut_connection_comes_back_with_all_subscriptions(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "ACK_SECONDS", 10.0)  # so many at once may take longer than a client waits
    back = asyncio.Event()
    runs = [uuid4() for _ in range(1_200)]
    events: dict[UUID, list[Event]] = {run: [] for run in runs}
    async with LiveFeed(redis_url, KEYS, on_reconnect=back.set) as feed:
        assert all(await asyncio.gather(*(feed.subscribe(run, events[run].append) for run in runs)))
        assert not back.is_set()
        for seq in range(2):
            await redis.client_kill_filter(_type="pubsub")
            async with asyncio.timeout(5):
                await back.wait()
            back.clear()
            await EventStream(redis, KEYS).append([(run, event(seq)) for run in runs], ttl_seconds=60)
            expected = [event(n) for n in range(seq + 1)]
            await eventually(lambda: all(got == expected for got in events.values()), within=5, what="every run's events")  # noqa: B023
        assert len(await pubsub_clients(redis)) == 1


async def test_a_restarted_server_is_followed_again(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    back = asyncio.Event()
    run, later = uuid4(), uuid4()
    events: list[Event] = []
    async with LiveFeed(private_redis.url, KEYS, on_reconnect=back.set) as feed:
        assert await feed.subscribe(run, events.append)
        await private_redis.stop()
        await eventually(lambda: not feed.connected, within=5, what="the loss is seen")
        async with asyncio.timeout(1):  # nobody waits for a server that is away
            assert not await feed.subscribe(later, events.append)
        assert not back.is_set()
        await private_redis.start()
        async with asyncio.timeout(5):
            await back.wait()
        await send(redis, run, 0)
        await send(redis, later, 1)
        await got(events, 0, 1)
    await redis.aclose()


async def test_a_server_that_was_away_at_first_is_followed_later(private_redis: PrivateServer) -> None:
    await private_redis.stop()
    back = asyncio.Event()
    async with LiveFeed(private_redis.url, KEYS, on_reconnect=back.set) as feed:
        assert not await feed.subscribe(uuid4(), print)
        await private_redis.start()
        async with asyncio.timeout(5):
            await back.wait()
        assert await feed.subscribe(uuid4(), print)


async def test_a_server_that_hangs_is_noticed(private_redis: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(pubsub, "ACK_SECONDS", 0.1)
    redis = await connect(private_redis.url)
    back = asyncio.Event()
    run, events = uuid4(), list[Event]()
    async with LiveFeed(private_redis.url, KEYS, on_reconnect=back.set) as feed:
        await eventually(lambda: feed.subscribe(run, events.append), within=5, what="a subscription")
        feed.unsubscribe(run, events.append)
        back.clear()
        await private_redis.pause()
        try:
            assert not await feed.subscribe(uuid4(), events.append)
            await eventually(lambda: not feed.connected, within=5, what="the silence is noticed")
        finally:
            await private_redis.resume()
        async with asyncio.timeout(5):
            await back.wait()
    await redis.aclose()


async def test_a_late_confirmation_is_told_by_on_reconnect(private_redis: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "ACK_SECONDS", 0.1)
    back = asyncio.Event()
    async with LiveFeed(private_redis.url, KEYS, on_reconnect=back.set) as feed:
        await feed.subscribe(uuid4(), print)
        await eventually(lambda: feed.connected, within=5, what="a connection")
        await private_redis.pause()
        try:
            assert not await feed.subscribe(uuid4(), print)
            back.clear()
        finally:
            await private_redis.resume()
        async with asyncio.timeout(5):
            await back.wait()


async def test_closing_leaves_no_connection(redis: Redis, redis_url: str) -> None:
    async with LiveFeed(redis_url, KEYS) as feed:
        await feed.subscribe(uuid4(), print)
        assert len(await pubsub_clients(redis)) == 1
    await eventually(lambda: no_pubsub_clients(redis), within=5, what="the connection is closed")


async def test_closing_ends_a_waiting_subscription(tmp_path: Path) -> None:
    feed = LiveFeed(f"unix://{tmp_path}/nobody.sock", KEYS)
    waiting = asyncio.create_task(feed.subscribe(uuid4(), print))
    await asyncio.sleep(0)
    await feed.aclose()
    async with asyncio.timeout(1):
        assert not await waiting


async def no_pubsub_clients(redis: Redis) -> bool:
    return await pubsub_clients(redis) == []


async def test_a_control_message_reaches_its_worker_alone(redis: Redis) -> None:
    control = Control(redis, KEYS)
    message = ControlMessage(uuid4(), 3, ControlAction.CANCEL)
    mine, others = list[ControlMessage](), list[ControlMessage]()
    assert not await control.send("worker-1", message)
    listening = [
        asyncio.create_task(control.listen("worker-1", mine.append)),
        asyncio.create_task(control.listen("worker-2", others.append)),
    ]
    await eventually(lambda: control.send("worker-1", message), within=5, what="worker-1 listens")
    await eventually(lambda: mine, within=5, what="the message")
    assert mine == [message]
    assert others == []
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    await eventually(lambda: no_pubsub_clients(redis), within=5, what="the connections are closed")


async def test_a_publication_wakes_who_listens_for_work(redis: Redis) -> None:
    woken: list[int] = []
    listening = asyncio.create_task(Control(redis, KEYS).listen_for_work(woken.append))
    await eventually(lambda: redis.publish(KEYS.wake, 0), within=5, what="somebody listens")
    await WorkStream(redis, KEYS).publish([uuid4(), uuid4()])
    await eventually(lambda: woken == [0, 2], within=5, what="the wake")
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
