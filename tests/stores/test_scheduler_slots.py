"""CronTasks on real stores: each slot is decided once, whoever looks, crashes, restarts or has another idea of the time."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from processes import Product, ProductProcess, ProductProcesses
from redis.asyncio import Redis
from run_factory import claimed, event
from store_servers import Databases
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.control import Control
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.events import Kind
from agentrun.domain.slots import SlotOutcome, minute, run_key
from agentrun.domain.states import RunStatus
from agentrun.maintenance.supervise import Supervisor
from agentrun.maintenance.sweep import Sweep
from agentrun.scheduler.announcing import BusAnnouncer
from agentrun.scheduler.loop import Announcer, Firing, News
from agentrun.scheduler.watching import Watching
from agentrun.store import cron_tasks, runs, slots, transitions
from agentrun.store.cron_tasks import Schedule
from agentrun.store.pool import Pool, create_pool
from agentrun.store.slots import Slot
from agentrun.store.transitions import Finish
from agentrun.telemetry import SLOTS_FORGOTTEN, SLOTS_WITHOUT_SUCCESS

MINUTE = timedelta(minutes=1)
KEYS = Keys("default", "agent")
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {model: "demo:chat"}
  workers: {leaseSeconds: 30}
"""
RAN, LATE, OVERLAP, DEADLINE, SUSPENDED, FAILED = (
    SlotOutcome.RAN,
    SlotOutcome.LATE,
    SlotOutcome.SKIPPED_OVERLAP,
    SlotOutcome.SKIPPED_DEADLINE,
    SlotOutcome.SKIPPED_SUSPENDED,
    SlotOutcome.FAILED,
)


@dataclass
class Listener:
    """Takes what a scheduler would tell Redis."""

    heads: list[UUID] = field(default_factory=list)
    cancelled: list[UUID] = field(default_factory=list)

    async def send(self, news: News) -> None:
        self.heads += news.heads
        self.cancelled += [one.run_id for one in news.cancelled]


class Stage:
    """The CronTasks of one AgentRun. The schedulers of a test believe that it is `time` and some minutes, half a minute past a minute."""

    def __init__(self, pool: Pool, time: datetime) -> None:
        self.pool = pool
        self.time = time
        self.heard = Listener()
        self.generation = 0
        self.tasks: dict[UUID, Schedule] = {}

    async def put(self, uid: UUID | None = None, *, since: datetime, name: str = "report", **spec: Any) -> UUID:
        """The operator writes a CronTask; the same uid again is an edit."""
        uid = uid or uuid4()
        self.generation += 1
        document = {"name": name, "schedule": "* * * * *", "timeZone": "Etc/UTC", "input": "go on", "suspend": False, **spec}
        self.tasks[uid] = Schedule(uid, self.generation, json.dumps(document), since)
        await self.write()
        return uid

    async def write(self) -> None:
        async with self.pool.acquire() as conn:
            await cron_tasks.replace(conn, list(self.tasks.values()))

    async def scheduler(self, minutes: float = 0, *, suspended: bool = False, announcer: Announcer | None = None) -> Firing:
        ahead = self.time + minutes * MINUTE - await postgres_now(self.pool)
        return Firing(self.pool, announcer or self.heard, namespace="default", name="agent", suspended=suspended, ahead=ahead)

    async def tick(self, minutes: float = 0, *, suspended: bool = False) -> None:
        """A scheduler starts, and looks once."""
        await (await self.scheduler(minutes, suspended=suspended)).tick()

    def before(self, count: int) -> datetime:
        """A moment after which `count` minutes begin until `time`; the last one is on time, the others are missed."""
        return self.time - count * MINUTE

    async def outcomes(self, task: UUID) -> list[SlotOutcome]:
        """Oldest first."""
        return [one.outcome for one in reversed(await slots.history(self.pool, task, limit=20_000))]

    async def started(self, task: UUID) -> list[Slot]:
        return [one for one in reversed(await slots.history(self.pool, task, limit=20_000)) if one.run_id]

    async def run_keys(self) -> Counter[str]:
        rows = await self.pool.fetch("SELECT idempotency_key FROM runs")
        return Counter(row[0] for row in rows)

    async def end(self, run_id: UUID, status: RunStatus = RunStatus.SUCCEEDED) -> None:
        """A worker executes the run."""
        claim = await claimed(self.pool, run_id)
        kind = Kind.COMPLETED if status is RunStatus.SUCCEEDED else Kind.FAILED
        last = event(0, kind, epoch=claim.epoch, error={"type": "test"})
        (done,) = await transitions.finish(self.pool, [Finish(run_id, claim.epoch, status, events=[last])])
        assert done.ok


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 8)
    yield made
    await made.close()


async def postgres_now(pool: Pool) -> datetime:
    found = await pool.fetchval("SELECT now()")
    assert isinstance(found, datetime)
    return found


@pytest.fixture
async def stage(pool: Pool) -> Stage:
    hour_ago = await postgres_now(pool) - timedelta(hours=1)
    return Stage(pool, hour_ago.replace(second=30, microsecond=0))


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    made = await connect(redis_url)
    yield made
    await made.aclose()


# A slot's run


