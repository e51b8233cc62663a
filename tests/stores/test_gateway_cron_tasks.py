"""CronTasks over HTTP and with `agentrun cron`: reading, triggering, backfilling; nothing of it starts a run twice."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
import pytest_asyncio
from commands import command
from gateway_bench import NAME, NAMESPACE, Room, gateway
from run_factory import claimed, event
from store_servers import Databases

from agentrun.dev.stores import StoreUrls
from agentrun.domain.events import Kind
from agentrun.domain.slots import manual_key, minute, run_key
from agentrun.domain.states import RunStatus
from agentrun.scheduler.loop import Firing, News
from agentrun.store import cron_tasks, slots, transitions
from agentrun.store.cron_tasks import Schedule
from agentrun.store.transitions import Finish

pytestmark = pytest.mark.asyncio(loop_scope="module")

MINUTE = timedelta(minutes=1)


class Nobody:
    async def send(self, news: News) -> None:
        """Redis is not told."""


class Tasks:
    """CronTasks as the operator writes them, and a scheduler."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.rows: dict[str, Schedule] = {}
        self.generation = 0

    async def put(self, name: str, *, since: datetime | None = None, uid: UUID | None = None, **spec: Any) -> UUID:
        self.generation += 1
        document = {"name": name, "schedule": "* * * * *", "timeZone": "Etc/UTC", "input": "go on {{slot}}", **spec}
        uid = uid or uuid4()
        self.rows[name] = Schedule(uid, self.generation, json.dumps(document), since or datetime.now(UTC))
        await self.write()
        return uid

    async def write(self) -> None:
        async with self.room.pool.acquire() as conn:
            await cron_tasks.replace(conn, list(self.rows.values()))

    async def tick(self, ahead: timedelta = timedelta()) -> None:
        await Firing(self.room.pool, Nobody(), namespace=NAMESPACE, name=NAME, suspended=False, ahead=ahead).tick()

    async def post(self, path: str, *, user: str = "root", **options: Any) -> httpx2.Response:
        headers = {**self.room.authorization(user), **options.pop("headers", {})}
        return await self.room.http.post(f"/v1/cron-tasks/{path}", headers=headers, **options)

    async def trigger(self, name: str, key: str | None = None) -> dict[str, Any]:
        response = await self.post(f"{name}/trigger", headers={"Idempotency-Key": key} if key else {})
        assert response.status_code == 202, response.text
        return dict(response.json())

    async def backfill(self, name: str, since: datetime, until: datetime | None = None, **query: Any) -> dict[str, Any]:
        params = {"from": since.isoformat(), **({"to": until.isoformat()} if until else {}), **query}
        response = await self.post(f"{name}/backfill", params=params)
        assert response.status_code == 202, response.text
        return dict(response.json())

    async def keys(self) -> list[str]:
        return [row[0] for row in await self.room.pool.fetch("SELECT idempotency_key FROM runs ORDER BY idempotency_key")]


@pytest_asyncio.fixture(loop_scope="module")
async def tasks(room: Room) -> Tasks:
    return Tasks(room)


@pytest.fixture
def hour() -> datetime:
    """The beginning of an hour of which all has passed."""
    return (datetime.now(UTC) - timedelta(hours=2)).replace(minute=0, second=0, microsecond=0)


# Reading


async def test_cron_tasks_are_listed_by_name_with_their_next_three_slots(room: Room, tasks: Tasks) -> None:
    uid = await tasks.put("weekly", schedule="0 9 * * MON", timeZone="Europe/Berlin", concurrencyPolicy="Forbid")
    await tasks.put("asleep", suspend=True)
    await tasks.put("odd", schedule="nonsense")

    found = (await room.get("/v1/cron-tasks", user="root")).json()
    asleep, odd, weekly = found["cron_tasks"]
    assert found["next"] is None
    assert (asleep["name"], asleep["suspended"], asleep["next"]) == ("asleep", True, [])
    assert odd["next"] == [] and "five fields" in odd["problem"], "one that cannot be followed does not hide the others"
    assert (weekly["uid"], weekly["time_zone"], weekly["concurrency_policy"]) == (str(uid), "Europe/Berlin", "Forbid")
    following = [datetime.fromisoformat(slot) for slot in weekly["next"]]
    assert len(following) == 3
    assert all(slot > datetime.now(UTC) and slot.weekday() == 0 for slot in following)
    assert (await room.get("/v1/cron-tasks/weekly", user="root")).json() == weekly

    pages, after = [], ""
    for _ in range(3):
        page = (await room.get(f"/v1/cron-tasks?limit=1{after}", user="root")).json()
        pages += [one["name"] for one in page["cron_tasks"]]
        after = f"&after={page['next']}"
    assert pages == ["asleep", "odd", "weekly"]
    assert page["next"] is None


