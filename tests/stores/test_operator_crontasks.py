"""CronTasks in the database of their AgentRun: newer generations only, deletions, and what nobody saw happen."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from run_factory import claimed
from store_servers import Databases, PrivateServer

from agentrun.control.scaling import Bounds
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.states import RunStatus
from agentrun.maintenance.reaper import Limits
from agentrun.scheduler.loop import Firing, News
from agentrun.store import cron_tasks, migrations, slots, transitions
from agentrun.store.cron_tasks import Schedule, Stored
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish
from agentrun_operator import crontasks
from agentrun_operator.cache import ObjectCache
from agentrun_operator.crontasks import CronTasks
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, DEPLOYMENTS, Key, Ref
from agentrun_operator.targets import Target

AGENT = Key("shop", "support")
CREATED = "2026-11-29T08:00:00Z"
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)

Body = dict[str, Any]


def task(name: str = "nightly", *, uid: UUID, generation: int = 1, schedule: str = "0 9 * * *", **spec: Any) -> Body:
    return {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": str(uid),
            "generation": generation,
            "resourceVersion": uuid4().hex,
            "creationTimestamp": CREATED,
        },
        "spec": {"agentRunRef": {"name": "support"}, "schedule": schedule, "input": "report", **spec},
    }


class StatusKube:
    """Takes status writes, as the API server does."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self.writes: list[Body] = []

    async def apply(self, ref: Ref, body: Body, *, manager: str, subresource: str | None = None) -> Body:
        assert (manager, subresource) == ("agentrun-status", "status")
        self.writes.append(body["status"])
        known = self._cache.get(ref)
        assert known is not None
        return {**known, "metadata": {**known["metadata"], "resourceVersion": uuid4().hex}, "status": body["status"]}


class Stage:
    def __init__(self, database_url: str) -> None:
        self.cache = ObjectCache()
        self.kube = StatusKube(self.cache)
        self.ready = True
        self.url = database_url
        self.other_url = ""
        self.stored: int | None = None
        self.now = NOW
        self.clock = 0.0
        self.cache.put(AGENTRUNS, {"metadata": {"name": "support", "namespace": "shop", "uid": "a", "resourceVersion": "1"}})
        self.restart()

    def restart(self) -> None:
        """The next operator: it knows nothing."""
        self.tasks = CronTasks(
            self.kube,  # type: ignore[arg-type]
            self.cache,
            target_of=self.target,
            stored=lambda _target: self.stored,
            clock=lambda: self.clock,
            now=lambda: self.now,
        )

    def target(self, key: Key) -> Target | None:
        worker, scheduler = (Ref(DEPLOYMENTS, "shop", name) for name in ("w", "s"))
        return Target(
            key,
            "a",
            "",
            self.url if key == AGENT else self.other_url,
            Bounds(0, 1, 1, 0, 0),
            Limits(30, 30, 1, 3),
            worker,
            scheduler,
            schema_ready=self.ready,
        )

    async def see(self, body: Body) -> float | None:
        """A watch event, and the reconcile that follows."""
        known = self.cache.get(Ref(CRONTASKS, "shop", body["metadata"]["name"]))
        self.cache.put(CRONTASKS, {**body, "status": (known or {}).get("status", {})})
        return await self.tasks.reconcile(Key("shop", body["metadata"]["name"]))

    async def lose(self, name: str = "nightly") -> None:
        self.cache.remove(Ref(CRONTASKS, "shop", name))
        await self.tasks.reconcile(Key("shop", name))

    @property
    def accepted(self) -> tuple[str, str]:
        (condition,) = self.kube.writes[-1]["conditions"]
        assert condition["type"] == "Accepted"
        return condition["status"], condition["reason"]


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 2)
    yield made
    await made.close()


@pytest.fixture
def stage(database_url: str) -> Stage:
    return Stage(database_url)


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Pool]:
    made = await create_pool(url, 1)
    try:
        yield made
    finally:
        await made.close()


async def only(pool: Pool) -> Stored:
    (found,) = await cron_tasks.all_of(pool)
    return found


async def test_a_crontask_is_stored_and_says_so_once(stage: Stage, pool: Pool) -> None:
    uid = uuid4()
    assert await stage.see(task(uid=uid)) is None
    stored = await only(pool)
    assert stored.deleted_at is None
    assert (stored.schedule.uid, stored.schedule.generation) == (uid, 1)
    assert stored.schedule.slots_from == datetime.fromisoformat(CREATED), "the API server saw this generation first"
    spec = json.loads(stored.schedule.spec)
    assert (spec["name"], spec["schedule"], spec["timeZone"], spec["input"]) == ("nightly", "0 9 * * *", "Etc/UTC", "report")
    assert stage.accepted == ("True", "Accepted")
    await stage.tasks.reconcile(Key("shop", "nightly"))
    assert len(stage.kube.writes) == 1, "nothing is written when nothing changed"