async def test_a_slot_on_time_starts_a_run_and_the_next_one_waits_for_its_time(stage: Stage) -> None:
    task = await stage.put(since=stage.time, input="Report of {{task}} for {{slot}}")
    scheduler = await stage.scheduler()
    await scheduler.tick()
    assert await stage.outcomes(task) == []
    scheduler._ahead += MINUTE
    await scheduler.tick()

    (one,) = await stage.started(task)
    assert one.outcome is RAN
    assert one.run_id is not None
    run = await runs.get(stage.pool, one.run_id, agent="default/agent")
    assert run is not None
    assert (run.user_id, run.external_id) == ("cron:report", f"cron:report:{minute(one.slot)}")
    assert json.loads(run.input) == {"input": f"Report of report for {minute(one.slot)}"}
    row = await stage.pool.fetchrow("SELECT idempotency_key, cron_task, slot FROM runs WHERE id = $1", run.id)
    assert row is not None and tuple(row) == (run_key(task, one.slot), task, one.slot)
    assert stage.heard.heads == [run.id]
    (state,) = await cron_tasks.states(stage.pool)
    assert (state.last_slot, state.last_outcome, state.next_slot) == (one.slot, RAN, one.slot + MINUTE)
    assert state.active == (run.id,)
    assert state.last_success is None
    await stage.end(run.id)
    (state,) = await cron_tasks.states(stage.pool)
    assert state.last_success is not None
    assert state.active == ()


async def test_a_run_that_fails_shows_as_the_outcome(stage: Stage) -> None:
    await stage.put(since=stage.before(1))
    await stage.tick()
    (head,) = stage.heard.heads
    await stage.end(head, RunStatus.FAILED)
    (state,) = await cron_tasks.states(stage.pool)
    assert (state.last_outcome, state.last_success) == (FAILED, None)


async def test_a_fixed_session_takes_the_runs_as_turns_in_the_order_of_their_slots(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3), session={"mode": "Fixed", "id": "daily"})
    await stage.tick()
    rows = await stage.pool.fetch(
        "SELECT r.slot, s.external_id FROM runs r JOIN sessions s ON s.id = r.session_id ORDER BY r.session_position"
    )
    assert [row["slot"] for row in rows] == [one.slot for one in await stage.started(task)]
    assert {row["external_id"] for row in rows} == {"daily"}
    assert len(stage.heard.heads) == 1, "only the head is published"


async def test_jitter_lets_the_run_wait(stage: Stage, redis: Redis) -> None:
    await stage.put(since=stage.before(1), jitterSeconds=3600)
    await stage.put(since=stage.before(1), name="prompt")
    await stage.tick()
    rows = await stage.pool.fetch("SELECT id, slot, not_before FROM runs ORDER BY not_before NULLS FIRST")
    prompt, waiting = rows
    assert prompt["not_before"] is None
    assert timedelta() < waiting["not_before"] - waiting["slot"] <= timedelta(hours=1)
    assert stage.heard.heads == [prompt["id"]]
    stream = WorkStream(redis, KEYS)
    await stream.ensure_group()
    await stage.pool.execute("UPDATE runs SET not_before = now() WHERE not_before IS NOT NULL")
    await Sweep(stage.pool, redis, stream, idle_seconds=60).tick()
    assert (await stream.entries([waiting["id"]]))[waiting["id"]] is not None
    await stream.aclose()


async def test_a_run_that_cannot_be_stored_is_a_failed_slot_and_the_next_task_fires(stage: Stage, pool: Pool) -> None:
    await pool.execute("ALTER TABLE inputs ADD CONSTRAINT refuses CHECK (content::text NOT LIKE '%poison%')")
    since = stage.before(2)
    bad = await stage.put(since=since, name="bad", input="poison")
    good = await stage.put(since=since, name="good")
    await stage.tick()
    assert await stage.outcomes(bad) == [FAILED, FAILED]
    assert "refuses" in ((await slots.history(pool, bad))[0].detail or "")
    assert await stage.outcomes(good) == [LATE, RAN]
    await stage.tick()
    assert len(await stage.run_keys()) == 2


async def test_cr_16_a_row_that_cannot_be_followed_does_not_hold_up_the_others(stage: Stage) -> None:
    since = stage.before(1)
    broken = [
        await stage.put(since=since, name="never", schedule="0 0 30 2 *"),
        await stage.put(since=since, name="odd", schedule="nonsense"),
        await stage.put(since=since, name="nowhere", timeZone="Mars/Olympus"),
        await stage.put(since=since, name="newer", concurrencyPolicy="Queue"),
    ]
    good = await stage.put(since=since, name="good")
    scheduler = await stage.scheduler()
    await scheduler.tick()
    await scheduler.tick()
    assert await stage.outcomes(good) == [RAN]
    assert [await stage.outcomes(task) for task in broken] == [[]] * 4


# Missed slots


async def test_cr_07_missed_slots_are_made_up_once_each_and_older_ones_are_skipped_with_a_reason(stage: Stage) -> None:
    task = await stage.put(since=stage.before(20), startingDeadlineSeconds=600, catchUp={"mode": "All", "limit": 100})
    await stage.tick()
    await stage.tick()
    assert await stage.outcomes(task) == [DEADLINE] * 10 + [LATE] * 9 + [RAN]
    old = (await slots.history(stage.pool, task))[-1]
    assert (old.outcome, old.detail) == (DEADLINE, "older than startingDeadlineSeconds")
    assert set((await stage.run_keys()).values()) == {1}


