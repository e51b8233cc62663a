"""CronTasks in the database of their AgentRun: newer generations only, deletions, and what nobody saw happen."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from store_servers import PrivateServer

from agentrun.control.scaling import Bounds
from agentrun.maintenance.reaper import Limits
from agentrun.store import cron_tasks, migrations
from agentrun.store.cron_tasks import Schedule, Stored
from agentrun.store.pool import Pool, create_pool
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
            clock=lambda: self.clock,
            now=lambda: self.now,
        )

    def target(self, key: Key) -> Target | None:
        worker, scheduler = (Ref(DEPLOYMENTS, "shop", name) for name in ("w", "s"))
        return Target(
            key,
            "a",
            "",
            self.url,
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
        ({"schedule": "*/90 * * * *"}, "ScheduleInvalid"),
        ({"timeZone": "Mars/Olympus"}, "TimeZoneUnknown"),
        ({"unknown": 1}, "InvalidSpec"),
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


async def test_writers_at_the_same_time_leave_the_newest(pool: Pool) -> None:
    uid = uuid4()

    async def write(generation: int) -> None:
        async with pool.acquire() as conn:
            await cron_tasks.replace(conn, [Schedule(uid, generation, json.dumps({"n": generation}), NOW)])

    await asyncio.gather(*(write(generation) for generation in (3, 1, 5, 2, 4)))
    stored = await only(pool)
    assert (stored.schedule.generation, json.loads(stored.schedule.spec)) == (5, {"n": 5})