async def test_slots_are_listed_in_pages_newest_first(room: Room, tasks: Tasks, hour: datetime) -> None:
    await tasks.put("report", since=hour, schedule="*/10 * * * *", catchUp={"mode": "All", "limit": 2})
    await tasks.tick(hour + timedelta(minutes=50, seconds=5) - datetime.now(UTC))

    found, before = [], ""
    while True:
        page = (await room.get(f"/v1/cron-tasks/report/slots?limit=2{before}", user="root")).json()
        found += page["slots"]
        if page["next"] is None:
            break
        before = f"&before={page['next'].replace('+', '%2B')}"
    assert [datetime.fromisoformat(one["slot"]) for one in found] == [hour + timedelta(minutes=m) for m in (50, 40, 30, 20, 10)]
    assert [one["outcome"] for one in found] == ["ran", "late", "late", "skipped_deadline", "skipped_deadline"]
    assert [one["run_id"] is not None for one in found] == [True, True, True, False, False]
    assert found[-1]["detail"] == "missed, and more than catchUp.limit"


async def test_slots_are_listed_with_what_has_become_of_their_runs(room: Room, tasks: Tasks, hour: datetime) -> None:
    """What ran and failed is told from what ran well, as the CronTask's status does it."""
    uid = await tasks.put("report", since=hour, schedule="*/10 * * * *", catchUp={"mode": "All", "limit": 2})
    await tasks.tick(hour + timedelta(minutes=40, seconds=5) - datetime.now(UTC))
    newest, older, *_ = await slots.history(room.pool, uid)
    for one, status, kind in ((newest, RunStatus.FAILED, Kind.FAILED), (older, RunStatus.SUCCEEDED, Kind.COMPLETED)):
        assert one.run_id is not None
        epoch = (await claimed(room.pool, one.run_id)).epoch
        last = event(0, kind, epoch=epoch, error={"type": "test"})
        await transitions.finish(room.pool, [Finish(one.run_id, epoch, status, events=[last])])

    page = (await room.get("/v1/cron-tasks/report/slots", user="root")).json()
    assert [(one["outcome"], one["run_status"]) for one in page["slots"]] == [
        ("ran", "failed"),
        ("late", "succeeded"),
        ("late", "pending"),
        ("skipped_deadline", None),
    ]
    _, out, _ = await cron(room, "history", "report")
    assert out.splitlines()[0].split() == ["SLOT", "OUTCOME", "RUN", "STATUS", "DETAIL"]
    assert [("failed" in line, "succeeded" in line) for line in out.splitlines()[1:3]] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/report"),
        ("GET", "/report/slots"),
        ("POST", "/report/trigger"),
        ("POST", "/report/backfill?from=2026-01-01T00:00:00Z"),
    ],
)
async def test_cron_tasks_are_for_the_scope_admin(room: Room, tasks: Tasks, method: str, path: str) -> None:
    await tasks.put("report")

    async def ask(headers: dict[str, str]) -> tuple[int, str]:
        response = await room.http.request(method, f"/v1/cron-tasks{path}", headers=headers)
        return response.status_code, response.json().get("code")

    assert await ask({}) == (401, "unauthenticated")
    assert await ask(room.authorization("ann")) == (403, "forbidden")
    assert await ask({**room.authorization("backend"), "X-Agentrun-User": "root"}) == (403, "forbidden")
    assert await tasks.keys() == []


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", (404, "not_found")),
        ("GET", "/nothing/slots", (404, "not_found")),
        ("POST", "/nothing/trigger", (404, "not_found")),
        ("POST", "/nothing/backfill?from=2026-01-01T00:00:00Z", (404, "not_found")),
        ("GET", "?limit=201", (400, "invalid_parameter")),
        ("GET", "/report/slots?before=x", (400, "invalid_parameter")),
        ("GET", "/report/slots?before=2026-01-01T00:00:00", (400, "invalid_parameter")),
        ("POST", "/report/backfill", (400, "invalid_parameter")),
        ("POST", "/report/backfill?from=yesterday", (400, "invalid_parameter")),
        ("POST", "/report/backfill?from=2026-01-01T00:00:00Z&limit=101", (400, "invalid_parameter")),
        ("POST", "/report/backfill?from=1999-12-31T00:00:00Z", (400, "invalid_parameter")),
        ("POST", "/report/backfill?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", (400, "invalid_parameter")),
        ("POST", "/report/backfill?from=2026-01-02T00:00:00Z&to=9999-01-01T00:00:00Z", (400, "invalid_parameter")),
    ],
)
async def test_what_cannot_be_asked_is_a_problem(
    room: Room, tasks: Tasks, method: str, path: str, expected: tuple[int, str]
) -> None:
    await tasks.put("report")
    response = await room.http.request(method, f"/v1/cron-tasks{path}", headers=room.authorization("root"))
    assert (response.status_code, response.json()["code"]) == expected
    assert await tasks.keys() == []