@pytest.mark.parametrize(
    ("catch_up", "late"), [({"mode": "All", "limit": 4}, 4), ({"mode": "Latest"}, 0), ({"mode": "None"}, 0), ({}, 10)]
)
async def test_cr_11_after_an_outage_catch_up_says_what_is_made_up_for(stage: Stage, catch_up: dict[str, Any], late: int) -> None:
    task = await stage.put(since=stage.before(30), catchUp=catch_up)
    await stage.tick()
    assert await stage.outcomes(task) == [DEADLINE] * (29 - late) + [LATE] * late + [RAN]
    assert len(stage.heard.heads) == late + 1
    assert all(one.detail for one in await slots.history(stage.pool, task) if one.outcome is DEADLINE)


async def test_cr_06_three_days_without_a_scheduler_are_bounded_and_quick(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3 * 24 * 60), historyLimit=500)
    scheduler = await stage.scheduler()
    begun, forgotten = time.monotonic(), SLOTS_FORGOTTEN._value.get()
    await scheduler.tick()
    assert time.monotonic() - begun < 5
    found = await stage.outcomes(task)
    assert found == [DEADLINE] * 489 + [LATE] * 10 + [RAN]
    assert SLOTS_FORGOTTEN._value.get() - forgotten == 3 * 24 * 60 - 500, "the others are counted"
    await stage.tick(2)
    assert len(await stage.outcomes(task)) == 500, "and stays at the limit"
    assert len(await stage.run_keys()) == 13


async def test_what_is_forgotten_after_years_is_counted_up_to_a_number(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3 * 365 * 24 * 60), historyLimit=10)
    begun, forgotten = time.monotonic(), SLOTS_FORGOTTEN._value.get()
    await stage.tick()
    assert time.monotonic() - begun < 5
    assert len(await stage.outcomes(task)) == 10
    assert SLOTS_FORGOTTEN._value.get() - forgotten == 10_000
    await stage.tick(1)
    assert SLOTS_FORGOTTEN._value.get() - forgotten == 10_000


async def test_ten_thousand_missed_slots_are_all_remembered_where_the_limit_allows_it(stage: Stage) -> None:
    task = await stage.put(since=stage.before(10_000), historyLimit=10_000)
    begun = time.monotonic()
    await stage.tick()
    assert time.monotonic() - begun < 10
    assert Counter(await stage.outcomes(task)) == {DEADLINE: 9_989, LATE: 10, RAN: 1}


async def test_cr_11_after_an_outage_latest_makes_one_run_for_each_task(stage: Stage) -> None:
    since = stage.before(15)
    for number in range(40):
        await stage.put(since=since, name=f"task-{number}", catchUp={"mode": "Latest"})
    await stage.tick()
    assert len(await stage.run_keys()) == 40


async def test_cr_11_after_an_outage_no_task_starts_more_than_its_limit_and_each_in_the_order_of_its_slots(stage: Stage) -> None:
    since = stage.before(15)
    session = {"mode": "Fixed", "id": "all"}
    tasks = [
        await stage.put(since=since, name=f"task-{number}", catchUp={"mode": "All", "limit": 3}, session=session)
        for number in range(40)
    ]
    await stage.tick()
    for task in tasks:
        assert await stage.outcomes(task) == [DEADLINE] * 11 + [LATE] * 3 + [RAN]
    rows = await stage.pool.fetch("SELECT cron_task, array_agg(slot ORDER BY session_position) AS slots FROM runs GROUP BY 1")
    newest = stage.time.replace(second=0)
    assert [row["slots"] for row in rows] == [[newest - number * MINUTE for number in (3, 2, 1, 0)]] * 40


async def test_cr_11_after_an_outage_tasks_start_in_the_order_of_their_slots(stage: Stage) -> None:
    begun, firing = stage.time.replace(second=0), await stage.scheduler()
    wanted = [begun + number * MINUTE for number in range(1, 41)]
    for slot in sorted(wanted, key=lambda slot: slot.minute * 7 % 40):
        await stage.put(since=stage.time, name=f"at-{slot:%H-%M}", schedule=f"{slot.minute} {slot.hour} * * *")
    await firing.tick()
    firing._ahead += 45 * MINUTE
    await firing.tick()
    found = await stage.pool.fetch("SELECT slot FROM runs ORDER BY array_position($1, id)", stage.heard.heads)
    assert [row["slot"] for row in found] == wanted


async def test_cr_12_a_day_of_ticks_that_take_long_loses_and_doubles_nothing_and_the_delay_does_not_grow(stage: Stage) -> None:
    tick, day = timedelta(seconds=76), timedelta(days=1)
    task = await stage.put(since=stage.time, historyLimit=10_000)
    scheduler, now = await stage.scheduler(), stage.time
    while now < stage.time + day:
        await scheduler.tick()
        (state,) = await cron_tasks.states(stage.pool)
        assert state.last_slot is None or now - state.last_slot < MINUTE, "each tick decides all that is due by then"
        now, scheduler._ahead = now + tick, scheduler._ahead + tick
    found = [one.slot for one in await stage.started(task)]
    assert found == [found[0] + number * MINUTE for number in range(len(found))]
    assert len(found) >= 24 * 60 - 1
    assert set((await stage.run_keys()).values()) == {1}


