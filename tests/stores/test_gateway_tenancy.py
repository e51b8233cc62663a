"""Who sees what, on every route of the gateway: what belongs to somebody else is answered like what does not exist."""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from fastapi.routing import APIRoute
from gateway_bench import Room
from run_factory import ledger_row
from starlette.routing import Route

from agentrun.gateway.app import create_app
from agentrun.gateway.context import Gateway
from agentrun.store import effects, transitions
from agentrun.store.effects import Begin
from agentrun.store.ids import new_id
from agentrun.store.transitions import Flush, Reason, TakeOver

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Rule(Enum):
    """Who may use an address."""

    OBJECT = "whoever may see the object that it names; to others there is none"
    LIST = "everybody, for what is their own; with admin for all"
    NEW = "everybody, for themselves"
    ADMIN = "keys with the scope admin that name no user"
    OPEN = "whoever reaches the port"


RULES = {
    ("POST", "/v1/sessions/{session}/messages"): Rule.NEW,
    ("GET", "/v1/sessions/{session}/messages"): Rule.OBJECT,
    ("GET", "/v1/sessions"): Rule.LIST,
    ("POST", "/v1/runs"): Rule.NEW,
    ("GET", "/v1/runs"): Rule.LIST,
    ("GET", "/v1/runs/{run_id}"): Rule.OBJECT,
    ("GET", "/v1/runs/{run_id}/events"): Rule.OBJECT,
    ("POST", "/v1/runs/{run_id}/cancel"): Rule.OBJECT,
    ("POST", "/v1/runs/{run_id}/effects/settle"): Rule.OBJECT,
    ("GET", "/v1/effects"): Rule.LIST,
    ("GET", "/v1/usage"): Rule.LIST,
    ("GET", "/v1/dead-letters"): Rule.LIST,
    ("GET", "/v1/dead-letters/{run_id}"): Rule.OBJECT,
    ("POST", "/v1/dead-letters/{run_id}/discard"): Rule.OBJECT,
    ("POST", "/v1/dead-letters/{run_id}/redrive"): Rule.OBJECT,
    ("GET", "/v1/cron-tasks"): Rule.ADMIN,
    ("GET", "/v1/cron-tasks/{name}"): Rule.ADMIN,
    ("GET", "/v1/cron-tasks/{name}/slots"): Rule.ADMIN,
    ("POST", "/v1/cron-tasks/{name}/trigger"): Rule.ADMIN,
    ("POST", "/v1/cron-tasks/{name}/backfill"): Rule.ADMIN,
    ("GET", "/healthz"): Rule.OPEN,
    ("GET", "/readyz"): Rule.OPEN,
    ("GET", "/metrics"): Rule.OPEN,
    ("GET", "/openapi.json"): Rule.OPEN,
}
OTHERS = {"bob": {}, "backend": {}, "backend for bob": {"X-Agentrun-User": "bob"}, "chief for bob": {"X-Agentrun-User": "bob"}}
ALLOWED = {"ann": {}, "root": {}, "backend for ann": {"X-Agentrun-User": "ann"}, "chief for ann": {"X-Agentrun-User": "ann"}}
BODIES = {
    "/v1/runs": {"input": "hi"},
    "/v1/sessions/{session}/messages": {"input": "hi"},
    "/v1/runs/{run_id}/effects/settle": {"name": "refund", "key": "o-1", "state": "failed"},
}
TABLES = ("sessions", "runs", "attempts", "messages", "inputs", "ledger", "effects", "dead_letters")


def by_rule(*rules: Rule) -> list[tuple[str, str]]:
    return [route for route, rule in RULES.items() if rule in rules]


async def object_of_ann(room: Room) -> UUID:
    """A run in the session `mine` that cost something and was put aside with an effect of which nobody knows what came: every address can
    name it.
    """
    run = await room.new_run("secret", session="mine")
    await room.work_on(run)
    await effects.begin(room.pool, [Begin(run, 1, new_id(), "refund", "o-1", None, again=False)])
    await transitions.flush(room.pool, [Flush(run, 1, 200, ledger=[ledger_row()])])
    await room.pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1", run)
    await transitions.take_over(room.pool, [TakeOver(run, Reason.LOST, epoch=1)], max_lost_attempts=1)
    return run


async def ask(room: Room, who: str, method: str, template: str, run: object, headers: dict[str, str]) -> httpx2.Response:
    path = template.format(run_id=run, session="mine", name="nightly")
    given = {**room.authorization(who.partition(" ")[0]), **headers}
    body = BODIES.get(template) if method == "POST" else None
    return await room.http.request(method, path, headers=given, json=body)


async def test_every_route_of_the_gateway_has_its_rule() -> None:
    parts: dict[str, Any] = {field.name: None for field in dataclasses.fields(Gateway)}
    app = create_app(Gateway(**{**parts, "ready": lambda: None}))
    routes = {(method, route.path) for route in all_routes(app.routes) for method in (route.methods or ()) if method != "HEAD"}
    assert routes == set(RULES)


