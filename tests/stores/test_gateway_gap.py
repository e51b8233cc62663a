"""A client whose events are not there any more, or too many, gets their text instead, and misses nothing."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from gateway_bench import PlayedWorker, Room, gateway
from sse_client import Frame, StreamCutError

from agentrun.domain.events import GAP, Kind
from agentrun.domain.reducer import Transcript
from agentrun.domain.states import RunStatus
from agentrun.gateway.process import Timing
from agentrun.store import messages, retention, transitions
from agentrun.store.transitions import Finish, Reason, TakeOver

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 100


def write_message(worker: PlayedWorker, pieces: int, *, item: int = 0, whole: bool = True) -> None:
    texts = [f"{item}.{number} " for number in range(pieces)]
    worker.make(Kind.ITEM_ADDED, {"item": item, "type": "message"})
    for text in texts:
        worker.make(Kind.TEXT_DELTA, {"item": item, "part": 0, "text": text})
    if whole:
        worker.make(Kind.TEXT_DONE, {"item": item, "part": 0, "text": "".join(texts)})
        worker.make(Kind.ITEM_DONE, {"item": item})


def said(items: int, pieces: int) -> str:
    return "".join(f"{item}.{number} " for item in range(items) for number in range(pieces))


async def archived(room: Room, *, items: int = 2, pieces: int = 10) -> tuple[UUID, int]:
    """A finished run whose deltas have gone, and the seq of its end."""
    worker = await room.work_on(await room.new_run())
    for item in range(items):
        write_message(worker, pieces, item=item)
    end = await worker.finish(send=False)
    await archive(room)
    return worker.run_id, end.seq


async def archive(room: Room) -> None:
    await room.pool.execute("UPDATE runs SET finished_at = finished_at - interval '1 hour' WHERE finished_at IS NOT NULL")
    done = await retention.archive(room.pool, age_seconds=60, runs=100, events=100_000)
    assert done.runs


def reduced(frames: list[Frame]) -> Transcript:
    transcript = Transcript()
    for frame in frames:
        one: dict[str, Any] = frame.json()
        assert ("seq" in one) == (one["kind"] != GAP)
        transcript.feed(one.get("seq"), one["kind"], one["data"])
    return transcript


def kinds(frames: list[Frame]) -> list[str]:
    return [frame.json()["kind"] for frame in frames]


async def test_an_archived_run_is_sent_up_to_its_hole_then_as_text_then_its_end(room: Room) -> None:
    run, end = await archived(room)
    async with room.follow(run) as stream:
        frames = await stream.rest()
    assert kinds(frames) == ["item_added", GAP, "completed"]
    gap = frames[1]
    assert gap.json() == {"kind": GAP, "data": {"parts": [{"through": end - 1, "text": said(2, 10)}]}}
    assert b"id:" not in gap.raw
    assert (reduced(frames).text, frames[-1].id) == (said(2, 10), str(end))


@pytest.mark.parametrize("behind", [0, 1, 2, 5, 13, 20])
async def test_from_any_position_the_client_has_the_whole_text(room: Room, behind: int) -> None:
    worker = await room.work_on(await room.new_run())
    write_message(worker, 8)
    write_message(worker, 8, item=1)
    end = await worker.finish(send=False)
    before = await messages.after(room.pool, worker.run_id, after=-1)
    await archive(room)
    cursor = end.seq - 1 - behind
    transcript = Transcript()
    for one in before[: cursor + 1]:
        transcript.feed(one.seq, one.kind, json.loads(one.data))
    async with room.follow(worker.run_id, last_event_id=str(cursor)) as stream:
        frames = await stream.rest()
    for frame in frames:
        transcript.feed(frame.json().get("seq"), frame.json()["kind"], frame.json()["data"])
    assert (transcript.text, transcript.end, transcript.cursor) == (said(2, 8), Kind.COMPLETED, end.seq)


async def test_at_the_end_there_is_nothing_more_and_above_it_is_refused(room: Room) -> None:
    run, end = await archived(room)
    async with room.follow(run, last_event_id=str(end)) as stream:
        assert stream.status == 204
    response = await room.http.get(f"/v1/runs/{run}/events?after={end + 1}", headers=room.authorization())
    assert (response.status_code, response.json()["code"]) == (400, "invalid_cursor")


async def test_a_run_that_failed_in_a_sentence_keeps_what_it_had_said(room: Room) -> None:
    worker = await room.work_on(await room.new_run())
    write_message(worker, 5)
    write_message(worker, 3, item=1, whole=False)
    await worker.flush()
    await transitions.take_over(room.pool, [TakeOver(worker.run_id, Reason.CANCELLED)])
    await archive(room)
    async with room.follow(worker.run_id) as stream:
        frames = await stream.rest()
    assert reduced(frames).text == said(1, 5) + "1.0 1.1 1.2 "


async def test_a_post_that_is_sent_again_resumes_an_archived_run(room: Room) -> None:
    first = await room.submit("hello", session="s", Idempotency_Key="k")
    worker = await room.work_on(UUID(first.json()["run_id"]))
    write_message(worker, 10)
    await worker.finish(send=False)
    await archive(room)
    headers = {**room.authorization(), "Accept": "text/event-stream", "Idempotency-Key": "k", "Last-Event-ID": "0"}
    response = await room.http.post("/v1/sessions/s/messages", json={"input": "hello"}, headers=headers)
    assert (response.status_code, response.headers["idempotency-replayed"]) == (200, "true")
    assert '"kind":"gap"' in response.text and said(1, 10) in response.text


async def test_who_is_too_far_behind_a_running_run_gets_a_gap_and_then_every_event(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path, timing=Timing(heartbeat_seconds=1.0), replay_limit=LIMIT) as room:
        worker = await room.work_on(await room.new_run())
        write_message(worker, LIMIT)
        write_message(worker, 5, item=1)
        await worker.flush()
        closed = worker.seq
        write_message(worker, 3, item=2, whole=False)
        await worker.flush()
        async with room.follow(worker.run_id) as stream:
            frames = await stream.take(5)
            assert kinds(frames) == [GAP, "item_added", "text_delta", "text_delta", "text_delta"]
            assert stream.body.startswith(b"retry: ") and frames[0].json()["data"]["parts"][-1]["through"] == closed
            worker.make(Kind.TEXT_DELTA, {"item": 2, "part": 0, "text": "2.3 "})
            worker.make(Kind.TEXT_DONE, {"item": 2, "part": 0, "text": "2.0 2.1 2.2 2.3 "})
            await worker.finish()
            frames += await stream.rest()
        assert reduced(frames).text == said(1, LIMIT) + "1.0 1.1 1.2 1.3 1.4 " + "2.0 2.1 2.2 2.3 "
        assert [frame.id for frame in frames[1:]] == [str(seq) for seq in range(closed + 1, worker.seq + 1)]

        async with room.follow(worker.run_id, last_event_id=str(worker.seq - LIMIT)) as stream:
            assert GAP not in kinds(await stream.rest()), "no more behind than the limit"


async def test_a_restart_takes_back_the_part_after_the_checkpoint(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, timing=Timing(heartbeat_seconds=1.0), replay_limit=LIMIT) as room:
        worker = await room.work_on(await room.new_run())
        write_message(worker, LIMIT)
        await worker.flush()
        kept = worker.seq
        await room.pool.execute("UPDATE attempts SET checkpoint = '1', checkpoint_seq = $1", kept)
        write_message(worker, 3, item=1)
        await worker.flush()
        async with room.follow(worker.run_id) as stream:
            frames = await stream.take(1)
            parts = frames[0].json()["data"]["parts"]
            assert [(part["through"], part["text"]) for part in parts] == [(kept, said(1, LIMIT)), (worker.seq, "1.0 1.1 1.2 ")]
            await room.pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s'")
            (taken,) = await transitions.take_over(room.pool, [TakeOver(worker.run_id, Reason.LOST, epoch=1)])
            assert taken.ok
            second = await room.work_on(worker.run_id)
            write_message(second, 2, item=1)
            await second.finish("done")
            frames += await stream.rest()
        assert reduced(frames).text == said(1, LIMIT) + "1.0 1.1 "


async def test_a_reader_that_is_overtaken_by_the_archive_is_cut_and_resumes_with_a_gap(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path, timing=Timing(heartbeat_seconds=0.5, poll_seconds=0.1)) as room:
        worker = await room.work_on(await room.new_run())
        write_message(worker, 3, whole=False)
        await worker.flush()
        async with room.follow(worker.run_id) as stream:
            seen = await stream.take(4)
            for number in range(3, 20):
                worker.make_text(f"0.{number} ")
            worker.make(Kind.TEXT_DONE, {"item": 0, "part": 0, "text": said(1, 20)})
            # as after a pause of an hour: the gateway learns of all this when it has gone
            async with room.pool.acquire() as conn, conn.transaction():
                await transitions.finish(conn, [end_of(worker)])
                await conn.execute("UPDATE runs SET finished_at = finished_at - interval '1 hour'")
                assert (await retention.archive(conn, age_seconds=60, runs=1, events=1000)).events == 20
            with pytest.raises(StreamCutError):
                await stream.rest()
        async with room.follow(worker.run_id, last_event_id=stream.last_event_id) as stream:
            seen += await stream.rest()
        assert reduced(seen).text == said(1, 20) and kinds(seen)[-2:] == [GAP, "completed"]


def end_of(worker: PlayedWorker) -> Finish:
    worker.make(Kind.COMPLETED, {"output": "x"})
    result = '{"output": "x", "messages": []}'
    return Finish(worker.run_id, worker.epoch, RunStatus.SUCCEEDED, result=result, events=worker.unstored)


async def test_a_run_that_is_deleted_while_it_is_followed_ends_the_stream(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path, timing=Timing(heartbeat_seconds=0.5, poll_seconds=0.1)) as room:
        run = await room.new_run()
        async with room.follow(run) as stream:
            await room.pool.execute("DELETE FROM inputs")
            await room.pool.execute("DELETE FROM runs")
            with pytest.raises(StreamCutError):
                await stream.rest()
        assert (await room.get(f"/v1/runs/{run}/events")).status_code == 404