async def test_cr_12_a_long_tick_makes_progress_with_each_task(stage: Stage) -> None:
    """What would have the process killed by its liveness probe in the middle of its work."""
    now, said = 0.0, []

    class Slow:
        async def send(self, news: News) -> None:
            nonlocal now
            now += 31.0
            said.append(supervisor.stalled())

    for number in range(4):
        await stage.put(since=stage.before(1), name=f"task-{number}")
    supervisor = Supervisor(clock=lambda: now)
    firing = await stage.scheduler(announcer=Slow())
    supervisor.run("slots", firing.keep_looking)
    await eventually(lambda: len(said) == 4, within=20, what="all were fired in one tick")
    assert said == [None] * 4
    now += 61.0
    assert supervisor.stalled() == "no progress: slots", "one that hangs is still seen"
    await supervisor.stop()


# Overlap


async def test_cr_19_forbid_counts_a_run_that_only_waits_and_starts_nothing_when_it_ends(stage: Stage) -> None:
    since = stage.before(1)
    task = await stage.put(since=since, concurrencyPolicy="Forbid")
    for minutes in range(10):
        await stage.tick(minutes)
    assert await stage.outcomes(task) == [RAN] + [OVERLAP] * 9
    (run,) = stage.heard.heads
    await stage.end(run)
    await stage.tick(9.4)
    assert len(await stage.run_keys()) == 1, "nothing starts before the next slot"
    await stage.tick(10)
    assert len(await stage.run_keys()) == 2


async def test_forbid_starts_one_of_several_missed_slots(stage: Stage) -> None:
    task = await stage.put(since=stage.before(4), concurrencyPolicy="Forbid")
    await stage.tick()
    assert await stage.outcomes(task) == [LATE, OVERLAP, OVERLAP, OVERLAP]


@pytest.mark.parametrize("session", [{}, {"mode": "Fixed", "id": "s"}], ids=["PerSlot", "Fixed"])
async def test_replace_cancels_the_run_that_is_under_way(stage: Stage, redis: Redis, session: dict[str, str]) -> None:
    task = await stage.put(since=stage.before(1), concurrencyPolicy="Replace", session=session)
    await stage.tick()
    (old,) = stage.heard.heads
    claim = await claimed(stage.pool, old, owner="w-1/n")
    told: list[UUID] = []
    control = Control(redis, KEYS)
    listening = asyncio.create_task(control.listen("w-1", lambda message: told.append(message.run_id)))
    await eventually(lambda: redis.pubsub_channels(KEYS.control("w-1")), within=10, what="the worker listens")
    stream = WorkStream(redis, KEYS)
    firing = await stage.scheduler(1, announcer=BusAnnouncer(stream, EventStream(redis, KEYS), control))
    await firing.tick()

    looks = await runs.look(stage.pool, [old])
    assert looks[old].status is RunStatus.CANCELLED
    _, new = await stage.started(task)
    assert new.run_id is not None
    assert (await stream.entries([new.run_id]))[new.run_id] is not None, "the new one can be worked on at once"
    await eventually(lambda: told == [old], within=10, what="the worker hears of it")
    ended = await EventStream(redis, KEYS).read(old, after=-1, limit=1000)
    assert ended[-1].kind is Kind.CANCELLED
    assert ended[-1].epoch == claim.epoch
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await stream.aclose()


async def test_replace_starts_the_newest_of_several_missed_slots(stage: Stage) -> None:
    task = await stage.put(since=stage.before(4), concurrencyPolicy="Replace")
    await stage.tick()
    assert await stage.outcomes(task) == [OVERLAP, OVERLAP, OVERLAP, RAN]
    assert len(await stage.run_keys()) == 1


# Suspension


@pytest.mark.parametrize("whose", ["task", "agent"])
async def test_suspended_slots_are_skipped_and_not_made_up_for(stage: Stage, whose: str) -> None:
    task = await stage.put(since=stage.before(5), suspend=whose == "task")
    await stage.tick(suspended=whose == "agent")
    assert await stage.outcomes(task) == [SUSPENDED] * 5
    if whose == "task":
        await stage.put(task, since=stage.time, suspend=False)
    await stage.tick()
    assert await stage.run_keys() == {}
    await stage.tick(1)
    assert len(await stage.run_keys()) == 1


async def test_cr_06_what_passed_suspended_is_not_replayed_even_if_no_scheduler_was_there(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3 * 24 * 60), suspend=True)
    await stage.put(task, since=stage.time, suspend=False)
    await stage.tick()
    assert await stage.run_keys() == {}
    await stage.tick(1)
    assert len(await stage.run_keys()) == 1


# Edits, deletions


async def test_an_edit_of_the_times_counts_no_old_slot_as_missed(stage: Stage) -> None:
    task = await stage.put(since=stage.before(9), schedule="0 0 1 1 *")
    await stage.tick()
    await stage.put(task, since=stage.before(2), schedule="* * * * *")
    await stage.tick()
    assert await stage.outcomes(task) == [LATE, RAN]
    await stage.put(task, since=stage.before(4), schedule="*/1 * * * *")
    await stage.tick()
    assert set((await stage.run_keys()).values()) == {1}, "and decides none again"
    assert len(await stage.run_keys()) == 2