@pytest.mark.parametrize("key", ["", "a b", "a/b", "ü".encode(), "x" * 101])
async def test_an_id_of_a_trigger_that_cannot_be_used_is_refused(tasks: Tasks, key: Any) -> None:
    await tasks.put("report")
    response = await tasks.post("report/trigger", headers={"Idempotency-Key": key})
    assert (response.status_code, response.json()["code"]) == (400, "invalid_header")
    assert await tasks.keys() == []


# Triggering


async def test_a_trigger_starts_one_run_however_often_it_is_sent(room: Room, tasks: Tasks) -> None:
    uid = await tasks.put("report", schedule="0 0 1 1 *", suspend=True)
    answers = await asyncio.gather(*(tasks.trigger("report", "mine") for _ in range(8)))
    assert len({one["run_id"] for one in answers}) == 1
    assert sorted(one["replayed"] for one in answers) == [False] + [True] * 7
    assert await tasks.keys() == [manual_key(uid, "mine")]
    run = (await room.get(f"/v1/runs/{answers[0]['run_id']}", user="root")).json()
    assert (run["user"], run["session"]) == ("cron:report", "cron:report:manual:mine")
    assert run["input"]["input"].startswith("go on 20")

    other = await tasks.trigger("report", "another")
    assert other["run_id"] != answers[0]["run_id"]
    assert (await tasks.trigger("report"))["run_id"] != (await tasks.trigger("report"))["run_id"], "without an id each is its own"


async def test_a_trigger_that_is_repeated_in_another_minute_finds_its_run(room: Room, tasks: Tasks) -> None:
    await tasks.put("report")
    first = await tasks.trigger("report", "mine")
    await room.pool.execute("""UPDATE runs SET input = '{"input": "go on 2020-01-01T00:00Z"}'""")
    again = await tasks.trigger("report", "mine")
    assert (again["run_id"], again["replayed"]) == (first["run_id"], True)


async def test_a_triggered_run_counts_for_forbid_and_is_no_slot(room: Room, tasks: Tasks) -> None:
    uid = await tasks.put("report", since=datetime.now(UTC) - timedelta(seconds=70), concurrencyPolicy="Forbid")
    done = await tasks.trigger("report", "mine")
    assert (await room.get("/v1/cron-tasks/report", user="root")).json()["active"] == [done["run_id"]]
    await tasks.tick()
    found = await slots.history(room.pool, uid)
    assert {one.outcome for one in found} == {"skipped_overlap"}
    assert len(await tasks.keys()) == 1


async def test_a_trigger_of_a_fixed_session_is_a_turn_of_it(tasks: Tasks) -> None:
    await tasks.put("report", session={"mode": "Fixed", "id": "daily"})
    assert (await tasks.trigger("report", "mine"))["session"] == "daily"


