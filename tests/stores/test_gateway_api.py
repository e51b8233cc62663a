"""What is not submitting or streaming: reading, lists, who sees what, cancelling, errors, the description."""

import asyncio
import re
from typing import Any
from uuid import uuid4

import pytest
from gateway_bench import AGENT, Room

from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.live import LiveFeed
from agentrun.domain.events import Kind
from agentrun.gateway.feeds import Feeds
from agentrun.gateway.log import EventLog
from agentrun.gateway.streams import RunStream, Start, StreamCut
from agentrun.store import transitions
from agentrun.store.transitions import AttemptRef, Reason, TakeOver

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def reason_of(room: Room, run_id: Any) -> str | None:
    waiting = (await room.get(f"/v1/runs/{run_id}")).json()["waiting"]
    return waiting["reason"] if waiting else None


async def test_a_run_says_why_it_waits_until_it_has_ended(room: Room) -> None:
    first, second = await room.new_run(session="s"), await room.new_run(session="s")
    assert await reason_of(room, first) == "no_worker_yet"
    assert await reason_of(room, second) == "behind_earlier_run"
    worker = await room.work_on(first)
    assert await reason_of(room, first) is None
    await room.pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s'")
    assert await reason_of(room, first) == "worker_lost"
    await transitions.renew(room.pool, [AttemptRef(first, 1)], lease_seconds=60)
    retry = TakeOver(first, Reason.RETRYING, epoch=1, last_seq=-1, retry_after=60, error='{"type": "timeout", "message": "slow"}')
    await transitions.take_over(room.pool, [retry])
    run = (await room.get(f"/v1/runs/{first}")).json()
    assert (run["status"], run["waiting"]["reason"], run["error"]["type"]) == ("pending", "retry_later", "timeout")
    await room.pool.execute("UPDATE runs SET not_before = NULL")
    worker = await room.work_on(first)
    worker.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": "x"})
    await worker.finish("the answer", send=False)
    run = (await room.get(f"/v1/runs/{first}")).json()
    assert (run["status"], run["output"], run["waiting"]) == ("succeeded", "the answer", None)
    assert [(one["attempt"], one["outcome"]) for one in run["attempts"]] == [(1, "retrying"), (2, "finished")]
    assert run["usage"]["calls"] == 0
    assert run["created_at"] <= run["started_at"] <= run["finished_at"]
    assert await reason_of(room, second) == "no_worker_yet"


async def test_everybody_sees_their_own_runs_and_an_admin_all(room: Room) -> None:
    mine, other = str(await room.new_run(session="s")), str(await room.new_run(session="s", user="bob"))
    for path in ("", "/events"):
        assert (await room.get(f"/v1/runs/{other}{path}")).status_code == 404
    cancelled = await room.http.post(f"/v1/runs/{other}/cancel", headers=room.authorization())
    assert cancelled.status_code == 404
    unknown = (await room.get(f"/v1/runs/{uuid4()}")).json()
    assert (await room.get(f"/v1/runs/{other}")).json() == unknown
    assert (await room.get(f"/v1/runs/{other}", user="root")).json()["status"] == "pending"

    async def listed(user: str, **headers: str) -> set[str]:
        response = await room.http.get("/v1/runs", headers={**room.authorization(user), **headers})
        return {run["run_id"] for run in response.json()["runs"]}

    assert await listed("ann") == {mine}
    assert await listed("root") == {mine, other}
    assert await listed("backend") == set()
    assert await listed("backend", **{"X-Agentrun-User": "ann"}) == {mine}
    sessions = (await room.get("/v1/sessions")).json()["sessions"]
    assert [(session["session"], session["user"]) for session in sessions] == [("s", "ann")]
    assert len((await room.get("/v1/sessions", user="root")).json()["sessions"]) == 2
    response = await room.http.get("/v1/runs", headers={**room.authorization(), "X-Agentrun-User": "bob"})
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")