async def test_an_edit_of_the_times_leaves_slots_of_before_that_nobody_has_decided(stage: Stage) -> None:
    """Four edits while no scheduler was there; each slot belongs to the times that held then, the rest of the spec is the newest."""
    task = await stage.put(since=stage.before(12), schedule="* * * * *")
    await stage.put(task, since=stage.before(9), schedule="* * * * *", suspend=True)
    await stage.put(task, since=stage.before(7), schedule="0 0 1 1 *")
    await stage.put(task, since=stage.before(5), schedule="* * * * *", catchUp={"mode": "All", "limit": 4}, input="anew")
    await stage.put(task, since=stage.time, schedule="* * * * *", catchUp={"mode": "All", "limit": 4}, input="newest")
    await stage.tick()
    # 3 of the first times, 2 while suspended, none of the third, 5 of the last, of which 4 are made up for or on time
    assert await stage.outcomes(task) == [DEADLINE] * 3 + [SUSPENDED] * 2 + [LATE] * 4 + [RAN]
    inputs = await stage.pool.fetch("SELECT content #>> '{}' FROM inputs")
    assert [row[0] for row in inputs] == ["newest"] * 5
    assert await stage.pool.fetchval("SELECT spec ? 'superseded' FROM cron_tasks") is False, "what is decided is forgotten"
    await stage.tick()
    assert len(await stage.run_keys()) == 5


async def test_slots_of_before_do_not_start_once_the_task_is_suspended(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3))
    await stage.put(task, since=stage.before(1), suspend=True)
    await stage.tick()
    assert await stage.outcomes(task) == [SUSPENDED] * 3
    assert await stage.run_keys() == {}


async def test_times_of_before_that_cannot_be_followed_hold_up_nothing(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3), schedule="never")
    await stage.put(task, since=stage.before(1))
    await stage.tick()
    assert await stage.outcomes(task) == [RAN]


async def test_edits_while_nobody_decides_are_remembered_up_to_a_number(stage: Stage) -> None:
    task = await stage.put(since=stage.before(70))
    for minutes in range(60, 0, -1):
        await stage.put(task, since=stage.before(minutes), schedule="* * * * *" if minutes % 2 else "*/1 * * * *")
    assert await stage.pool.fetchval("SELECT jsonb_array_length(spec -> 'superseded') FROM cron_tasks") == 50
    await stage.tick()
    assert len(await stage.outcomes(task)) == 50 + 1


async def test_an_edit_of_the_input_loses_no_slot(stage: Stage) -> None:
    since = stage.before(2)
    task = await stage.put(since=since)
    await stage.put(task, since=stage.time, input="something else")
    await stage.tick()
    assert await stage.outcomes(task) == [LATE, RAN]
    inputs = await stage.pool.fetch("SELECT content #>> '{}' FROM inputs")
    assert {row[0] for row in inputs} == {"something else"}


async def test_cr_14_another_zone_is_another_schedule(stage: Stage) -> None:
    task = await stage.put(since=stage.before(1), schedule="0 9 * * *")
    scheduler = await stage.scheduler()
    await scheduler.tick()
    (before,) = await cron_tasks.states(stage.pool)
    await stage.put(task, since=stage.time, schedule="0 9 * * *", timeZone="Asia/Tokyo")
    (between,) = await cron_tasks.states(stage.pool)
    assert between.next_slot is None, "the old next time is not shown any more"
    await scheduler.tick()
    (after,) = await cron_tasks.states(stage.pool)
    assert before.next_slot is not None and after.next_slot is not None
    assert (before.next_slot.astimezone(UTC).hour, after.next_slot.astimezone(UTC).hour) == (9, 0)
    assert after.next_slot > stage.time
    assert await stage.outcomes(task) == []


async def test_a_deleted_task_does_not_fire(stage: Stage) -> None:
    task = await stage.put(since=stage.before(3))
    del stage.tasks[task]
    await stage.write()
    await stage.tick()
    assert await stage.run_keys() == {}


async def test_cr_20_made_anew_under_its_name_it_neither_repeats_nor_loses_a_slot(stage: Stage) -> None:
    since = stage.before(4)
    old = await stage.put(since=since)
    await stage.tick()
    done = [one.slot for one in await stage.started(old)]
    assert len(done) == 4
    del stage.tasks[old]
    new = await stage.put(since=since + MINUTE, name="report")  # made before its predecessor had decided everything
    other = await stage.put(since=since, name="other")
    await stage.tick(1)
    assert [one.slot for one in await stage.started(new)] == [done[-1] + MINUTE]
    assert len(await stage.started(other)) == 5, "another name is another task"


async def test_cr_20_a_slot_between_the_deletion_and_a_new_task_is_not_lost(stage: Stage) -> None:
    """The slot has come, no scheduler has looked, the task is made anew: its time of creation has whole seconds, so it is the slot's."""
    old = await stage.put(since=stage.before(3), schedule="* * * * *")
    await stage.tick()
    del stage.tasks[old]
    slot = stage.time + MINUTE / 2
    new = await stage.put(since=slot, schedule="* * * * *")
    await stage.tick(1)
    assert [one.slot for one in await stage.started(new)] == [slot]
    await stage.put(new, since=slot + MINUTE / 2, schedule="*/1 * * * *")
    await stage.tick(1)
    assert len(await stage.run_keys()) == 4, "an edit soon after repeats nothing"


@pytest.mark.parametrize(
    ("other", "takes_over"),
    [
        ({}, True),
        ({"schedule": "1-59 * * * *"}, False),
        ({"timeZone": "Asia/Tokyo"}, False),
        ({"suspend": True}, False),
        ({"name": "another"}, False),
        ({"deleted": -2}, False),
    ],
)
async def test_cr_20_a_new_task_takes_over_only_what_its_predecessor_would_have_run(
    stage: Stage, other: dict[str, Any], takes_over: bool
) -> None:
    spec = {"schedule": "* * * * *", "deleted": 0, **other}
    deleted = stage.time + spec.pop("deleted") * MINUTE
    old = await stage.put(since=stage.before(3), **spec)
    del stage.tasks[old]
    await stage.write()
    await stage.pool.execute("UPDATE cron_tasks SET deleted_at = $1", deleted)
    new = await stage.put(since=stage.time, schedule="* * * * *")
    (row,) = [row for row in await cron_tasks.all_of(stage.pool) if row.schedule.uid == new]
    assert row.schedule.slots_from == stage.time - (MINUTE if takes_over else timedelta())


