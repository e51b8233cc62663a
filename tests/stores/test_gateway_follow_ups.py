"""What clients see of Merge, Enqueue and Reject, over HTTP on a real gateway."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from gateway_bench import Room, gateway
from waiting import eventually

from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.keys import Keys
from agentrun.domain.errors import StoreUnavailable
from agentrun.store import follow_ups
from agentrun.store.ids import new_id

KEYS = Keys("test", "agent")


@pytest.fixture
async def merging(database_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Room]:
    async with gateway(database_url, redis_url, tmp_path, policy="Merge") as room:
        yield room


@pytest.fixture
async def rejecting(database_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Room]:
    async with gateway(database_url, redis_url, tmp_path, policy="Reject") as room:
        yield room


async def test_a_follow_up_supersedes_and_everybody_is_told(merging: Room) -> None:
    first = await merging.new_run("one", session="s")
    worker = await merging.work_on(first)
    await worker.say("half an ans")
    heard: asyncio.Queue[ControlMessage] = asyncio.Queue()
    listening = asyncio.create_task(Control(merging.redis, KEYS).listen("w", heard.put_nowait))
    await eventually(lambda: _listeners(merging), within=5, what="the worker listens")
    async with merging.follow(first, within=10) as stream:
        seen = [(await anext(stream)).json()]
        second = await merging.new_run("two", session="s")
        seen += [frame.json() async for frame in stream]
    assert [event["seq"] for event in seen] == list(range(len(seen)))
    assert (seen[-1]["kind"], seen[-1]["data"]) == ("superseded", {"by": str(second)}), "its stream ends, and says where to go on"
    told = await asyncio.wait_for(heard.get(), 5)
    assert (told.run_id, told.epoch, told.action) == (first, 1, ControlAction.CANCEL)
    listening.cancel()

    old, new = [(await merging.get(f"/v1/runs/{run}")).json() for run in (first, second)]
    assert (old["status"], old["superseded_by"], old["output"]) == ("superseded", str(second), None)
    assert [one["outcome"] for one in old["attempts"]] == ["interrupted"]
    assert [(one["content"], one["sent_with"], one["held_by"], one["fate"]) for one in old["inputs"]] == [
        ("one", str(first), str(second), None)
    ]
    assert [(one["content"], one["sent_with"]) for one in new["inputs"]] == [("one", str(first)), ("two", str(second))]
    assert new["input"] == {"input": "two"} and new["waiting"]["reason"] == "no_worker_yet"

    await (await merging.work_on(second)).finish("both")
    messages = (await merging.get("/v1/sessions/s/messages")).json()["messages"]
    assert [(one["role"], one["content"], one["run_id"], one["fate"]) for one in messages] == [
        ("agent", "both", str(second), None),
        ("user", "two", str(second), "answered_in"),
        ("user", "one", str(second), "answered_in"),
    ]
    cancel = await merging.http.post(f"/v1/runs/{first}/cancel", headers=merging.authorization())
    assert (cancel.status_code, cancel.json()["run_status"]) == (409, "superseded")
    resumed = await merging.http.get(
        f"/v1/runs/{first}/events", headers=merging.authorization() | {"Last-Event-ID": str(seen[-1]["seq"])}
    )
    assert resumed.status_code == 204


async def _listeners(room: Room) -> bool:
    return bool((await room.redis.pubsub_numsub(KEYS.control("w")))[0][1])


async def test_a_streaming_post_that_is_superseded_ends_with_where_to_go_on(merging: Room) -> None:
    first = asyncio.create_task(merging.submit("one", session="s", Accept="text/event-stream", Idempotency_Key="a"))

    async def stored() -> bool:
        return await merging.count("runs") == 1

    await eventually(stored, within=5, what="the first message is stored")
    second = await merging.new_run("two", session="s")
    answer = await asyncio.wait_for(first, 10)
    assert '"kind":"superseded"' in answer.text and str(second) in answer.text


async def test_the_same_message_again_neither_supersedes_nor_is_refused(merging: Room, rejecting: Room) -> None:
    for room in (merging, rejecting):
        answers = [await room.submit("one", session=f"again-{id(room)}", Idempotency_Key="k") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["run_id"] for answer in answers}) == 1
        assert [answer.headers.get("Idempotency-Replayed") for answer in answers] == [None, "true", "true"]


async def test_reject_is_409_stores_nothing_and_the_same_key_is_decided_anew(rejecting: Room) -> None:
    first = await rejecting.new_run("one", session="s")
    worker = await rejecting.work_on(first)
    refused = await rejecting.submit("two", session="s", Idempotency_Key="k")
    assert refused.status_code == 409 and refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert (problem["code"], problem["run_id"], problem["run_status"]) == ("session_busy", str(first), "running")
    assert (await rejecting.count("runs"), await rejecting.count("inputs")) == (1, 1)
    await worker.finish()
    accepted = await rejecting.submit("two", session="s", Idempotency_Key="k")
    assert accepted.status_code == 202 and "Idempotency-Replayed" not in accepted.headers
    assert (await rejecting.submit("elsewhere", session="t")).status_code == 202


async def test_what_follows_an_effect_waits_its_turn(merging: Room) -> None:
    first = await merging.new_run("refund it", session="s")
    worker = await merging.work_on(first)
    await merging.pool.execute(
        "INSERT INTO effects (chain_id, name, key, run_id, epoch, token) VALUES ($1, 'refund', 'o-1', $1, 1, $2)", first, new_id()
    )
    second = await merging.new_run("hurry", session="s")
    run = (await merging.get(f"/v1/runs/{second}")).json()
    assert (run["status"], run["waiting"]["reason"]) == ("pending", "behind_earlier_run")
    shown = (await merging.get(f"/v1/runs/{first}")).json()
    assert [(one["name"], one["key"], one["state"], one["attempt"], one["tries"]) for one in shown["effects"]] == [
        ("refund", "o-1", "initiated", 1, 1)
    ]
    await worker.finish()


async def test_fifty_clients_post_to_one_session_at_once(merging: Room) -> None:
    """One after the other, in one run at the end; plain submissions to other sessions go on beside them."""
    plain = asyncio.gather(*(merging.submit(f"p{number}", session=f"own-{number}") for number in range(50)))
    answers = await asyncio.gather(*(merging.submit(f"m{number}", session="s") for number in range(50)))
    assert {answer.status_code for answer in [*answers, *await plain]} == {202}
    runs = {UUID(answer.json()["run_id"]) for answer in answers}
    assert len(runs) == 50
    rows = await merging.pool.fetch(
        "SELECT r.id, r.status, r.superseded_by FROM runs r JOIN sessions s ON s.id = r.session_id WHERE s.external_id = 's' "
        "ORDER BY session_position"
    )
    assert [row["status"] for row in rows] == ["superseded"] * 49 + ["pending"]
    assert [row["superseded_by"] for row in rows] == [row["id"] for row in rows[1:]] + [None], "each by the next"
    held = await merging.pool.fetch("SELECT run_id FROM inputs WHERE held_by = $1 ORDER BY position", rows[-1]["id"])
    assert [row["run_id"] for row in held] == [row["id"] for row in rows]


async def test_messages_of_one_gateway_keep_their_order_while_others_are_decided(merging: Room) -> None:
    """A later message does not overtake one that left its group, although the session has become idle by then."""
    first = await merging.new_run("0", session="s")
    worker = await merging.work_on(first)
    held, original = asyncio.Event(), follow_ups.follow_up

    async def slow(*args: object, **options: object) -> object:
        await held.wait()
        return await original(*args, **options)  # type: ignore[arg-type]

    with patch.object(follow_ups, "follow_up", slow):
        second = asyncio.create_task(merging.submit("1", session="s"))
        await asyncio.sleep(0.1)
        await worker.finish()
        third = asyncio.create_task(merging.submit("2", session="s"))
        other = await merging.submit("elsewhere", session="t")
        assert other.status_code == 202 and not second.done() and not third.done(), "nobody else waits for them"
        held.set()
        assert [(await task).status_code for task in (second, third)] == [202, 202]
    order = await merging.pool.fetch(
        "SELECT content FROM inputs i JOIN sessions s ON s.id = i.session_id WHERE external_id = 's' ORDER BY position"
    )
    assert [row["content"] for row in order] == ['"0"', '"1"', '"2"']


async def test_while_postgres_is_away_a_follow_up_is_503_and_may_be_sent_again(merging: Room) -> None:
    await merging.new_run("one", session="s")

    async def away(*args: object, **options: object) -> object:
        raise StoreUnavailable("gone")

    with patch.object(follow_ups, "follow_up", away):
        answers = await asyncio.gather(*(merging.submit(str(n), session="s", Idempotency_Key=f"k{n}") for n in range(5)))
    assert {answer.status_code for answer in answers} == {503}
    assert await merging.count("runs") == 1
    again = [await merging.submit(str(n), session="s", Idempotency_Key=f"k{n}") for n in range(5)]
    assert {answer.status_code for answer in again} == {202} and await merging.count("runs") == 6


async def test_a_lost_reply_is_the_new_run_and_not_a_replay(merging: Room) -> None:
    await merging.new_run("one", session="s")
    original, calls = follow_ups.follow_up, 0

    async def lossy(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        answer = await original(*args, **options)  # type: ignore[arg-type]
        if calls == 1:
            raise StoreUnavailable("the reply is lost")
        return answer

    with patch.object(follow_ups, "follow_up", lossy):
        answer = await merging.submit("two", session="s", Idempotency_Key=secrets.token_hex(4))
    assert answer.status_code == 202 and "Idempotency-Replayed" not in answer.headers
    assert await merging.count("runs") == 2