async def test_an_admin_sees_everywhere_the_same_and_may_ask_for_one_user(room: Room) -> None:
    for user, session in (("ann", "shared"), ("bob", "shared"), ("bob", "only-bob")):
        await room.new_run(f"{user} says", session=session, user=user)

    async def get(path: str, user: str = "root") -> Any:
        response = await room.get(path, user=user)
        return response.json() if response.status_code == 200 else (response.status_code, response.json()["code"])

    runs, sessions = await get("/v1/runs"), await get("/v1/sessions")
    assert {run["user"] for run in runs["runs"]} == {session["user"] for session in sessions["sessions"]} == {"ann", "bob"}
    assert [run["user"] for run in (await get("/v1/runs?user=ann"))["runs"]] == ["ann"]
    assert [one["session"] for one in (await get("/v1/sessions?user=bob"))["sessions"]] == ["only-bob", "shared"]
    assert (await get("/v1/runs?user=nobody"))["runs"] == []
    for session in sessions["sessions"]:  # whatever is listed can be read
        held = await get(f"/v1/sessions/{session['session']}/messages?user={session['user']}")
        assert [item["content"] for item in held["messages"]] == [f"{session['user']} says"]
    assert [item["content"] for item in (await get("/v1/sessions/only-bob/messages"))["messages"]] == ["bob says"]
    assert await get("/v1/sessions/shared/messages") == (400, "invalid_parameter")
    assert await get("/v1/sessions/only-bob/messages?user=ann") == (404, "not_found")
    assert (await get(f"/v1/runs/{runs['runs'][0]['run_id']}"))["user"] == "bob"
    for path in ("/v1/runs", "/v1/sessions", "/v1/sessions/shared/messages"):
        assert await get(f"{path}?user=bob", "ann") == (403, "forbidden")
        assert await get(f"{path}?user=ann", "ann") == await get(path, "ann")
        assert await get(f"{path}?user=a%00b") == (400, "invalid_parameter")


async def test_a_backend_acts_for_its_users(room: Room) -> None:
    response = await room.submit("hi", session="s", user="backend", X_Agentrun_User="zoe")
    assert response.status_code == 202
    assert await room.pool.fetchval("SELECT user_id FROM runs") == "zoe"


PATHS = ["/v1/runs", "/v1/runs/x", "/v1/runs/x/events", "/v1/sessions", "/v1/sessions/s/messages"]


async def test_without_a_key_there_is_nothing_but_health_and_the_description(room: Room) -> None:
    for path in PATHS:
        response = await room.http.get(path)
        assert (response.status_code, response.json()["code"]) == (401, "unauthenticated"), path
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert response.headers["content-type"] == "application/problem+json"
    for path in ("/v1/runs", "/v1/sessions/s/messages", "/v1/runs/x/cancel"):
        assert (await room.http.post(path, json={"input": "x"})).status_code == 401, path
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert (await room.http.get(path)).status_code == 200, path


async def test_lists_come_in_pages_without_loss_or_repetition(room: Room) -> None:
    runs = [str(await room.new_run(session=f"s{number % 2}")) for number in range(7)]

    async def walk(path: str, member: str, key: str, size: int) -> list[str]:
        found: list[str] = []
        after = ""
        for _ in range(20):
            page = (await room.get(f"{path}{'&' if '?' in path else '?'}limit={size}{after}")).json()
            assert len(page[member]) <= size
            found += [item[key] for item in page[member]]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"
        raise AssertionError("no last page")

    for size in (1, 3, 7, 50):
        assert await walk("/v1/runs", "runs", "run_id", size) == runs[::-1]
        assert await walk("/v1/runs?session=s1&status=pending", "runs", "run_id", size) == runs[1::2][::-1]
        assert await walk("/v1/runs?status=failed", "runs", "run_id", size) == []
        assert await walk("/v1/sessions", "sessions", "session", size) == ["s1", "s0"]


async def test_parameters_that_cannot_be_used_are_a_400(room: Room) -> None:
    for query in (
        "limit=0",
        "limit=201",
        "limit=x",
        "status=done",
        "after=x",
        "after=",
        "session=%00",
        "session=",
        f"session={'x' * 256}",
    ):
        response = await room.get(f"/v1/runs?{query}")
        assert (response.status_code, response.json()["code"]) == (400, "invalid_parameter"), query
    for query in ("limit=0", "after=1", f"after={str(uuid4()).upper()}"):
        assert (await room.get(f"/v1/sessions?{query}")).status_code == 400


async def test_the_messages_of_a_session_are_what_was_said(room: Room) -> None:
    assert (await room.get("/v1/sessions/s/messages")).status_code == 404
    for number in range(3):
        worker = await room.work_on(await room.new_run(f"question {number}", session="s"))
        await worker.finish(f"answer {number}", send=False)
    await room.new_run("question 3", session="s")
    page = (await room.get("/v1/sessions/s/messages?limit=3")).json()
    said = [(item["role"], item["content"]) for item in page["messages"]]
    assert said == [
        ("user", "question 3"),
        *(pair for n in (2, 1) for pair in (("agent", f"answer {n}"), ("user", f"question {n}"))),
    ]
    rest = (await room.get(f"/v1/sessions/s/messages?after={page['next']}")).json()
    assert [item["content"] for item in rest["messages"]] == ["answer 0", "question 0"]
    assert rest["next"] is None
    assert (await room.get("/v1/sessions/s/messages", user="bob")).status_code == 404