async def test_cr_20_a_deletion_waits_for_who_decides_and_the_successor_sees_it(stage: Stage, pool: Pool) -> None:
    since = stage.before(2)
    old = await stage.put(since=since)
    async with pool.acquire() as conn:
        deciding = conn.transaction()
        await deciding.start()
        locked = await cron_tasks.lock(conn, old)
        assert locked is not None
        newest = stage.time.replace(second=0)
        await cron_tasks.note(conn, locked, decided_through=newest, next_slot=None)
        del stage.tasks[old]
        successor = asyncio.create_task(stage.put(since=since))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE cron_tasks%'"
        await eventually(lambda: pool.fetchval(waits), within=10, what="the operator waits for the row")
        await deciding.commit()
    new = await successor
    rows = {row.schedule.uid: row.schedule for row in await cron_tasks.all_of(pool)}
    assert rows[new].slots_from == newest


async def test_cr_20_a_name_in_two_namespaces_is_two_tasks_and_a_database_made_anew_has_its_runs(
    stage: Stage, databases: Databases, redis: Redis
) -> None:
    """One Redis for all of them, which is kept."""
    since, uid = stage.before(1), uuid4()

    async def fire(database_url: str, namespace: str, task: UUID) -> UUID:
        """The run, which workers of that AgentRun can find."""
        keys = Keys(namespace, "agent")
        pool, stream = await create_pool(database_url, 2), WorkStream(redis, keys)
        there = Stage(pool, stage.time)
        await there.put(task, since=since)
        announcer = BusAnnouncer(stream, EventStream(redis, keys), Control(redis, keys))
        ahead = stage.time - await postgres_now(pool)
        await Firing(pool, announcer, namespace=namespace, name="agent", suspended=False, ahead=ahead).tick()
        (one,) = await there.started(task)
        assert one.run_id is not None
        assert (await stream.entries([one.run_id]))[one.run_id] is not None
        await stream.aclose()
        await pool.close()
        return one.run_id

    async with databases.migrated() as first, databases.migrated() as other, databases.migrated() as anew:
        found = [await fire(first, "shop", uid), await fire(other, "bank", uuid4()), await fire(anew, "shop", uid)]
    assert len(set(found)) == 3


# Several schedulers


async def test_cr_09_schedulers_with_other_clocks_start_nothing_twice(stage: Stage) -> None:
    task = await stage.put(since=stage.before(1))
    for passed in range(10):
        for clock in (0, 1.5, -5):
            await stage.tick(clock + passed)
    found = [one.slot for one in await stage.started(task)]
    first = stage.time.replace(second=0)
    assert found == [first + number * MINUTE for number in range(12)]
    assert set((await stage.run_keys()).values()) == {1}


async def test_a_clock_that_jumps_back_an_hour_starts_nothing_and_loses_nothing(stage: Stage) -> None:
    task = await stage.put(since=stage.before(1))
    scheduler = await stage.scheduler()
    for minutes in (0, -60, -59, -1, 0, 1, -60, 2):
        scheduler._ahead = (await stage.scheduler(minutes))._ahead
        await scheduler.tick()
    first = stage.time.replace(second=0)
    assert [one.slot for one in await stage.started(task)] == [first + number * MINUTE for number in range(3)]
    (state,) = await cron_tasks.states(stage.pool)
    assert state.next_slot == first + 3 * MINUTE


async def test_schedulers_at_the_same_moment_decide_once(stage: Stage) -> None:
    since = stage.before(6)
    tasks = [await stage.put(since=since, name=f"task-{number}") for number in range(10)]
    await asyncio.gather(*(stage.tick() for _ in range(6)))
    for task in tasks:
        assert await stage.outcomes(task) == [LATE] * 5 + [RAN]
    assert sum((await stage.run_keys()).values()) == 60
    assert len(stage.heard.heads) == 60


async def test_a_slot_that_somebody_else_has_decided_starts_nothing(stage: Stage, pool: Pool) -> None:
    since = stage.before(3)
    task = await stage.put(since=since)
    taken = stage.time.replace(second=0) - MINUTE
    await slots.record(pool, task, [Slot(taken, OVERLAP)])
    await stage.tick()
    assert await stage.outcomes(task) == [LATE, OVERLAP, RAN]
    assert len(await stage.run_keys()) == 2


async def test_a_run_that_was_there_already_is_the_slot_s(stage: Stage, pool: Pool) -> None:
    task = await stage.put(since=stage.before(2))
    await stage.tick()
    before = await stage.started(task)
    await pool.execute("DELETE FROM slots")
    await pool.execute("UPDATE cron_tasks SET decided_through = NULL")
    await stage.tick()
    assert await stage.started(task) == before
    assert set((await stage.run_keys()).values()) == {1}


async def test_an_outage_of_postgres_is_told(stage: Stage) -> None:
    scheduler = await stage.scheduler()
    await stage.pool.close()
    with pytest.raises(StoreUnavailable):
        await scheduler.tick()