async def test_an_edit_counts_from_when_it_was_first_seen(stage: Stage, pool: Pool) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid))
    stage.cache.put(CRONTASKS, task(uid=uid, generation=2, schedule="0 10 * * *"))
    stage.ready = False
    await stage.tasks.look()
    stage.now += timedelta(hours=1)
    stage.ready = True
    await stage.tasks.reconcile(Key("shop", "nightly"))
    stored = await only(pool)
    assert (stored.schedule.generation, stored.schedule.slots_from) == (2, NOW)
    assert json.loads(stored.schedule.spec)["schedule"] == "0 10 * * *"


async def test_a_late_writer_with_an_older_generation_changes_nothing(stage: Stage, pool: Pool) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid, generation=3))
    before = await only(pool)
    stage.restart()
    stage.cache.put(CRONTASKS, task(uid=uid, generation=2, schedule="1 1 * * *"))
    await stage.tasks.reconcile(Key("shop", "nightly"))
    assert await only(pool) == before


async def test_a_deletion_is_marked_and_the_row_stays(stage: Stage, pool: Pool) -> None:
    await stage.see(task(uid=uuid4()))
    await stage.lose()
    assert (await only(pool)).deleted_at is not None


async def test_a_deletion_while_the_database_is_away_is_marked_when_it_is_back(private_postgres: PrivateServer) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    stage = Stage(private_postgres.url)
    await stage.see(task(uid=uuid4()))
    stage.stored = 0  # what was seen there before the task
    await private_postgres.kill()
    with pytest.raises(StoreUnavailable):
        await stage.lose()
    await stage.tasks.look()
    await private_postgres.start()
    await stage.tasks.look()
    async with connected(private_postgres.url) as made:
        assert (await only(made)).deleted_at is not None


async def test_the_retry_of_a_deletion_knows_whose_it_was(private_postgres: PrivateServer) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    stage = Stage(private_postgres.url)
    await stage.see(task(uid=uuid4()))
    await private_postgres.kill()
    with pytest.raises(StoreUnavailable):
        await stage.lose()
    await private_postgres.start()
    await stage.lose()
    async with connected(private_postgres.url) as made:
        assert (await only(made)).deleted_at is not None


async def test_a_deletion_while_the_gate_is_closed_is_marked_when_it_opens(stage: Stage, pool: Pool) -> None:
    await stage.see(task(uid=uuid4()))
    stage.ready = False
    await stage.lose()
    await stage.tasks.look()
    stage.ready = True
    await stage.tasks.look()
    assert (await only(pool)).deleted_at is not None


@pytest.mark.parametrize("seen", ["by a reconcile", "by a look"])
async def test_made_anew_for_another_agentrun_it_leaves_the_first_one(
    stage: Stage, pool: Pool, databases: Databases, seen: str
) -> None:
    async with databases.migrated() as other_url, connected(other_url) as other_pool:
        stage.other_url = other_url
        stage.cache.put(AGENTRUNS, {"metadata": {"name": "other", "namespace": "shop", "uid": "b", "resourceVersion": "1"}})
        await stage.see(task(uid=uuid4()))
        uid = uuid4()
        body = task(uid=uid, agentRunRef={"name": "other"})
        if seen == "by a reconcile":
            await stage.see(body)
        else:
            stage.cache.put(CRONTASKS, body)
            await stage.tasks.look()
        assert (await only(pool)).deleted_at is not None
        stored = await only(other_pool)
        assert (stored.schedule.uid, stored.deleted_at) == (uid, None)


async def test_a_changed_database_gets_the_tasks_and_the_old_one_is_let_alone(
    stage: Stage, pool: Pool, databases: Databases
) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid))
    before = await only(pool)
    async with databases.migrated() as other_url, connected(other_url) as other_pool:
        stage.url = other_url
        await stage.tasks.look()
        stored = await only(other_pool)
        assert (stored.schedule.uid, stored.deleted_at) == (uid, None)
        await stage.lose()
        assert (await only(other_pool)).deleted_at is not None
    assert await only(pool) == before, "it is not this AgentRun's any more"


async def test_a_postgres_that_hangs_in_mid_conversation_costs_bounded_time(
    private_postgres: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crontasks, "_DATABASE_SECONDS", 1.0)
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    stage = Stage(private_postgres.url)
    stage.cache.put(CRONTASKS, task(uid=uuid4()))
    look_at_states = cron_tasks.states

    async def hang(conn: Any) -> Any:
        await private_postgres.pause()
        return await look_at_states(conn)

    monkeypatch.setattr(crontasks.cron_tasks, "states", hang)
    begun, stamps = time.monotonic(), []
    looking = asyncio.create_task(stage.tasks.look(lambda: stamps.append(time.monotonic())))
    done, _ = await asyncio.wait([looking], timeout=15)
    await private_postgres.resume()
    await looking
    assert done and stamps, f"it took {time.monotonic() - begun:.1f} s"


