"""A run's events to its readers: whole, in order, once, however the pieces get lost."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from gateway_bench import NAME, NAMESPACE, PlayedWorker, Room, gateway, shared_gateway
from sse_client import EventStream, Frame, StreamCutError, StreamRefusedError, open_stream
from store_servers import Databases
from waiting import eventually

from agentrun.bus.keys import Keys
from agentrun.dev.stores import StoreUrls
from agentrun.domain.events import Event, Kind
from agentrun.gateway.log import EventLog
from agentrun.gateway.process import Timing
from agentrun.store import transitions
from agentrun.store.transitions import Reason, TakeOver

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = Timing(heartbeat_seconds=0.5, poll_seconds=0.1, most_bytes=200_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Databases, store_urls: StoreUrls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Room]:
    async with shared_gateway(databases, store_urls, tmp_path_factory.mktemp("gateway"), timing=QUICK) as room:
        yield room


def ids(frames: list[Frame]) -> list[int]:
    return [int(frame.id) if frame.id is not None else -100 for frame in frames]


def text_of(frames: list[Frame]) -> str:
    return "".join(event["data"]["text"] for event in map(Frame.json, frames) if event["kind"] == "text_delta")


def kinds(frames: list[Frame]) -> list[str]:
    return [frame.json()["kind"] for frame in frames]


async def started(room: Room) -> PlayedWorker:
    return await room.work_on(await room.new_run())


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (None, list(range(10))),
        ("-1", list(range(10))),
        ("0", list(range(1, 10))),
        ("3", list(range(4, 10))),
        ("8", [9]),
        ("9", None),
        ("10", 400),
        ("11", 400),
        ("999999999999999", 400),
        ("9" * 400, 400),
        ("-2", 400),
        ("text", 400),
        ("", 400),
        ("1.0", 400),
        ("+1", 400),
        ("0x1", 400),
        ("1e0", 400),
        ("1 2", 400),
        ("1_0", 400),
        ("\xb2", 400),
    ],
)
async def test_se_02_every_position_gives_what_follows_it_or_a_clear_refusal(
    room: Room, position: str | None, expected: Any
) -> None:
    run_id = await room.finished_run(10)
    if expected == 400:
        with pytest.raises(StreamRefusedError) as refused:
            async with room.follow(run_id, last_event_id=position):
                pass
        assert (refused.value.status, refused.value.json()["code"]) == (400, "invalid_cursor")
        return
    async with room.follow(run_id, last_event_id=position) as stream:
        assert stream.status == (204 if expected is None else 200)
        frames = await stream.rest(within=2)
    assert ids(frames) == (expected or [])


async def test_se_02_the_header_wins_over_the_query_and_neither_may_be_there_twice(room: Room) -> None:
    run_id = await room.finished_run(10)
    async with room.follow(run_id, query="?after=7") as stream:
        assert ids(await stream.rest()) == [8, 9]
    async with room.follow(run_id, query="?after=2", last_event_id="7") as stream:
        assert ids(await stream.rest()) == [8, 9]
    for query, headers in (("?after=1&after=1", {}), ("?after=x", {}), ("", {"last-event-id": "1", "Last-Event-ID": "1"})):
        with pytest.raises(StreamRefusedError) as refused:
            async with room.follow(run_id, query=query, headers=headers):
                pass
        assert refused.value.status == 400


async def test_the_answer_has_the_headers_and_frames_that_every_decoder_reads(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["cache-control"] == "no-cache, no-transform"
        assert "content-encoding" not in stream.headers
        await stream.until_comment(within=5)
        await worker.say("a")
        await stream.take(1)
        await stream.until_comment(within=5)
        await worker.finish()
        await stream.rest()
        body = stream.body
    assert b"\r" not in body and b"\n\n\n" not in body and not body.startswith(b"\xef\xbb\xbf")
    assert body.count(b"retry: 2000\n") == 1
    assert b"retry: 2000\nid: 0\ndata: {" in body
    assert body.count(b": hb\n") >= 2
    assert b": hb\n\n" not in body
    for block in body.removesuffix(b"\n\n").split(b"\n\n"):
        assert sum(line.startswith(b"data: {") for line in block.split(b"\n")) == 1
        assert sum(line.startswith(b"id: ") for line in block.split(b"\n")) == 1


async def test_se_03_what_is_said_between_replay_and_live_arrives_once(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await started(room)
    await worker.say("before ")
    await worker.flush()
    replay, paused, go_on = EventLog.replay, asyncio.Event(), asyncio.Event()

    async def slow_replay(self: EventLog, run_id: UUID, *, after: int) -> list[Event]:
        found = await replay(self, run_id, after=after)
        if not found:
            paused.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(EventLog, "replay", slow_replay)
    async with room.follow(worker.run_id) as stream:
        await paused.wait()
        await worker.say("in between ")
        await worker.finish()
        go_on.set()
        frames = await stream.rest(within=2)
    assert ids(frames) == [0, 1, 2]
    assert text_of(frames) == "before in between "


async def test_se_04_reconnecting_in_the_middle_neither_loses_nor_repeats(room: Room) -> None:
    worker = await started(room)

    async def work() -> None:
        for number in range(500):
            await worker.say(f"{number} ")
            if number % 50 == 49:
                await worker.flush()
            await asyncio.sleep(0.003)
        await worker.finish()

    working = asyncio.create_task(work())
    seen: list[Frame] = []
    for turn in range(21):
        async with room.follow(worker.run_id, last_event_id=seen[-1].id if seen else None) as stream:
            seen += await (stream.take(1 + turn) if turn < 20 else stream.rest(within=20))
    await working
    assert ids(seen) == list(range(501))
    assert text_of(seen) == "".join(f"{number} " for number in range(500))


async def test_se_05_a_run_that_ended_before_anybody_looked_is_told_whole(room: Room) -> None:
    run_id = await room.finished_run(300)
    async with room.follow(run_id) as stream:
        frames = await stream.rest(within=2)
    assert ids(frames) == list(range(300))
    assert kinds(frames)[-1] == "completed"


async def test_se_05_an_end_that_only_postgres_knows_is_found_with_the_next_heartbeat(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as stream:
        await worker.say("a")
        await stream.take(1)
        await worker.finish(send=False)
        frames = await stream.rest(within=2)
    assert kinds(frames) == ["completed"]


async def test_se_07_the_position_of_another_run_is_refused(room: Room) -> None:
    long, short = await room.finished_run(20), await room.finished_run(5)
    with pytest.raises(StreamRefusedError) as refused:
        async with room.follow(short, last_event_id="19"):
            pass
    assert (refused.value.status, refused.value.json()["top"]) == (400, 4)
    async with room.follow(long, last_event_id="18") as stream:
        assert ids(await stream.rest()) == [19]


async def test_se_07_a_position_within_the_reserved_numbers_of_a_running_run_is_honest(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id, last_event_id="127"):
        pass
    with pytest.raises(StreamRefusedError) as refused:
        async with room.follow(worker.run_id, last_event_id="128"):
            pass
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "line\nfeed",
        "carriage\rreturn",
        "both\r\n",
        "\n\n\n",
        "data: forged\n\nid: 99\ndata: x\n\n",
        "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e",
        "\ufeff\ufffd😀",
        ": hb\n",
        '\\n \\u0000 "quoted"',
    ],
)
async def test_se_09_text_with_line_ends_stays_as_it_was(room: Room, text: str) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as live:
        await worker.say(text)
        worker.make(Kind.ITEM_ADDED, {"item": 1, "type": "tool_call", "call_id": text, "name": text})
        await worker.finish(text)
        seen_live = await live.rest()
    async with room.follow(worker.run_id) as replayed:
        seen_later = await replayed.rest()
    assert [frame.json() for frame in seen_live] == [frame.json() for frame in seen_later]
    assert [frame.data for frame in seen_live] == [frame.data for frame in seen_later]
    assert seen_live[0].json()["data"]["text"] == text
    assert seen_live[1].json()["data"]["name"] == text
    assert seen_live[2].json()["data"]["output"] == text
    assert ids(seen_live) == [0, 1, 2]


async def test_se_10_idle_streams_hold_no_database_connection(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, pool_size=2) as room:
        run_id = await room.new_run()
        streams = [room.follow(run_id if number % 2 else await room.new_run()) for number in range(30)]
        for stream in streams:
            await stream.__aenter__()
        async with asyncio.timeout(1):
            other = await room.new_run()
            assert (await room.get(f"/v1/runs/{other}")).status_code == 200
        states = await room.pool.fetch(
            "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'agentrun-gateway'"
        )
        assert {row["state"] for row in states} <= {"idle", "active"}
        assert len(states) <= 2
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def test_se_18_two_readers_one_late_one_slow_both_get_everything(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as early:
        await worker.say("0 ")
        first = await early.take(1)
        for number in range(1, 100):
            await worker.say(f"{number} ")
        async with room.follow(worker.run_id) as late:
            for number in range(100, 200):
                await worker.say(f"{number} ")
            await worker.finish()
            seen_late = await late.rest()
        seen_early = first + await early.rest()
    assert ids(seen_early) == ids(seen_late) == list(range(201))
    assert [frame.data for frame in seen_early] == [frame.data for frame in seen_late]


@contextlib.asynccontextmanager
async def stalled_reader(room: Room, run_id: UUID) -> AsyncIterator[EventStream]:
    """A reader whose own buffer is small, so that it takes nothing from the network while it does not read."""
    where = urlsplit(room.base_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1024)
    authorization = room.authorization()["Authorization"]
    writer.write(f"GET /v1/runs/{run_id}/events HTTP/1.1\r\nHost: x\r\nAuthorization: {authorization}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    try:
        yield EventStream(200, {"transfer-encoding": "chunked"}, reader)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_se_17_a_reader_that_stalls_is_cut_alone_and_resumes_whole(room: Room) -> None:
    worker = await started(room)
    text = "x" * 20_000
    seen = []
    async with stalled_reader(room, worker.run_id) as stalled, room.follow(worker.run_id) as quick:
        await worker.say("0")
        await quick.take(1)
        for _ in range(600):  # 12 MB: more than both kernels' buffers and the gateway's bound together
            await worker.say(text)
        await worker.finish(send=True)
        assert ids(await quick.rest(within=20))[-1] == 601
        with pytest.raises((StreamCutError, ConnectionError)):
            async for frame in stalled:
                seen.append(frame.id)
    assert len(seen) < 600
    async with room.follow(worker.run_id, last_event_id=seen[-1] if seen else None) as resumed:
        frames = await resumed.rest(within=20)
    assert ids(frames) == list(range(len(seen), 602))


async def test_a_client_too_many_is_asked_to_come_back_later(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, timing=Timing(most_viewers=2)) as room:
        run_id, ended = await room.new_run(), await room.finished_run(2)
        url = f"{room.base_url}/v1/runs"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(room.follow(run_id))
            async with room.follow(run_id) as third:
                with pytest.raises(StreamCutError):
                    await third.rest(within=5)
            assert (third.status, third.retry) == (200, 15_000)  # a browser's EventSource never comes back after a 503
            response = await room.get(f"/v1/runs/{run_id}/events")
            assert (response.status_code, response.json()["code"]) == (503, "overloaded")
            with pytest.raises(StreamRefusedError) as refused:
                async with open_stream(url, method="POST", headers=room.authorization(), json_body={"input": "hi"}):
                    pass
            assert (refused.value.status, refused.value.json()["code"]) == (503, "overloaded")
            assert await room.count("runs") == 2
            async with room.follow(ended, last_event_id="1") as nothing_more:
                assert nothing_more.status == 204

        async def served() -> bool:
            async with room.follow(ended) as stream:
                with contextlib.suppress(StreamCutError):
                    return ids(await stream.rest(within=5)) == [0, 1]
            return False

        await eventually(served, within=5, what="there is room again")


async def test_large_events_are_replayed_in_small_pages(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = await room.finished_run(100, text="x" * 100_000)
    pages: list[int] = []
    replay = EventLog.replay

    async def seen(self: EventLog, run_id: UUID, *, after: int) -> list[Event]:
        found = await replay(self, run_id, after=after)
        pages.append(sum(len(event.data) for event in found))
        return found

    monkeypatch.setattr(EventLog, "replay", seen)
    async with room.follow(run_id) as stream:
        assert ids(await stream.rest(within=20)) == list(range(100))
    assert max(pages) < 500_000


async def test_se_20_a_second_run_of_the_session_is_seen_where_the_first_was(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """At the gateway that took the messages and at another one; the numbers of each run begin at 0, also after Redis lost everything."""
    async with gateway(database_url, redis_url, tmp_path) as one, gateway(database_url, redis_url, tmp_path) as other:
        for turn in range(3):
            worker = await one.work_on(await one.new_run(session="s"))
            async with one.follow(worker.run_id) as here, other.follow(worker.run_id) as there:
                await worker.say(f"a{turn}")
                await worker.finish()
                for stream in (here, there):
                    frames = await stream.rest()
                    assert ids(frames) == [0, 1] and text_of(frames) == f"a{turn}"
            if turn:
                await one.redis.flushall()


async def test_a_message_that_the_channel_lost_is_refilled_from_the_stream(room: Room) -> None:
    worker = await started(room)
    keys = Keys(NAMESPACE, NAME)
    async with room.follow(worker.run_id) as stream:
        await worker.say("a")
        await stream.take(1)
        lost = worker.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": "b"})
        await room.redis.xadd(keys.run(worker.run_id), {"e": lost.encode()}, id=f"{lost.seq + 1}-0")
        await worker.say("c")
        frames = await stream.take(2, within=0.4)
    assert text_of(frames) == "bc"


async def test_a_message_that_redis_lost_is_refilled_from_postgres(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as stream:
        await worker.say("a")
        await stream.take(1)
        worker.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": "b"})
        await worker.flush()
        await worker.say("c")
        assert text_of(await stream.take(2, within=0.4)) == "bc"


async def test_a_hole_that_nobody_can_fill_yet_waits_for_postgres(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as stream:
        await worker.say("a")
        await stream.take(1)
        worker.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": "b"})
        await worker.say("c")
        with pytest.raises(AssertionError):
            await stream.take(1, within=0.3)
        await worker.flush()
        assert text_of(await stream.take(2, within=2)) == "bc"


async def test_a_reader_further_back_than_the_others_gets_everything_after_a_flush(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as first:
        for number in range(5):
            await worker.say(f"{number} ")
        await first.take(5)
        await room.redis.flushall()
        async with room.follow(worker.run_id) as second:
            await worker.say("5 ")
            assert text_of(await first.take(1)) == "5 "
            await worker.flush()
            await worker.finish()
            assert ids(await second.rest()) == list(range(7))
        assert ids(await first.rest()) == [6]


async def test_what_was_said_and_never_stored_is_taken_back(room: Room) -> None:
    worker = await started(room)
    async with room.follow(worker.run_id) as stream:
        await worker.say("lost ")
        await stream.take(1)
        await room.pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s'")
        taken = (await transitions.take_over(room.pool, [TakeOver(worker.run_id, Reason.LOST, epoch=1)]))[0]
        await worker.events.append([(worker.run_id, event) for event in taken.events], ttl_seconds=60)
        second = await room.work_on(worker.run_id)
        await second.say("kept ")
        await second.finish()
        frames = await stream.rest(within=5)
    assert ids(frames) == list(range(1, 131))
    assert kinds(frames) == ["void"] * 127 + ["restart", "text_delta", "completed"]
    assert frames[127].json()["data"] == {"keep": -1}
    async with room.follow(worker.run_id) as later:
        assert ids(await later.rest()) == list(range(131))


async def test_a_post_can_be_a_stream_and_be_resumed(room: Room) -> None:
    headers = {**room.authorization(), "Idempotency-Key": "k1"}
    url = f"{room.base_url}/v1/sessions/s/messages"
    async with open_stream(url, method="POST", headers=headers, json_body={"input": "hi"}) as stream:
        assert stream.status == 200
        run_id = UUID(stream.headers["location"].rsplit("/", 1)[1])
        worker = await room.work_on(run_id)
        await worker.say("a")
        await worker.say("b")
        assert ids(await stream.take(2)) == [0, 1]
    await worker.say("c")
    async with open_stream(url, method="POST", headers=headers, json_body={"input": "hi"}, last_event_id="0") as stream:
        assert stream.headers["idempotency-replayed"] == "true"
        await worker.finish()
        assert ids(await stream.rest()) == [1, 2, 3]
    async with open_stream(url, method="POST", headers=headers, json_body={"input": "hi"}, last_event_id="3") as stream:
        assert stream.status == 204
    for key, body, position, status, code in (
        ("k1", {"input": "other"}, "1", 422, "idempotency_key_reused"),
        ("k1", {"input": "hi"}, "4", 400, "invalid_cursor"),
        ("k1", {"input": "hi"}, "x", 400, "invalid_cursor"),
        (None, {"input": "hi"}, "1", 400, "invalid_cursor"),
    ):
        named = {**room.authorization(), **({"Idempotency-Key": key} if key else {})}
        with pytest.raises(StreamRefusedError) as refused:
            async with open_stream(url, method="POST", headers=named, json_body=body, last_event_id=position):
                pass
        assert (refused.value.status, refused.value.json()["code"]) == (status, code)
    assert await room.count("runs") == 1


@pytest.mark.parametrize("session", ["s", None])
async def test_a_resumed_post_starts_nothing(room: Room, session: str | None) -> None:
    url = f"{room.base_url}/v1/sessions/{session}/messages" if session else f"{room.base_url}/v1/runs"

    async def refused(key: str | None, position: str, text: str = "hi", user: str = "ann") -> tuple[int, str]:
        named = {**room.authorization(user), **({"Idempotency-Key": key} if key else {})}
        with pytest.raises(StreamRefusedError) as error:
            async with open_stream(url, method="POST", headers=named, json_body={"input": text}, last_event_id=position):
                pass
        return error.value.status, error.value.json()["code"]

    for position in ("0", "3", "999999999"):
        assert await refused("k", position) == (400, "invalid_cursor")
    assert await room.count("runs") == await room.count("sessions") == 0

    first = await room.submit("hi", session=session, Idempotency_Key="k")
    run_id = UUID(first.json()["run_id"])
    assert await refused("k", "0") == (400, "invalid_cursor")  # a run that nobody has worked on has given out no number
    worker = await room.work_on(run_id)
    await worker.say("a")
    assert await refused("k", "128") == (400, "invalid_cursor")
    assert await refused("k", "0", text="other") == (422, "idempotency_key_reused")
    assert await refused("k", "0", user="bob") == (400, "invalid_cursor")
    assert await refused("l", "0") == (400, "invalid_cursor")
    await worker.say("b")
    await worker.finish()
    headers = {**room.authorization(), "Idempotency-Key": "k"}
    async with open_stream(url, method="POST", headers=headers, json_body={"input": "hi"}, last_event_id="0") as stream:
        assert stream.headers["location"] == f"/v1/runs/{run_id}"
        assert stream.headers["idempotency-replayed"] == "true"
        assert ids(await stream.rest()) == [1, 2]
    assert await refused("k", "3") == (400, "invalid_cursor")
    async with open_stream(url, method="POST", headers=headers, json_body={"input": "hi"}, last_event_id="-1") as stream:
        assert ids(await stream.rest()) == [0, 1, 2]
    assert await room.count("runs") == 1


async def test_head_and_unknown_runs_are_answered_at_once(room: Room) -> None:
    run_id = await room.new_run()
    response = await room.http.head(f"/v1/runs/{run_id}/events", headers=room.authorization())
    assert response.status_code == 200
    for unknown in (uuid4(), "x", str(run_id).upper(), "%00"):
        assert (await room.get(f"/v1/runs/{unknown}/events")).status_code == 404


async def test_cancelling_ends_the_stream_and_lets_the_next_run_go(room: Room) -> None:
    worker = await room.work_on(await room.new_run(session="s"))
    waiting = await room.new_run(session="s")
    control: asyncio.Queue[Any] = asyncio.Queue()
    subscription = room.redis.pubsub()
    await subscription.subscribe(Keys(NAMESPACE, NAME).control("w"))
    await subscription.get_message(timeout=2)
    async with room.follow(worker.run_id) as stream:
        await worker.say("a")
        await stream.take(1)
        await worker.flush()
        response = await room.http.post(f"/v1/runs/{worker.run_id}/cancel", headers=room.authorization())
        assert (response.status_code, response.json()["status"]) == (202, "cancelled")
        frames = await stream.rest(within=2)
    assert kinds(frames)[-2:] == ["restart", "cancelled"]
    assert frames[-2].json()["data"] == {"keep": 0}
    told = await subscription.get_message(timeout=2)
    assert json.loads(told["data"]) == {"run_id": str(worker.run_id), "epoch": 1, "action": "cancel"}
    await subscription.aclose()
    assert control.empty()

    async def published() -> bool:
        return str(waiting).encode() in await room.redis.hkeys(Keys(NAMESPACE, NAME).entries)

    await eventually(published, within=5, what="the session's next run is published")
    again = await room.http.post(f"/v1/runs/{worker.run_id}/cancel", headers=room.authorization())
    assert (again.status_code, again.json()) == (202, response.json())
    async with room.follow(worker.run_id) as later:
        assert ids(await later.rest()) == list(range(int(frames[-1].id or "") + 1))