async def test_an_outage_of_redis_delays_nothing_but_the_news(stage: Stage) -> None:
    nowhere = await connect("redis://127.0.0.1:1/0")
    stream = WorkStream(nowhere, KEYS)
    announcer = BusAnnouncer(stream, EventStream(nowhere, KEYS), Control(nowhere, KEYS))
    task = await stage.put(since=stage.before(2))
    await (await stage.scheduler(announcer=announcer)).tick()
    assert await stage.outcomes(task) == [LATE, RAN]
    await stream.aclose()
    await nowhere.aclose()


# CronTasks without success


async def without_success(stage: Stage, *, suspended: bool = False) -> dict[str, float]:
    """What the metric says, by CronTask."""
    await Watching(stage.pool, namespace="default", suspended=suspended).tick()
    return {sample.labels["task"]: sample.value for metric in SLOTS_WITHOUT_SUCCESS.collect() for sample in metric.samples}


async def ended(stage: Stage, run_id: UUID, moment: datetime) -> None:
    """As if it had ended then."""
    await stage.pool.execute("UPDATE runs SET finished_at = $2 WHERE id = $1", run_id, moment)


def just_passed(now: datetime, count: int) -> str:
    """A schedule of the newest minutes that have passed, and of none that come in the next half an hour."""
    return f"{','.join(str((now - number * MINUTE).minute) for number in range(count))} * * * *"


async def test_slots_since_the_newest_success_are_counted(stage: Stage) -> None:
    stage.time = await postgres_now(stage.pool)
    since = stage.time - 4 * MINUTE
    task = await stage.put(since=since, schedule=just_passed(stage.time, 4))
    await stage.put(since=since, name="quiet", schedule="0 0 1 1 *")
    await stage.tick()
    assert await without_success(stage) == {"report": 4, "quiet": 0}

    first, second, *_ = await stage.started(task)
    assert first.run_id is not None and second.run_id is not None
    await stage.end(first.run_id, RunStatus.FAILED)
    await stage.end(second.run_id)
    await ended(stage, second.run_id, second.slot + MINUTE / 2)
    assert await without_success(stage) == {"report": 2, "quiet": 0}


@pytest.mark.parametrize("history_limit", [1, 1000])
async def test_slots_without_a_run_or_a_decision_count_and_no_more_than_the_metric_says(stage: Stage, history_limit: int) -> None:
    stage.time = await postgres_now(stage.pool)
    task = await stage.put(since=stage.time - 30 * MINUTE, catchUp={"mode": "None"}, historyLimit=history_limit)
    assert await without_success(stage) == {"report": 20}, "nobody has decided them"
    await stage.tick()
    assert 3 <= (await without_success(stage))["report"] <= 20
    await stage.put(task, since=stage.time, schedule="*/1 * * * *")
    assert (await without_success(stage))["report"] <= 1, "another schedule begins anew"


async def test_runs_that_take_longer_than_a_period_are_no_lapse_if_they_succeed(stage: Stage) -> None:
    """Each minute's run takes five: what counts is when a success came, not of which slot it was."""
    stage.time = await postgres_now(stage.pool)
    task = await stage.put(since=stage.time - 9 * MINUTE, schedule=just_passed(stage.time, 9))
    await stage.tick()
    started = await stage.started(task)
    for one in started[:-6]:
        assert one.run_id is not None
        await stage.end(one.run_id)
        await ended(stage, one.run_id, one.slot + 5 * MINUTE)
    assert await without_success(stage) == {"report": 1}, "the newest success came with the slot before the newest"
    last = started[-1].run_id
    assert last is not None
    await stage.end(last)
    assert await without_success(stage) == {"report": 0}


async def test_what_is_suspended_or_deleted_has_no_slots_without_success_and_what_nobody_can_follow_has_the_most(
    stage: Stage,
) -> None:
    stage.time = await postgres_now(stage.pool)
    since = stage.time - 5 * MINUTE
    task = await stage.put(since=since, suspend=True)
    gone = await stage.put(since=since, name="gone", schedule=just_passed(stage.time, 5))
    await stage.put(since=since, name="odd", schedule="nonsense")
    await stage.tick()
    assert await without_success(stage) == {"gone": 5, "odd": 20}
    assert await without_success(stage, suspended=True) == {}
    del stage.tasks[gone]
    await stage.put(task, since=stage.time, suspend=False)
    assert {name: count for name, count in (await without_success(stage)).items() if count > 1} == {"odd": 20}
    assert "gone" not in await without_success(stage)


# As processes


@pytest.fixture
def product(tmp_path: Path, database_url: str, redis_url: str) -> Product:
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(MANIFEST)
    return Product(manifest, database_url, redis_url, api_keys=tmp_path / "keys")


async def missed(pool: Pool, count: int) -> datetime:
    """A moment after which, by Postgres' own clock, `count` minutes have passed that are no longer on time."""
    now = await postgres_now(pool)
    return now.replace(second=0, microsecond=0) - (count + 1) * MINUTE - timedelta(seconds=30)


def expected(since: datetime, tasks: Sequence[UUID], count: int) -> set[str]:
    first = since.replace(second=0, microsecond=0) + MINUTE
    return {run_key(task, first + number * MINUTE) for task in tasks for number in range(count)}