async def test_a_deletion_that_nobody_saw_is_found(stage: Stage, pool: Pool) -> None:
    await stage.see(task(uid=uuid4()))
    stage.cache.remove(Ref(CRONTASKS, "shop", "nightly"))
    stage.restart()
    await stage.tasks.look()
    assert (await only(pool)).deleted_at is not None


async def test_a_row_that_somebody_changed_is_mended_by_the_repeated_look(stage: Stage, pool: Pool) -> None:
    await stage.see(task(uid=uuid4()))
    await pool.execute("UPDATE cron_tasks SET deleted_at = now()")
    await stage.tasks.look()
    assert (await only(pool)).deleted_at is not None
    stage.clock += 601
    await stage.tasks.look()
    assert (await only(pool)).deleted_at is None


async def test_made_anew_it_is_another_task(stage: Stage, pool: Pool) -> None:
    old, new = uuid4(), uuid4()
    await stage.see(task(uid=old))
    await stage.see(task(uid=new))
    rows = {row.schedule.uid: row.deleted_at for row in await cron_tasks.all_of(pool)}
    assert rows[old] is not None and rows[new] is None


async def test_a_missing_agentrun_is_said(stage: Stage, pool: Pool) -> None:
    stage.cache.remove(Ref(AGENTRUNS, "shop", "support"))
    assert await stage.see(task(uid=uuid4())) is not None, "it may come later"
    assert stage.accepted == ("False", "AgentRunMissing")
    assert await cron_tasks.all_of(pool) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schedule": "0 0 30 2 *"}, "ScheduleInvalid"),
        ({"schedule": "0 0 31 2 *"}, "ScheduleInvalid"),
        ({"schedule": "0 0 31 4,6 *"}, "ScheduleInvalid"),
        ({"schedule": "*/90 * * * *"}, "ScheduleInvalid"),
        ({"timeZone": "Mars/Olympus"}, "TimeZoneUnknown"),
        ({"catchUp": {"mode": "Never"}}, "InvalidSpec"),
    ],
)
async def test_cr_16_a_schedule_that_cannot_be_followed_is_refused_and_the_last_good_one_stays(
    stage: Stage, pool: Pool, change: Body, reason: str
) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid))
    await stage.see(task("other", uid=uuid4()))
    await stage.see(task(uid=uid, generation=2, **change))
    assert stage.accepted == ("False", reason)
    await stage.see(task("third", uid=uuid4()))
    rows = {row.schedule.uid: row for row in await cron_tasks.all_of(pool)}
    assert len(rows) == 3
    assert (rows[uid].schedule.generation, rows[uid].deleted_at) == (1, None)


async def test_until_the_database_is_ready_it_waits(stage: Stage, pool: Pool) -> None:
    stage.ready = False
    body = task(uid=uuid4())
    assert await stage.see(body) is not None
    assert stage.accepted == ("Unknown", "Pending")
    assert await cron_tasks.all_of(pool) == []
    stage.ready = True
    assert await stage.see(body) is None
    assert stage.accepted == ("True", "Accepted")


async def test_a_database_that_is_away_is_said_and_tried_again(private_postgres: PrivateServer) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    stage = Stage(private_postgres.url)
    await private_postgres.kill()
    body = task(uid=uuid4())
    assert await stage.see(body) is not None
    assert stage.accepted == ("Unknown", "DatabaseUnreachable")
    await private_postgres.start()
    assert await stage.see(body) is None
    assert stage.accepted == ("True", "Accepted")


async def test_a_database_of_another_agentrun_is_not_written(stage: Stage, pool: Pool) -> None:
    await pool.execute("UPDATE meta SET owner = 'shop/other'")
    await stage.see(task(uid=uuid4()))
    assert stage.accepted[0] == "Unknown"
    assert await cron_tasks.all_of(pool) == []


async def fired(pool: Pool, *, ahead: timedelta = timedelta()) -> None:
    """A scheduler looks once."""
    await Firing(pool, Silence(), namespace="shop", name="support", suspended=False, ahead=ahead).tick()


class Silence:
    async def send(self, news: News) -> None:
        """Tells nobody."""


