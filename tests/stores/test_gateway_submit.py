"""Submissions: idempotency, the answer, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_bench import NAME, NAMESPACE, Room, gateway
from waiting import eventually

from agentrun.bus.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def published(room: Room, count: int) -> set[str]:
    """The runs on the work stream, once there are so many."""
    stream = Keys(NAMESPACE, NAME).runs

    async def there() -> bool:
        return await room.redis.xlen(stream) >= count

    await eventually(there, within=5, what=f"{count} runs are published")
    return {entry[b"run"].decode() for _, entry in await room.redis.xrange(stream)}


async def test_an_accepted_message_is_stored_answered_and_published(room: Room) -> None:
    response = await room.submit("hello", session="s1")
    body = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/runs/{body['run_id']}"
    assert body["events_url"] == f"/v1/runs/{body['run_id']}/events"
    assert (body["status"], body["session"]) == ("pending", "s1")
    assert "idempotency-replayed" not in response.headers
    assert await published(room, 1) == {body["run_id"]}
    run = (await room.get(f"/v1/runs/{body['run_id']}")).json()
    assert run["input"] == {"input": "hello"}
    assert run["waiting"]["reason"] == "no_worker_yet"


async def test_only_the_head_of_a_session_is_published(room: Room) -> None:
    first = (await room.submit("one", session="s1")).json()["run_id"]
    second = (await room.submit("two", session="s1")).json()["run_id"]
    third = (await room.submit("other", session="s2")).json()["run_id"]
    assert await published(room, 2) == {first, third}
    assert (await room.get(f"/v1/runs/{second}")).json()["waiting"]["reason"] == "behind_earlier_run"


@pytest.mark.parametrize("session", [None, "s1"])
async def test_id_02_pg_06_fifty_parallel_requests_with_one_key_make_one_run(
    database_url: str, redis_url: str, tmp_path: Path, session: str | None
) -> None:
    async with gateway(database_url, redis_url, tmp_path) as one, gateway(database_url, redis_url, tmp_path) as two:
        answers = await asyncio.gather(
            *((one, two)[number % 2].submit("pay", session=session, Idempotency_Key="k1") for number in range(50))
        )
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["run_id"] for answer in answers}) == 1
        assert len({answer.json()["session"] for answer in answers}) == 1
        assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
        assert await one.count("runs") == await one.count("inputs") == await one.count("sessions") == 1


async def test_pg_06_a_request_that_waits_for_a_rival_s_transaction_gets_the_rival_s_run(room: Room) -> None:
    first = await room.submit("pay", session="s1", Idempotency_Key="k0")
    async with room.pool.acquire() as rival, rival.transaction():
        await rival.execute("SELECT 1 FROM sessions FOR NO KEY UPDATE")
        waiting = [asyncio.create_task(room.submit("pay", session="s1", Idempotency_Key="k1")) for _ in range(50)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
    answers = await asyncio.gather(*waiting)
    assert len({answer.json()["run_id"] for answer in answers}) == 1
    assert answers[0].json()["run_id"] != first.json()["run_id"]


async def test_id_01_a_key_with_another_body_is_refused_and_stores_nothing(room: Room) -> None:
    first = await room.submit("one", session="s1", Idempotency_Key="k1")
    second = await room.submit("two", session="s1", Idempotency_Key="k1")
    assert second.status_code == 422
    assert second.headers["content-type"] == "application/problem+json"
    assert second.json()["code"] == "idempotency_key_reused"
    assert await room.count("runs") == await room.count("inputs") == 1
    assert (await room.submit("one", session="s1", Idempotency_Key="k1")).json()["run_id"] == first.json()["run_id"]


async def test_id_01_two_bodies_racing_for_one_key_are_one_run_and_refusals(room: Room) -> None:
    answers = await asyncio.gather(
        *(room.submit(f"text {number % 2}", session="s1", Idempotency_Key="k1") for number in range(20))
    )
    assert sorted({answer.status_code for answer in answers}) == [202, 422]
    assert await room.count("runs") == 1


async def test_a_key_means_something_only_within_its_user_and_session(room: Room) -> None:
    answers = [
        await room.submit("x", session="s1", Idempotency_Key="k"),
        await room.submit("y", session="s2", Idempotency_Key="k"),
        await room.submit("z", Idempotency_Key="k"),
        await room.submit("w", session="s1", user="bob", Idempotency_Key="k"),
    ]
    assert [answer.status_code for answer in answers] == [202] * 4
    assert await room.count("runs") == 4


async def test_id_06_another_spelling_of_the_same_body_is_the_same_message(room: Room) -> None:
    headers = {**room.authorization(), "Idempotency-Key": "k1", "Content-Type": "application/json"}

    async def send(body: str) -> tuple[int, str]:
        response = await room.http.post("/v1/sessions/s/messages", content=body.encode(), headers=headers)
        return response.status_code, response.json().get("run_id", response.json().get("code"))

    first = await send('{"input":{"a":1,"b":[1,2],"t":"é"}}')
    for spelling in (
        ' { "input" : { "b" : [ 1 , 2 ],\n "a":1, "t":"é"} } ',
        '{"input":{"t":"\\u00e9","b":[1,2],"a":1}}',
        '{"\\u0069nput":{"b":[1,2],"t":"é","a":1}}',
    ):
        assert await send(spelling) == first
    assert await send('{"input":{"a":1,"b":[1,2],"t":"e"}}') == (422, "idempotency_key_reused")
    assert await send('{"input":{"a":1,"b":[2,1],"t":"é"}}') == (422, "idempotency_key_reused")
    assert await room.count("runs") == 1


@pytest.mark.parametrize(
    ("key", "status"),
    [("x", 202), ("!~" + "k" * 253, 202), ("k" * 256, 400), ("", 400), ("a b", 400), ("kéy", 400), ("a\x7f", 400)],
)
async def test_id_06_keys_that_can_and_cannot_be_used(room: Room, key: str, status: int) -> None:
    response = await room.http.post(
        "/v1/runs",
        json={"input": "x"},
        headers=[(b"Authorization", room.authorization()["Authorization"].encode()), (b"Idempotency-Key", key.encode())],
    )
    assert response.status_code == status
    assert await room.count("runs") == (status == 202)


async def test_id_06_a_key_sent_twice_is_refused(room: Room) -> None:
    authorization = (b"Authorization", room.authorization()["Authorization"].encode())
    response = await room.http.post(
        "/v1/runs",
        json={"input": "x"},
        headers=[authorization, (b"Idempotency-Key", b"a"), (b"Idempotency-Key", b"b")],
    )
    assert (response.status_code, response.json()["code"]) == (400, "invalid_header")


async def test_without_a_key_the_same_words_at_once_are_one_run(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, dedupe_seconds=86_400) as room:
        answers = await asyncio.gather(*(room.submit("again", session="s") for _ in range(5)))
        assert len({answer.json()["run_id"] for answer in answers}) == 1
        other = await room.submit("something else", session="s")
        assert other.status_code == 202
        assert other.json()["run_id"] != answers[0].json()["run_id"]
        alone = [await room.submit("again"), await room.submit("again")]
        assert alone[0].json() == alone[1].json() | {"status": alone[0].json()["status"]}


async def test_without_deduplication_each_request_without_a_key_is_a_run(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path, dedupe_seconds=0) as room:
        answers = [await room.submit("again"), await room.submit("again")]
        assert len({answer.json()["run_id"] for answer in answers}) == 2
        keys = await room.pool.fetch("SELECT id, idempotency_key FROM runs")
        assert {row["idempotency_key"] for row in keys} == {f"run:{row['id']}" for row in keys}
        keyed = [await room.submit("again", Idempotency_Key="k"), await room.submit("again", Idempotency_Key="k")]
        assert keyed[0].json()["run_id"] == keyed[1].json()["run_id"]


async def test_a_suspended_gateway_takes_nothing_and_can_be_read(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path) as room:
        run_id = (await room.submit("before", session="s")).json()["run_id"]

    async with gateway(database_url, redis_url, tmp_path, suspend=True) as room:
        for session in ("s", None):
            refused = await room.submit("now", session=session, Accept="text/event-stream")
            assert (refused.status_code, refused.json()["code"]) == (503, "suspended")
            assert int(refused.headers["retry-after"]) >= 10
        assert await room.pool.fetchval("SELECT count(*) FROM runs") == 1
        assert (await room.get(f"/v1/runs/{run_id}")).json()["status"] == "pending"
        assert (await room.get("/readyz")).status_code == 200
        assert (await room.http.post(f"/v1/runs/{run_id}/cancel", headers=room.authorization())).status_code == 202


async def test_a_run_of_its_own_can_be_talked_to_further(room: Room) -> None:
    first = (await room.submit("hi", Idempotency_Key="k")).json()
    assert first["session"].startswith("run:")
    second = (await room.submit("more", session=first["session"])).json()
    assert second["session_id"] == first["session_id"]


async def test_id_03_a_request_that_failed_leaves_its_key_free(room: Room) -> None:
    refused = await room.http.post(
        "/v1/runs", content=b"{}", headers={**room.authorization(), "Idempotency-Key": "k", "Content-Type": "application/json"}
    )
    assert refused.status_code == 400
    assert await room.count("runs") == await room.count("sessions") == 0
    assert (await room.submit("x", Idempotency_Key="k")).status_code == 202


JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 64 + b'"x"' + b"]" * 64
BAD: list[tuple[str, bytes, dict[str, str], int]] = [
    ("nothing", b"", JSON, 400),
    ("no JSON", b"hello", JSON, 400),
    ("half of it", b'{"input": "x"', JSON, 400),
    ("trailing garbage", b'{"input": "x"} {}', JSON, 400),
    ("a byte order mark", b'\xef\xbb\xbf{"input": "x"}', JSON, 400),
    ("a list", b'["x"]', JSON, 400),
    ("a text", b'"x"', JSON, 400),
    ("null", b"null", JSON, 400),
    ("no input", b"{}", JSON, 400),
    ("null input", b'{"input": null}', JSON, 400),
    ("a number as input", b'{"input": 1}', JSON, 400),
    ("true as input", b'{"input": true}', JSON, 400),
    ("empty text", b'{"input": ""}', JSON, 400),
    ("empty list", b'{"input": []}', JSON, 400),
    ("empty object", b'{"input": {}}', JSON, 400),
    ("unknown member", b'{"input": "x", "prompt": "y"}', JSON, 400),
    ("NUL escape", b'{"input": "a\\u0000b"}', JSON, 400),
    ("NUL byte", b'{"input": "a\x00b"}', JSON, 400),
    ("NUL in a key", b'{"input": {"a\\u0000": 1}}', JSON, 400),
    ("NUL deep inside", b'{"input": [{"a": ["\\u0000"]}]}', JSON, 400),
    ("lone high surrogate", b'{"input": "\\ud800"}', JSON, 400),
    ("lone high surrogate before text", b'{"input": "\\ud83dxyz and more"}', JSON, 400),
    ("lone low surrogate", b'{"input": "x\\udc00y"}', JSON, 400),
    ("lone surrogate in a key", b'{"input": {"\\ud800": 1}}', JSON, 400),
    ("surrogate in UTF-8", b'{"input": "\xed\xa0\x80"}', JSON, 400),
    ("invalid UTF-8", b'{"input": "\xff"}', JSON, 400),
    ("cut UTF-8", b'{"input": "\xf0\x9f\x98"}', JSON, 400),
    ("overlong UTF-8", b'{"input": "\xc0\x80"}', JSON, 400),
    ("NaN", b'{"input": [NaN]}', JSON, 400),
    ("Infinity", b'{"input": [-Infinity]}', JSON, 400),
    ("a number out of range", b'{"input": [1e999]}', JSON, 400),
    ("a very long integer", b'{"input": [' + b"9" * 5000 + b"]}", JSON, 400),
    ("65 levels", b'{"input": [' + DEEP + b"]}", JSON, 400),
    ("10000 levels", b'{"input": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", JSON, 400),
    ("10000 levels of objects", b'{"input": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", JSON, 400),
    ("raw line break in a text", b'{"input": "a\nb"}', JSON, 400),
    ("a member twice", b'{"input": "x", "input": "y"}', JSON, 400),
    ("a member twice, spelt differently", b'{"input": "x", "\\u0069nput": "y"}', JSON, 400),
    ("a member twice inside", b'{"input": [{"a": {"b": 1, "c": ":", "b": 1}}]}', JSON, 400),
    ("no content type", b'{"input": "x"}', {}, 415),
    ("text/plain", b'{"input": "x"}', {"Content-Type": "text/plain"}, 415),
    ("a form", b"input=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("UTF-16", b'{"input": "x"}', {"Content-Type": "application/json; charset=utf-16"}, 415),
    ("UTF-16 after another parameter", b'{"input": "x"}', {"Content-Type": 'application/json; a="x;y"; charset="utf-16"'}, 415),
    ("two character sets", b'{"input": "x"}', {"Content-Type": "application/json; charset=utf-8; charset=utf-16"}, 415),
    ("gzip", b'{"input": "x"}', {**JSON, "Content-Encoding": "gzip"}, 415),
    ("too large", b'{"input": "' + b"x" * 65536 + b'"}', JSON, 413),
]


async def test_bad_input_is_a_problem_and_stores_nothing(room: Room) -> None:
    for what, body, headers, status in BAD:
        for path in ("/v1/runs", "/v1/sessions/s/messages"):
            response = await room.http.post(path, content=body, headers={**room.authorization(), **headers})
            assert response.status_code == status, (what, response.text)
            assert response.headers["content-type"] == "application/problem+json", what
            problem = response.json()
            assert problem["status"] == status, what
            assert problem["type"] == f"urn:agentrun:problem:{problem['code']}", what
            assert problem["detail"], what
    assert await room.count("runs") == await room.count("sessions") == await room.count("inputs") == 0


SURROGATES = ["lone high surrogate", "lone high surrogate before text", "lone low surrogate", "lone surrogate in a key"]


@pytest.mark.parametrize("what", SURROGATES)
async def test_half_of_a_surrogate_pair_is_called_so(room: Room, what: str) -> None:
    body = next(body for name, body, _, _ in BAD if name == what)
    response = await room.http.post("/v1/runs", content=body, headers={**room.authorization(), **JSON})
    assert "half of a surrogate pair" in response.json()["detail"]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON ; Charset=UTF-8",
        'application/json; charset="utf-8"',
        'application/json;charset=utf8; profile="a;b=\\"c"',
        "application/json; version=1",
        "application/json;",
    ],
)
async def test_json_may_be_announced_in_every_spelling(room: Room, content_type: str) -> None:
    headers = {**room.authorization(), "Content-Type": content_type}
    response = await room.http.post("/v1/runs", content=b'{"input": {"a:b": ":", "c": [{"a": 1}, {"a": 2}]}}', headers=headers)
    assert response.status_code == 202, response.text


GOOD: list[Any] = [
    "a",
    " ",
    "\\u0000 is six characters",
    "😀 \u2028 \u0085 \ufffd \ufeff",
    "line\nbreak\r\ttab",
    [0],
    [None],
    {"": ""},
    {"a": [1, -1.5, True, None, {"b": []}]},
    json.loads("[" * 64 + "]" * 64),
    [18446744073709551615, 10**30, 0.1, -1e-7],
]


async def test_good_input_comes_back_as_it_was(room: Room) -> None:
    for value in GOOD:
        response = await room.submit(value, session="s")
        assert response.status_code == 202, (value, response.text)
        run = (await room.get(f"/v1/runs/{response.json()['run_id']}")).json()
        assert run["input"] == {"input": value}


BAD_SESSIONS = ["%00", "a%0Ab", "%FF", "%ED%A0%80", "x" * 256, "%C2%85", "%2E", "%2e%2E", "a%2Fb", "%2f"]
BAD_SESSIONS += ["%E2%80%AE", "a%E2%80%A8b", "%E2%80%A9", "%E2%81%A6", "%20", "a%20", "%C2%A0a"]


async def test_a_session_s_name_is_checked(room: Room) -> None:
    for name in BAD_SESSIONS:
        response = await room.http.post(f"/v1/sessions/{name}/messages", json={"input": "x"}, headers=room.authorization())
        assert (response.status_code, response.json()["code"]) == (400, "invalid_parameter"), name
        response = await room.get(f"/v1/sessions/{name}/messages")
        assert response.status_code == 400, name
    response = await room.http.post("/v1/sessions/a/b/messages", json={"input": "x"}, headers=room.authorization())
    assert response.status_code == 404
    for name in ("x" * 255, "a b%20c", "%F0%9F%98%80", "%E2%80%8D", "..%3B", "%25"):
        response = await room.http.post(f"/v1/sessions/{name}/messages", json={"input": "x"}, headers=room.authorization())
        assert response.status_code == 202, (name, response.text)
    assert await room.count("sessions") == 6


async def test_the_limit_of_a_body_holds_to_the_byte_announced_or_not(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with gateway(database_url, redis_url, tmp_path, max_body_bytes=2000) as room:
        frame = len(b'{"input":""}')

        async def chunks(body: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(body), 700):
                yield body[start : start + 700]

        for length, status in ((2000, 202), (2001, 413)):
            body = b'{"input":"' + b"x" * (length - frame) + b'"}'
            assert len(body) == length
            headers = {**room.authorization(), **JSON, "Idempotency-Key": f"{length}-bytes"}
            assert (await room.http.post("/v1/runs", content=body, headers=headers)).status_code == status
            response = await room.http.post("/v1/runs", content=chunks(body), headers=headers)
            assert "content-length" not in response.request.headers
            assert response.status_code == status
        assert await room.count("runs") == 1


async def test_one_bad_member_does_not_fail_its_group(room: Room) -> None:
    await room.pool.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.content::text LIKE '%poison%' "
        "THEN RAISE EXCEPTION 'no' USING ERRCODE = 'data_exception'; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON inputs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    answers = await asyncio.gather(
        *(room.submit("poison" if number == 7 else f"text {number}", session=f"s{number}") for number in range(30)),
        return_exceptions=True,
    )
    statuses = [answer.status_code for answer in answers if not isinstance(answer, BaseException)]
    assert sorted(statuses) == [202] * 29 + [500]
    assert await room.count("runs") == 29
    await room.pool.execute("DROP FUNCTION refuse CASCADE")