async def test_a_suspended_agent_takes_no_triggers(
    databases: Databases, store_urls: StoreUrls, tmp_path: Path, hour: datetime
) -> None:
    async with databases.migrated() as url, gateway(url, store_urls.redis_url, tmp_path, suspend=True) as room:
        tasks = Tasks(room)
        await tasks.put("report")
        for path in ("report/trigger", f"report/backfill?from={minute(hour)}"):
            response = await tasks.post(path)
            assert (response.status_code, response.json()["code"]) == (503, "suspended")
        assert await tasks.keys() == []


# Backfilling


async def test_a_backfill_starts_what_has_no_run_and_nothing_twice(room: Room, tasks: Tasks, hour: datetime) -> None:
    """Some slots ran, some were skipped, some are from before the CronTask was made."""
    uid = await tasks.put("report", since=hour + 29 * MINUTE, schedule="*/10 * * * *", catchUp={"mode": "All", "limit": 1})
    await tasks.tick(hour + timedelta(minutes=50, seconds=5) - datetime.now(UTC))
    ran = await tasks.keys()
    assert len(ran) == 2, "the slot at :50, and :40 late; :30 was skipped"

    preview = await tasks.backfill("report", hour, hour + 50 * MINUTE, dry_run=True)
    assert [one["started"] for one in preview["slots"]] == [True, True, True, True, False, False]
    assert await tasks.keys() == ran

    done = await asyncio.gather(*(tasks.backfill("report", hour, hour + 50 * MINUTE) for _ in range(5)))
    assert sum(one["started"] for answer in done for one in answer["slots"]) == 4
    assert len({tuple(one["run_id"] for one in answer["slots"]) for answer in done}) == 1
    expected = [run_key(uid, hour + m * MINUTE) for m in range(0, 60, 10)]
    assert await tasks.keys() == expected
    found = await slots.history(room.pool, uid)
    assert [one.outcome.value for one in found] == ["ran", "late", "late", "late", "late", "late"]
    assert [one.detail for one in found[2:]] == ["backfilled"] * 4
    assert all(one.run_id for one in found)

    await tasks.tick(hour + timedelta(minutes=55) - datetime.now(UTC))
    assert await tasks.keys() == expected


async def test_a_scheduler_and_a_backfill_at_the_same_moment_start_each_slot_once(
    room: Room, tasks: Tasks, hour: datetime
) -> None:
    uid = await tasks.put("report", since=hour - timedelta(seconds=1), catchUp={"mode": "All", "limit": 100})
    ahead = hour + timedelta(minutes=30, seconds=5) - datetime.now(UTC)
    await asyncio.gather(
        *(tasks.tick(ahead) for _ in range(3)), *(tasks.backfill("report", hour, hour + 30 * MINUTE) for _ in range(3))
    )
    assert await tasks.keys() == [run_key(uid, hour + m * MINUTE) for m in range(31)]
    assert all(one.run_id for one in await slots.history(room.pool, uid))


async def test_a_backfill_goes_on_where_the_page_before_ended(tasks: Tasks, hour: datetime) -> None:
    uid = await tasks.put("report")
    begin, pages = hour, 0
    while begin is not None:
        page = await tasks.backfill("report", begin, hour + 9 * MINUTE, limit=4)
        assert len(page["slots"]) <= 4
        begin, pages = datetime.fromisoformat(page["next"]) if page["next"] else None, pages + 1
    assert pages == 3
    assert await tasks.keys() == [run_key(uid, hour + m * MINUTE) for m in range(10)]


async def test_a_backfill_does_not_repeat_what_a_predecessor_ran(tasks: Tasks, hour: datetime) -> None:
    old = await tasks.put("report", schedule="*/10 * * * *")
    await tasks.backfill("report", hour + 10 * MINUTE, hour + 20 * MINUTE)
    new = await tasks.put("report", schedule="*/10 * * * *")
    done = await tasks.backfill("report", hour, hour + 30 * MINUTE)
    assert [one["started"] for one in done["slots"]] == [True, False, False, True]
    at = {m: hour + m * MINUTE for m in (0, 10, 20, 30)}
    assert await tasks.keys() == sorted([run_key(new, at[0]), run_key(old, at[10]), run_key(old, at[20]), run_key(new, at[30])])


