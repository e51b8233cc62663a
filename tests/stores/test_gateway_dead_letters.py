"""Dead letters and unsettled effects over HTTP and on the command line: reading, redriving, discarding, settling."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from commands import command
from gateway_bench import Room, gateway

from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.states import RunStatus
from agentrun.store import effects, transitions
from agentrun.store.effects import Begin
from agentrun.store.ids import new_id
from agentrun.store.transitions import Finish, Reason, TakeOver

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def put_aside(room: Room, text: str = "poison", *, user: str = "ann", session: str | None = None) -> UUID:
    run = await room.new_run(text, session=session, user=user)
    for epoch in (1, 2):
        await room.work_on(run)
        await room.pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1", run)
        await transitions.take_over(room.pool, [TakeOver(run, Reason.LOST, epoch=epoch)], max_lost_attempts=2)
    return run


async def unsettled(room: Room, *, user: str = "ann", keys: tuple[str, ...] = ("o-1",), cancelled: bool = False) -> UUID:
    """A run that has ended with effects of which nobody knows what came."""
    run = await room.new_run("refund", user=user)
    await room.work_on(run)
    for key in keys:
        await effects.begin(room.pool, [Begin(run, 1, new_id(), "refund", key, '{"cents": 5}', again=False)])
    if cancelled:
        await transitions.take_over(room.pool, [TakeOver(run, Reason.CANCELLED)])
    else:
        error = {"type": "effect_unknown", "message": "look"}
        events = [Event(0, 1, Kind.FAILED, encode_data({"error": error}))]
        await transitions.finish(room.pool, [Finish(run, 1, RunStatus.FAILED, error=json.dumps(error), events=events)])
    return run


async def post(room: Room, path: str, *, user: str = "ann", **options: Any) -> httpx2.Response:
    return await room.http.post(path, headers=room.authorization(user), **options)


async def settle(room: Room, run: UUID, *, user: str = "root", **body: Any) -> httpx2.Response:
    return await post(room, f"/v1/runs/{run}/effects/settle", user=user, json={"name": "refund", "key": "o-1", **body})


async def test_a_dead_letter_shows_everything_that_is_known(room: Room) -> None:
    run = await put_aside(room, "poison", session="s")
    (listed,) = (await room.get("/v1/dead-letters")).json()["dead_letters"]
    found = (await room.get(f"/v1/dead-letters/{run}")).json()
    assert {name: found[name] for name in listed} == listed
    assert (found["session"], found["user"], found["state"], found["reason"]) == ("s", "ann", "open", "lost_too_often")
    assert (found["payload"], found["inputs"], found["attempts"]) == ({"input": "poison"}, ["poison"], 2)
    assert [(one["attempt"], one["outcome"]) for one in found["tries"]] == [(1, "lost"), (2, "lost")]
    assert all(one["owner"].startswith("w/") for one in found["tries"])


async def test_a_redrive_is_answered_like_a_submission_and_again_with_the_same_run(room: Room) -> None:
    run = await put_aside(room, session="s")
    first = await post(room, f"/v1/dead-letters/{run}/redrive")
    assert (first.status_code, first.json()["replayed"], "idempotency-replayed" in first.headers) == (202, False, False)
    again = await post(room, f"/v1/dead-letters/{run}/redrive")
    assert (again.status_code, again.json()["replayed"], again.headers["idempotency-replayed"]) == (202, True, "true")
    new = first.json()["run_id"]
    assert again.json()["run_id"] == new and first.headers["location"] == f"/v1/runs/{new}"
    assert first.json()["session"] == "s"
    worker = await room.work_on(UUID(new))
    await worker.finish("done")
    assert (await room.get(f"/v1/runs/{new}")).json()["output"] == "done"
    assert (await room.get(f"/v1/runs/{run}")).json()["status"] == "failed"
    assert (await room.get("/v1/dead-letters")).json()["dead_letters"] == []
    (closed,) = (await room.get("/v1/dead-letters?state=redriven")).json()["dead_letters"]
    assert closed["redriven_run_id"] == new
    refused = await post(room, f"/v1/dead-letters/{run}/discard")
    assert (refused.status_code, refused.json()["code"], refused.json()["redriven_run_id"]) == (409, "dead_letter_closed", new)


async def test_a_discarded_letter_is_closed_and_stays_known(room: Room) -> None:
    run = await put_aside(room)
    for _ in range(2):
        response = await post(room, f"/v1/dead-letters/{run}/discard")
        assert (response.status_code, response.json()["state"]) == (200, "discarded")
    refused = await post(room, f"/v1/dead-letters/{run}/redrive")
    assert (refused.status_code, refused.json()["code"]) == (409, "dead_letter_closed")
    assert (await room.get(f"/v1/dead-letters/{run}")).json()["inputs"] == ["poison"]
    assert await room.count("runs") == 1


async def test_letters_come_in_pages_by_state_and_user(room: Room) -> None:
    mine = [str(await put_aside(room, f"p{n}")) for n in range(5)][::-1]
    other = str(await put_aside(room, user="bob"))
    seen, after = [], ""
    while True:
        page = (await room.get(f"/v1/dead-letters?limit=2{after}")).json()
        seen += [one["run_id"] for one in page["dead_letters"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert seen == mine
    everybody = (await room.get("/v1/dead-letters", user="root")).json()["dead_letters"]
    assert [one["run_id"] for one in everybody] == [other, *mine]
    of_bob = (await room.get("/v1/dead-letters?user=bob&state=all", user="root")).json()["dead_letters"]
    assert [one["run_id"] for one in of_bob] == [other]
    for query in ("state=nonsense", "after=x", "limit=0"):
        assert (await room.get(f"/v1/dead-letters?{query}")).status_code == 400, query


async def test_a_run_that_was_not_put_aside_is_no_dead_letter(room: Room) -> None:
    run = await room.new_run()
    for path in (f"/v1/dead-letters/{run}", f"/v1/dead-letters/{uuid4()}", "/v1/dead-letters/x"):
        assert (await room.get(path)).status_code == 404
        assert (await post(room, f"{path}/redrive")).status_code == 404
        assert (await post(room, f"{path}/discard")).status_code == 404


async def test_while_the_agent_is_suspended_nothing_is_redriven(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, suspend=True) as asleep:
        response = await post(asleep, f"/v1/dead-letters/{uuid4()}/redrive")
        assert (response.status_code, response.json()["code"]) == (503, "suspended")


async def test_unsettled_effects_are_listed_once_their_run_has_ended(room: Room) -> None:
    first = await unsettled(room, keys=("o-1", "o-2"))
    second = await unsettled(room, cancelled=True)
    other = await unsettled(room, user="bob")
    going_on = await room.new_run()
    await room.work_on(going_on)
    await effects.begin(room.pool, [Begin(going_on, 1, new_id(), "refund", "o-9", None, again=False)])
    found = (await room.get("/v1/effects")).json()["effects"]
    assert [(one["run_id"], one["key"]) for one in found] == [(str(second), "o-1"), (str(first), "o-1"), (str(first), "o-2")]
    assert (found[0]["state"], found[0]["request"], found[0]["tries"]) == ("initiated", {"cents": 5}, 1)
    page = (await room.get("/v1/effects?limit=1", user="root")).json()
    assert [one["run_id"] for one in page["effects"]] == [str(other)]
    page = (await room.get(f"/v1/effects?limit=1&after={second}")).json()
    assert [one["key"] for one in page["effects"]] == ["o-1", "o-2"], "all of a run"
    assert (await room.get(f"/v1/effects?after={page['next']}")).json() == {"effects": [], "next": None}


async def test_a_person_says_what_came_of_a_call(room: Room) -> None:
    run = await unsettled(room)
    for _ in range(2):
        response = await settle(room, run, state="done", response={"id": "refund 4711"})
        assert (response.status_code, response.json()["state"]) == (200, "done")
    (effect,) = (await room.get(f"/v1/runs/{run}")).json()["effects"]
    assert effect["state"] == "done" and effect["settled_at"]
    for body in ({"state": "failed"}, {"state": "done", "response": "another"}):
        refused = await settle(room, run, **body)
        assert (refused.status_code, refused.json()["code"], refused.json()["state"]) == (409, "effect_settled", "done")
    assert (await room.get("/v1/effects")).json()["effects"] == []


async def test_only_an_admin_settles_and_only_what_there_is(room: Room) -> None:
    run = await unsettled(room)
    assert (await settle(room, run, user="ann", state="failed")).json()["code"] == "forbidden"
    assert (await settle(room, run, user="bob", state="failed")).status_code == 404
    assert (await settle(room, run, key="o-2", state="failed")).status_code == 404
    assert (await settle(room, uuid4(), state="failed")).status_code == 404
    going_on = await room.new_run()
    await room.work_on(going_on)
    await effects.begin(room.pool, [Begin(going_on, 1, new_id(), "refund", "o-1", None, again=False)])
    refused = await settle(room, going_on, state="failed")
    assert (refused.status_code, refused.json()["state"]) == (409, "initiated")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"name":"refund","key":"o-1"}',
        b'{"name":"refund","key":"o-1","state":"unknown"}',
        b'{"name":"refund","key":"o-1","state":"failed","response":1}',
        b'{"name":"refund","key":"o-1","state":"done","response":"\\u0000"}',
        b'{"name":"refund","key":"o-1","state":"done","response":"\\ud800"}',
        b'{"name":"refund","key":"o-1","state":"done","more":1}',
        b'{"name":"refund","key":"x","key":"o-1","state":"done"}',
        b'{"name":"refund","key":"o-1","state":"done","response":' + b"[" * 70 + b"]" * 70 + b"}",
    ],
)
async def test_a_settlement_that_says_nothing_clear_changes_nothing(room: Room, body: bytes) -> None:
    run = await unsettled(room)
    headers = {**room.authorization("root"), "Content-Type": "application/json"}
    response = await room.http.post(f"/v1/runs/{run}/effects/settle", content=body, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_body")
    assert len((await room.get("/v1/effects")).json()["effects"]) == 1


async def test_a_settlement_is_limited_like_every_body(room: Room) -> None:
    run = await unsettled(room)
    response = await settle(room, run, state="done", response="x" * 70_000)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    headers = {**room.authorization("root"), "Content-Type": "text/plain"}
    response = await room.http.post(f"/v1/runs/{run}/effects/settle", content=b"{}", headers=headers)
    assert response.status_code == 415


async def test_the_command_line_lists_and_settles_effects(room: Room) -> None:
    run = await unsettled(room, keys=("o-1", "o-2"))

    async def agentrun(*arguments: str) -> tuple[int, str, str]:
        return await command(room.base_url, room.keys["root"], "effects", *arguments)

    code, out, err = await agentrun("list")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["RUN", "EFFECT", "KEY", "STATE", "TRIES", "SINCE", "USER"]
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        [str(run), "refund", key, "initiated"] for key in ("o-1", "o-2")
    ]
    assert (await agentrun("settle", str(run), "refund", "o-1", "failed"))[:2] == (0, "refund o-1  failed\n")
    code, out, _ = await agentrun("settle", str(run), "refund", "o-2", "done", "--response", '"4711"', "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")
    assert await room.pool.fetchval("SELECT response #>> '{}' FROM effects WHERE key = 'o-2'") == "4711"
    code, out, err = await agentrun("settle", str(run), "refund", "o-2", "failed")
    assert (code, out) == (2, "") and "on record as done" in err and err.count("\n") == 1
    code, _, err = await agentrun("settle", str(run), "refund", "o-2", "done", "--response", "4711 and")
    assert code == 2 and "--response" in err
    code, out, _ = await agentrun("list", "--json")
    assert (code, out) == (0, "")


async def test_the_command_line_lists_and_discards_dead_letters(room: Room) -> None:
    first, second = await put_aside(room, session="s1"), await put_aside(room, session="s2")

    async def agentrun(*arguments: str) -> tuple[int, str, str]:
        return await command(room.base_url, room.keys["ann"], "dlq", *arguments)

    code, out, _ = await agentrun("list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["RUN", str(second), str(first)]
    code, out, _ = await agentrun("discard", str(first), str(second))
    assert code == 0 and out.count("discarded 20") == 2
    code, out, _ = await agentrun("list", "--state", "discarded", "--json")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["discarded"] * 2
    code, out, err = await agentrun("redrive", str(first))
    assert (code, out) == (2, "") and "discarded" in err