async def test_cancelling_twice_gives_one_answer_and_an_ended_run_stays_as_it_is(room: Room) -> None:
    run_id = await room.new_run()

    async def cancel() -> tuple[int, Any]:
        response = await room.http.post(f"/v1/runs/{run_id}/cancel", headers=room.authorization())
        return response.status_code, response.json()

    answers = await asyncio.gather(*(cancel() for _ in range(5)))
    assert {status for status, _ in answers} == {202}
    assert all(answer == answers[0] for answer in answers)
    assert (await room.get(f"/v1/runs/{run_id}")).json()["status"] == "cancelled"
    run_id = await room.finished_run(2)
    status, problem = await cancel()
    assert (status, problem["code"], problem["run_status"]) == (409, "already_finished", "succeeded")


async def test_what_does_not_exist_is_a_problem_too(room: Room) -> None:
    for method, path, status, code in (
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/runs/", 404, "not_found"),
        ("PUT", "/v1/runs", 405, "method_not_allowed"),
        ("DELETE", "/v1/sessions/s/messages", 405, "method_not_allowed"),
        ("POST", "/v1/runs/x/events", 405, "method_not_allowed"),
        ("GET", "/v1/runs/x/cancel", 405, "method_not_allowed"),
    ):
        response = await room.http.request(method, path, headers=room.authorization())
        assert (response.status_code, response.json()["code"]) == (status, code), path
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/runs", {"GET", "POST"}),
        ("DELETE", "/v1/sessions/s/messages", {"GET", "POST"}),
        ("POST", "/v1/runs/x/events", {"GET", "HEAD"}),
        ("POST", "/v1/sessions", {"GET"}),
        ("POST", "/healthz", {"GET", "HEAD"}),
    ],
)
async def test_a_refused_method_is_told_all_that_the_address_takes(room: Room, method: str, path: str, allowed: set[str]) -> None:
    response = await room.http.request(method, path, headers=room.authorization())
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed


async def test_probes_can_be_asked_for_their_head(room: Room) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        response = await room.http.head(path)
        assert (response.status_code, response.content) == (200, b""), path