def all_routes(routes: Sequence[Any]) -> Iterator[Any]:
    """Every route with a path, those of routers within included."""
    for route in routes:
        if hasattr(route, "original_router"):
            yield from all_routes(route.original_router.routes)
        else:
            assert isinstance(route, Route | APIRoute), f"what is {route!r}?"
            yield route


@pytest.mark.parametrize("who", OTHERS)
@pytest.mark.parametrize(("method", "path"), by_rule(Rule.OBJECT))
async def test_an_object_of_somebody_else_is_not_there(room: Room, method: str, path: str, who: str) -> None:
    run = await object_of_ann(room)
    before = [await room.pool.fetch(f"SELECT * FROM {table}") for table in TABLES]
    found = await ask(room, who, method, path, run, OTHERS[who])
    assert (found.status_code, found.json()["code"]) == (404, "not_found"), found.text
    if "{run_id}" in path:
        assert found.json() == (await ask(room, who, method, path, uuid4(), OTHERS[who])).json(), "as if there were none"
    assert "secret" not in found.text and "ann" not in found.text.replace("cannot", "")
    assert [await room.pool.fetch(f"SELECT * FROM {table}") for table in TABLES] == before


@pytest.mark.parametrize("who", ALLOWED)
@pytest.mark.parametrize(("method", "path"), by_rule(Rule.OBJECT))
async def test_the_same_object_is_there_for_its_user_a_backend_and_an_admin(room: Room, method: str, path: str, who: str) -> None:
    run = await object_of_ann(room)
    found = await ask(room, who, method, path, run, ALLOWED[who])
    assert found.status_code != 404, found.text
    settles = path.endswith("/settle") and who != "root"
    assert found.status_code == (
        403 if settles else 409 if path.endswith("/cancel") else 202 if path.endswith("/redrive") else 200
    )


@pytest.mark.parametrize(("method", "path"), by_rule(Rule.LIST))
async def test_a_list_holds_what_is_ones_own_and_all_for_an_admin(room: Room, method: str, path: str) -> None:
    await object_of_ann(room)

    async def listed(who: str, headers: dict[str, str], query: str = "") -> int:
        response = await ask(room, who, method, path + query, "", headers)
        assert response.status_code == 200, response.text
        (rows,) = [value for name, value in response.json().items() if isinstance(value, list) and name != "group_by"]
        return len(rows)

    assert [await listed(who, headers) for who, headers in ALLOWED.items()] == [1, 1, 1, 1]
    assert [await listed(who, headers) for who, headers in OTHERS.items()] == [0, 0, 0, 0]
    assert [await listed("root", {}, f"?user={user}") for user in ("ann", "bob")] == [1, 0]
    for who, headers in OTHERS.items():
        refused = await ask(room, who, method, path + "?user=ann", "", headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), who


@pytest.mark.parametrize(("method", "path"), by_rule(Rule.NEW))
async def test_what_is_made_belongs_to_who_makes_it(room: Room, method: str, path: str) -> None:
    """The same session name and the same Idempotency-Key: nothing of ann's is found, and nothing of hers is added to."""
    hers = await ask(room, "ann", method, path, "", {"Idempotency-Key": "k"})
    made = await ask(room, "bob", method, path, "", {"Idempotency-Key": "k"})
    assert (made.status_code, made.headers.get("idempotency-replayed")) == (202, None)
    assert made.json()["run_id"] != hers.json()["run_id"] and made.json()["session_id"] != hers.json()["session_id"]
    rows = await room.pool.fetch("SELECT user_id, count(*) FROM runs GROUP BY user_id")
    assert dict(rows) == {"ann": 1, "bob": 1}
    for who in ("backend for ann", "chief for ann"):
        again = await ask(room, who, method, path, "", {"Idempotency-Key": "k", **ALLOWED[who]})
        assert again.json()["run_id"] == hers.json()["run_id"], "who acts for ann is ann"


@pytest.mark.parametrize("who", ["ann", *OTHERS, "chief for ann"])
@pytest.mark.parametrize(("method", "path"), by_rule(Rule.ADMIN))
async def test_what_is_for_admins_is_refused_to_all_others_whether_it_exists_or_not(
    room: Room, method: str, path: str, who: str
) -> None:
    query = "?from=2026-01-01T00:00:00Z" if path.endswith("/backfill") else ""
    found = await ask(room, who, method, path + query, "", {**OTHERS, **ALLOWED}[who])
    assert (found.status_code, found.json()["code"]) == (403, "forbidden")
    assert (await ask(room, "root", method, path + query, "", {})).status_code == (200 if path == "/v1/cron-tasks" else 404)


@pytest.mark.parametrize(("method", "path"), [route for route, rule in RULES.items() if rule is not Rule.OPEN])
async def test_nobody_acts_for_another_without_the_scope_and_nobody_comes_in_without_a_key(
    room: Room, method: str, path: str
) -> None:
    run = await object_of_ann(room)
    for who in ("bob", "root"):  # seeing everything is not acting for everybody
        refused = await ask(room, who, method, path, run, {"X-Agentrun-User": "ann"})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer ar_x_y"}):
        assert (await ask(room, "ann", method, path, run, headers)).status_code == 401