async def test_a_backfill_finds_runs_whose_slots_are_forgotten(room: Room, tasks: Tasks, hour: datetime) -> None:
    await tasks.put("report", schedule="*/10 * * * *")
    first = await tasks.backfill("report", hour, hour + 50 * MINUTE)
    await room.pool.execute("DELETE FROM slots")
    again = await tasks.backfill("report", hour, hour + 50 * MINUTE)
    assert [one["run_id"] for one in again["slots"]] == [one["run_id"] for one in first["slots"]]
    assert not any(one["started"] for one in again["slots"])


async def test_without_an_end_a_backfill_goes_up_to_now(tasks: Tasks) -> None:
    await tasks.put("report")
    begun = datetime.now(UTC)
    done = await tasks.backfill("report", begun - timedelta(minutes=5))
    newest = datetime.fromisoformat(done["slots"][-1]["slot"])
    assert begun - MINUTE < newest <= datetime.now(UTC)


# The command line


async def cron(room: Room, *arguments: str, user: str = "root") -> tuple[int, str, str]:
    return await command(room.base_url, room.keys[user], "cron", *arguments)


async def test_the_command_line_lists_triggers_backfills_and_tells_history(room: Room, tasks: Tasks, hour: datetime) -> None:
    uid = await tasks.put("report", since=datetime.now(UTC), schedule="*/10 * * * *")
    code, out, _ = await cron(room, "list")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["NAME", "SCHEDULE", "TIMEZONE"]
    assert out.splitlines()[1].startswith("report  */10 * * * *  Etc/UTC")

    code, out, _ = await cron(room, "trigger", "report", "--id", "mine")
    assert (code, out.startswith("started: ")) == (0, True)
    code, again, _ = await cron(room, "trigger", "report", "--id", "mine")
    assert again == out.replace("started", "the run was there already")

    period = ("--from", minute(hour), "--to", minute(hour + 30 * MINUTE))
    code, out, _ = await cron(room, "backfill", "report", *period, "--dry-run")
    assert out.splitlines()[-1] == "4 slots would be run, 0 had a run already"
    code, out, _ = await cron(room, "backfill", "report", *period)
    assert out.splitlines()[-1] == "4 slots started, 0 had a run already"
    code, out, _ = await cron(room, "backfill", "report", *period)
    assert out == "0 slots started, 4 had a run already\n"
    keys = [run_key(uid, hour + m * MINUTE) for m in (0, 10, 20, 30)]
    assert await tasks.keys() == sorted([*keys, manual_key(uid, "mine")])

    code, out, _ = await cron(room, "history", "report", "--limit", "3", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [datetime.fromisoformat(one["slot"]) for one in found] == [hour + m * MINUTE for m in (30, 20, 10)]
    assert {one["outcome"] for one in found} == {"late"}


async def test_the_command_line_says_next_slots_as_the_gateway_does(room: Room, tasks: Tasks) -> None:
    await tasks.put("report", schedule="H H * * *", timeZone="Asia/Tokyo")
    following = (await room.get("/v1/cron-tasks/report", user="root")).json()["next"]
    code, out, _ = await cron(room, "next", "report", "--count", "3", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [datetime.fromisoformat(one["slot"]) for one in found] == [datetime.fromisoformat(slot) for slot in following]
    assert all(one["local"].endswith("+09:00") for one in found)


async def test_the_command_line_tells_in_one_line_what_is_wrong(room: Room) -> None:
    for user, arguments, told in (
        ("root", ("history", "nothing"), "the gateway answered 404: There is nothing here."),
        ("ann", ("list",), "the gateway answered 403: This API key may not do that."),
        ("root", ("backfill", "x", "--from", "soon"), "--from: 'soon' is no time"),
    ):
        code, out, err = await cron(room, *arguments, user=user)
        assert (code, out) == (2, "")
        assert err.startswith("agentrun: ") and told in err and err.count("\n") == 1