async def all_there(stage: Stage, redis: Redis, wanted: set[str]) -> bool:
    """Each wanted run once, and known to the workers."""
    keys = await stage.run_keys()
    rows = await stage.pool.fetch("SELECT id, idempotency_key FROM runs")
    entries = await redis.hkeys(KEYS.entries)
    known = {key.decode() for key in entries}
    published = {row["idempotency_key"] for row in rows if str(row["id"]) in known}
    return wanted <= published and set(keys.values()) == {1}


@pytest.mark.parametrize("count", [2, 3])
async def test_cr_08_schedulers_started_at_once_fire_each_slot_once_and_stay_ready(
    count: int, product: Product, stage: Stage, redis: Redis, product_processes: ProductProcesses
) -> None:
    since = await missed(stage.pool, 5)
    tasks = [await stage.put(since=since, name=f"task-{number}") for number in range(10)]
    started = await asyncio.gather(*(product_processes.scheduler(product) for _ in range(count)))
    wanted = expected(since, tasks, 5)
    await eventually(lambda: all_there(stage, redis, wanted), within=30, what="each slot has its run")
    for scheduler in started:
        assert (await scheduler.get("/readyz")).status_code == 200
        assert '"level": "error"' not in scheduler.log_tail(1000)
        assert await scheduler.terminate() == 0
    begun = (await postgres_now(stage.pool) - since + timedelta(seconds=30)) // MINUTE
    assert set(await stage.run_keys()) <= expected(since, tasks, begun), "and no minute that has not come"


@pytest.mark.long
async def test_cr_08_three_schedulers_fire_five_minutes_as_they_come(
    product: Product, stage: Stage, redis: Redis, product_processes: ProductProcesses
) -> None:
    since = await postgres_now(stage.pool)
    tasks = [await stage.put(since=since, name=f"task-{number}") for number in range(10)]
    started = await asyncio.gather(*(product_processes.scheduler(product) for _ in range(3)))
    wanted = expected(since, tasks, 5)
    while await postgres_now(stage.pool) < since + timedelta(minutes=6):
        assert [(await scheduler.get("/readyz")).status_code for scheduler in started] == [200] * 3
        await asyncio.sleep(1)
    await eventually(lambda: all_there(stage, redis, wanted), within=30, what="each slot has its run")
    run_keys = set(await stage.run_keys())
    begun = (await postgres_now(stage.pool) - since) // MINUTE + 1
    assert run_keys <= expected(since, tasks, begun), "and no minute that has not come"
    for task in tasks:
        assert set(await stage.outcomes(task)) == {RAN}, "and each was on time"
    for scheduler in started:
        assert '"level": "error"' not in scheduler.log_tail(1000)
        assert await scheduler.terminate() == 0


@pytest.mark.long
async def test_cr_12_a_tick_of_a_minute_and_a_half_is_no_stall(
    product: Product, stage: Stage, redis: Redis, product_processes: ProductProcesses
) -> None:
    since = await missed(stage.pool, 1)
    tasks = [await stage.put(since=since, name=f"task-{number}") for number in range(3)]
    scheduler = await product_processes.scheduler(product, failpoints="scheduler.slots.committed=sleep:31@*")
    wanted, ends = expected(since, tasks, 1), time.monotonic() + 95
    while time.monotonic() < ends:
        assert (await scheduler.get("/healthz")).status_code == 200
        await asyncio.sleep(1)
    assert wanted <= set(await stage.run_keys())
    await eventually(lambda: all_there(stage, redis, wanted), within=60, what="each slot has its run")


@pytest.mark.parametrize("point", ["scheduler.slots.locked", "scheduler.slots.stored", "scheduler.slots.committed"])
async def test_cr_07_a_crash_between_two_lines_repeats_and_loses_nothing(
    point: str, product: Product, stage: Stage, redis: Redis, product_processes: ProductProcesses
) -> None:
    since = await missed(stage.pool, 3)
    tasks = [await stage.put(since=since, name=f"task-{number}") for number in range(3)]
    wanted = expected(since, tasks, 3)
    for turn in (1, 2):
        crashing = await product_processes.scheduler(product, failpoints=f"{point}=kill@{turn}", ready=False)
        assert await crashing.wait(within=30) == -signal.SIGKILL
    healing = [await product_processes.scheduler(product) for _ in range(2)]
    await eventually(lambda: all_there(stage, redis, wanted), within=30, what="each slot has its run, and it is published")
    for task in tasks:
        assert (await stage.outcomes(task))[:3] == [LATE] * 3
    for scheduler in healing:
        assert await scheduler.terminate() == 0


async def test_a_scheduler_that_hangs_in_a_transaction_does_not_keep_its_task(
    product: Product, stage: Stage, redis: Redis, product_processes: ProductProcesses
) -> None:
    since = await missed(stage.pool, 2)
    task = await stage.put(since=since)
    hanging: ProductProcess = await product_processes.scheduler(product, failpoints="scheduler.slots.stored=stop", ready=False)
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND application_name = 'agentrun-scheduler'"
    )
    await eventually(lambda: stage.pool.fetchval(waits), within=30, what="it hangs")
    other = await product_processes.scheduler(product)
    await eventually(
        lambda: all_there(stage, redis, expected(since, [task], 2)),
        within=cron_tasks.HOLD_SECONDS + 20,
        what="another one fires the slots",
    )
    hanging.cont()
    await hanging.ready()
    await eventually(lambda: all_there(stage, redis, expected(since, [task], 2)), within=5, what="and they stay as they are")
    assert await hanging.terminate() == 0
    assert await other.terminate() == 0