@pytest.mark.parametrize(
    ("authorization", "told"),
    [
        (None, "Send your API key"),
        ("Basic YTpi", "`Basic` is not taken"),
        ("Bearer", "holds no key"),
        ("ar_x", "is not taken"),
        ("Bearer ar_x", "not known"),
    ],
)
async def test_without_a_valid_key_one_is_told_what_is_wrong(room: Room, authorization: str | None, told: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    response = await room.http.get("/v1/runs", headers=headers)
    assert response.status_code == 401
    assert told in response.json()["detail"]
    assert "YTpi" not in response.text


async def test_the_description_names_every_address(room: Room) -> None:
    document = (await room.http.get("/openapi.json")).json()
    addresses = {(method, path) for path, operations in document["paths"].items() for method in operations}
    assert addresses == {
        ("post", "/v1/sessions/{session}/messages"),
        ("get", "/v1/sessions/{session}/messages"),
        ("post", "/v1/runs"),
        ("get", "/v1/runs"),
        ("get", "/v1/runs/{run_id}"),
        ("get", "/v1/runs/{run_id}/events"),
        ("post", "/v1/runs/{run_id}/cancel"),
        ("get", "/v1/sessions"),
        ("post", "/v1/runs/{run_id}/effects/settle"),
        ("get", "/v1/effects"),
        ("get", "/v1/dead-letters"),
        ("get", "/v1/dead-letters/{run_id}"),
        ("post", "/v1/dead-letters/{run_id}/redrive"),
        ("post", "/v1/dead-letters/{run_id}/discard"),
        ("get", "/v1/cron-tasks"),
        ("get", "/v1/cron-tasks/{name}"),
        ("get", "/v1/cron-tasks/{name}/slots"),
        ("post", "/v1/cron-tasks/{name}/trigger"),
        ("post", "/v1/cron-tasks/{name}/backfill"),
        ("get", "/v1/usage"),
        ("get", "/healthz"),
        ("get", "/readyz"),
        ("get", "/metrics"),
    }
    start = document["paths"]["/v1/runs"]["post"]
    assert {"200", "202", "204", "400", "401", "413", "415", "422", "429", "503"} <= set(start["responses"])
    assert "text/event-stream" in document["paths"]["/v1/runs/{run_id}/events"]["get"]["responses"]["200"]["content"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            parameters = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert parameters == set(re.findall(r"{(\w+)}", path))
            named = {one["name"] for one in operation.get("parameters", []) if one["in"] == "header"}
            assert ("X-Agentrun-User" in named) == path.startswith("/v1/"), path
    names = set(re.findall(r'"#/components/schemas/(\w+)"', str(document).replace("'", '"')))
    assert names == set(document["components"]["schemas"])
    described = {
        (method, path): set(operation["responses"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    everywhere = {"400", "401", "403", "500", "503"}
    assert described["post", "/v1/runs/{run_id}/cancel"] == everywhere | {"202", "404", "409"}
    assert described["get", "/v1/runs"] == described["get", "/v1/sessions"] == everywhere | {"200"}
    assert described["get", "/v1/runs/{run_id}"] == everywhere | {"200", "404"}
    assert described["get", "/healthz"] == {"200"}


TEMPLATES = [
    ("POST", "/v1/sessions/s/messages", "/v1/sessions/{session}/messages", "2xx"),
    ("POST", "/v1/runs", "/v1/runs", "2xx"),
    ("GET", "/v1/runs/RUN/events", "/v1/runs/{run_id}/events", "2xx"),
    ("POST", "/v1/runs/x/events", "/v1/runs/{run_id}/events", "4xx"),
    ("GET", "/v1/runs/x/events", "/v1/runs/{run_id}/events", "4xx"),
    ("GET", "/v1/runs", "/v1/runs", "2xx"),
    ("GET", "/v1/runs/RUN", "/v1/runs/{run_id}", "2xx"),
    ("POST", "/v1/runs/RUN/cancel", "/v1/runs/{run_id}/cancel", "4xx"),
    ("GET", "/v1/sessions", "/v1/sessions", "2xx"),
    ("GET", "/v1/sessions/s/messages", "/v1/sessions/{session}/messages", "2xx"),
    ("GET", "/healthz", "/healthz", "2xx"),
    ("GET", "/v1/nothing", "none", "4xx"),
]


@pytest.mark.parametrize(("method", "path", "template", "status"), TEMPLATES)
async def test_each_request_is_counted_under_its_route_and_not_its_address(
    room: Room, method: str, path: str, template: str, status: str
) -> None:
    run_id = await room.finished_run(1)
    await room.new_run(session="s")

    async def counted() -> dict[str, float]:
        lines = re.findall(r"agentrun_request_seconds_count(\{.*?\}) (.+)", (await room.http.get("/metrics")).text)
        return {labels: float(count) for labels, count in lines if 'route="/metrics"' not in labels}

    before = await counted()
    content = {"json": {"input": "x"}} if method == "POST" else {}
    await room.http.request(method, path.replace("RUN", str(run_id)), headers=room.authorization(), **content)
    changed = {
        labels: count - before.get(labels, 0) for labels, count in (await counted()).items() if count != before.get(labels)
    }
    assert changed == {f'{{route="{template}",status="{status}"}}': 1.0}
    text = (await room.http.get("/metrics")).text
    assert str(run_id) not in text
    assert "agentrun_stream_clients" in text


async def test_se_15_a_reader_that_has_left_before_the_first_byte_is_forgotten(room: Room) -> None:
    keys = Keys(*AGENT.split("/"))
    events = EventStream(room.redis, keys)
    url = "unix://" + room.redis.connection_pool.connection_kwargs["path"]
    run_id = await room.new_run()
    async with LiveFeed(url, keys) as live:
        feeds = Feeds(
            room.pool,
            live,
            EventLog(room.pool, lambda run, after, limit: events.read(run, after=after, limit=limit), replay_limit=1000),
        )
        feeds.start()

        async def left() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            await asyncio.sleep(0)

        async def broken(_message: Any) -> None:
            raise OSError("gone")

        scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}
        stream = RunStream(feeds, run_id, Start(-1, finished=False, at_end=False))
        for number in range(100):
            try:
                await stream(scope, left, broken if number % 2 else send)
            except (OSError, StreamCut):
                pass
            task = asyncio.create_task(stream(scope, left, send))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (feeds.viewers, feeds.runs) == (0, 0)
        await feeds.close()