async def test_the_status_says_what_has_come_of_the_slots_and_is_written_when_it_changes(stage: Stage, pool: Pool) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid, schedule="* * * * *", catchUp={"mode": "Latest"}))
    assert stage.kube.writes[-1]["nextScheduleTime"] == "2026-11-29T12:01:00Z", "by the operator's own clock, until one has fired"
    assert "lastOutcome" not in stage.kube.writes[-1]
    await fired(pool)
    stage.clock += 16
    await stage.tasks.look()
    status = stage.kube.writes[-1]
    (newest, *_) = await slots.history(pool, uid)
    assert status["lastScheduleTime"] == newest.slot.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert (status["lastOutcome"], status["active"]) == ("ran", [str(newest.run_id)])
    assert status["nextScheduleTime"] > status["lastScheduleTime"]
    assert "lastSuccessfulTime" not in status
    assert [one["reason"] for one in status["conditions"]] == ["Accepted"]
    written = len(stage.kube.writes)
    stage.clock += 16
    await stage.tasks.look()
    assert len(stage.kube.writes) == written, "nothing is written when nothing changed"

    assert newest.run_id is not None
    claim = await claimed(pool, newest.run_id)
    (done,) = await transitions.finish(pool, [Finish(newest.run_id, claim.epoch, RunStatus.SUCCEEDED)])
    assert done.ok
    stage.clock += 16
    await stage.tasks.look()
    assert "active" not in stage.kube.writes[-1]
    assert "lastSuccessfulTime" in stage.kube.writes[-1]


async def test_cr_14_a_new_zone_shows_its_next_time_at_once(stage: Stage, pool: Pool) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid))
    await fired(pool)
    await stage.see(task(uid=uid, generation=2, timeZone="Asia/Tokyo"))
    assert stage.kube.writes[-1]["nextScheduleTime"] == "2026-11-30T00:00:00Z"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("generation", [1, 2])
async def test_a_new_empty_database_decides_no_slot_again(
    stage: Stage, pool: Pool, databases: Databases, generation: int, restarted: bool
) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid, generation=generation, schedule="* * * * *"))
    await fired(pool)
    stage.clock += 16
    await stage.tasks.look()
    decided = {one.slot for one in await slots.history(pool, uid)}
    assert len(decided) >= 3
    async with databases.migrated() as other_url, connected(other_url) as other_pool:
        stage.url = other_url
        if restarted:
            stage.restart()
        await stage.tasks.look()
        await fired(other_pool, ahead=timedelta(minutes=3))
        again = {one.slot for one in await slots.history(other_pool, uid)}
        assert again & decided == set()
        assert again, "it goes on"
    async with databases.migrated() as third_url, connected(third_url) as third_pool:
        stage.url = third_url  # so soon that the status says nothing of the second one
        await stage.tasks.look()
        await fired(third_pool)
        assert {one.slot for one in await slots.history(third_pool, uid)} & decided == set()


async def test_a_suspended_task_shows_no_next_time(stage: Stage) -> None:
    uid = uuid4()
    await stage.see(task(uid=uid))
    assert "nextScheduleTime" in stage.kube.writes[-1]
    await stage.see(task(uid=uid, generation=2, suspend=True))
    assert "nextScheduleTime" not in stage.kube.writes[-1]


async def test_what_was_known_stays_while_the_database_is_away(private_postgres: PrivateServer) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    stage = Stage(private_postgres.url)
    body = task(uid=uuid4())
    await stage.see(body)
    known = stage.kube.writes[-1]["nextScheduleTime"]
    stage.restart()
    await private_postgres.kill()
    await stage.see(body)
    assert stage.accepted == ("Unknown", "DatabaseUnreachable")
    assert stage.kube.writes[-1]["nextScheduleTime"] == known


async def test_writers_at_the_same_time_leave_the_newest(pool: Pool) -> None:
    uid = uuid4()

    async def write(generation: int) -> None:
        async with pool.acquire() as conn:
            await cron_tasks.replace(conn, [Schedule(uid, generation, json.dumps({"n": generation}), NOW)])

    await asyncio.gather(*(write(generation) for generation in (3, 1, 5, 2, 4)))
    stored = await only(pool)
    assert (stored.schedule.generation, json.loads(stored.schedule.spec)) == (5, {"n": 5})


async def test_thousands_of_crontasks_that_are_made_anew_again_and_again_are_stored(pool: Pool) -> None:
    """Each looks for its predecessors by name: row by row that would be millions of comparisons, which Postgres does not end in time."""
    for _ in range(3):
        made = [Schedule(uuid4(), 1, json.dumps({"name": f"task-{number}", "schedule": "@daily"}), NOW) for number in range(4000)]
        async with pool.acquire() as conn:
            await cron_tasks.replace(conn, made)
            await cron_tasks.replace(conn, made)
    assert await cron_tasks.count_live(pool) == 4000
    assert await pool.fetchval("SELECT count(*) FROM cron_tasks") == 12_000
