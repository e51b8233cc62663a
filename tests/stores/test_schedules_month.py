"""A month of schedules: three zones whose clocks are set forward or back in it, 200 CronTasks, three schedulers with clocks of their own.

The time is simulated, Postgres and the schedulers are real. Schedulers are killed between their statements, and all of them are away for
a minute up to three days; CronTasks are edited, suspended, deleted and made anew. Which runs there must be is said by an oracle that is
written from docs/schedules.md alone.
"""

import asyncio
import json
import os
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import pytest
import store_servers
from cron_oracle import Oracle
from waiting import eventually

from agentrun import failpoints
from agentrun.domain.slots import STARTED, SlotOutcome
from agentrun.scheduler.loop import Firing, News
from agentrun.store import cron_tasks
from agentrun.store.cron_tasks import Schedule
from agentrun.store.pool import Pool, create_pool

SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Sydney")
START = "2025-03-08"
TASKS = 200
SCHEDULERS = 3
SKEW = 3.0
KILLS = 20
OUTAGES = (3 * DAY, 26 * HOUR, 9 * HOUR, 2 * HOUR, *(25 * MINUTE,) * 3, *(4 * MINUTE,) * 4, *(MINUTE,) * 5)
POINTS = ("scheduler.slots.locked", "scheduler.slots.stored", "scheduler.slots.committed")
POLICIES: tuple[dict[str, Any], ...] = (
    {"catchUp": {"mode": "All", "limit": 100}},
    {"catchUp": {"mode": "All", "limit": 100}},
    {"catchUp": {"mode": "All", "limit": 3}},
    {"catchUp": {"mode": "Latest"}},
    {"catchUp": {"mode": "None"}},
    {"catchUp": {"mode": "All", "limit": 100}, "startingDeadlineSeconds": 7200},
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


CHANGES = (at("2025-03-09T07:00"), at("2025-03-30T01:00"), at("2025-04-05T16:00"))
"""New York's clocks are set forward, Berlin's forward, Sydney's back."""


# What is scheduled


@dataclass(frozen=True)
class Segment:
    """One generation of a CronTask, from `since` until before `until`."""

    uid: UUID
    name: str
    schedule: str
    zone: str
    policy: dict[str, Any]
    suspended: bool
    since: datetime
    until: datetime

    def row(self, generation: int) -> Schedule:
        spec = {"name": self.name, "schedule": self.schedule, "timeZone": self.zone, "input": "go on", "suspend": self.suspended}
        return Schedule(self.uid, generation, json.dumps({**spec, **self.policy}), self.since)


def some_schedule(chance: random.Random) -> str:
    """Most are at night, when clocks are set; minutes are few, so that many tasks are due at once."""
    minute, hour = chance.choice((0, 15, 30, 45)), chance.choice((0, 1, 2, 2, 2, 3, 9, 14, 23))
    return chance.choices(
        (
            f"{minute} {hour} * * *",
            f"{minute} {hour} * * 1-5",
            f"{minute} {hour} * * 0,6",
            f"{minute} {hour} 1-7,15,*/9 * *",
            f"{minute} {hour} 13 * 5",
            "0,30 1,2 * * *",
            "*/30 1-2 * * *",
            f"{minute} */8 * * *",
            f"{minute} * * * 0",
        ),
        weights=(60, 10, 15, 10, 5, 5, 5, 5, 5),
    )[0]


@dataclass
class Plan:
    """Everything that happens in the month, decided before it begins."""

    chance: random.Random
    start: datetime
    end: datetime
    segments: list[Segment] = field(default_factory=list)
    outages: list[tuple[datetime, datetime]] = field(default_factory=list)

    def make(self) -> "Plan":
        for number in range(TASKS):
            self._make_task(f"task-{number}", edits=self.chance.choice((1, 2)) if number % 8 == 0 else 0)
        self._make_outages()
        return self

    def _make_task(self, name: str, *, edits: int) -> None:
        """An edit is another schedule, another zone, a suspension, or a deletion and a new CronTask of the same name."""
        moments = sorted(self.start + timedelta(minutes=self.chance.randrange(1, 30 * 24 * 60), seconds=40) for _ in range(edits))
        now = Segment(
            UUID(int=self.chance.getrandbits(128), version=4),
            name,
            some_schedule(self.chance),
            self.chance.choice(ZONES),
            self.chance.choice(POLICIES),
            False,
            self.start,
            self.end,
        )
        for moment in moments:
            self.segments.append(Segment(**{**vars(now), "until": moment}))
            changed: dict[str, Any] = self.chance.choice(
                (
                    {"schedule": some_schedule(self.chance)},
                    {"zone": self.chance.choice([zone for zone in ZONES if zone != now.zone])},
                    {"suspended": not now.suspended},
                    {"uid": UUID(int=self.chance.getrandbits(128), version=4), "suspended": False},
                )
            )
            now = Segment(**{**vars(now), **changed, "since": moment})
        self.segments.append(now)

    def _make_outages(self) -> None:
        """The one of more than a day is while clocks are set forward. The others begin half a minute before a slot, and nobody is away
        while clocks are set back. Each ends half a minute past a minute.
        """
        slots = sorted({slot for segment in self.segments if not segment.suspended for slot in self.slots(segment)})
        slots = [slot for slot in slots if self.start + HOUR < slot < self.start + 26 * DAY]
        for length in OUTAGES:
            while True:
                if length == 26 * HOUR:
                    begin = (self.chance.choice(CHANGES[:2]) - 13 * HOUR).replace(second=30)
                else:
                    begin = self.chance.choice(slots) - 30 * SECOND
                end = begin + length
                apart = all(end + MINUTE < other or last + MINUTE < begin for other, last in self.outages)
                if apart and not begin - DAY < CHANGES[2] < end + DAY:
                    self.outages.append((begin, end))
                    break

    def tasks(self) -> list[list[Segment]]:
        """The generations of each CronTask."""
        found: dict[UUID, list[Segment]] = {}
        for segment in self.segments:
            found.setdefault(segment.uid, []).append(segment)
        return list(found.values())

    def slots(self, segment: Segment) -> list[datetime]:
        """By the oracle, oldest first."""
        month = (self.start, self.end - MINUTE)
        return [slot for slot in _slots(segment.schedule, segment.zone, *month) if segment.since < slot < segment.until]

    def away(self, moment: datetime) -> bool:
        return any(begin <= moment < end for begin, end in self.outages)

    def looks(self) -> list[datetime]:
        """When schedulers look: some seconds after each slot, after each outage, and now and then for nothing. Later than each
        other's clocks are apart, and before the minute is half over.
        """
        minutes = {slot for segment in self.segments for slot in self.slots(segment)}
        minutes |= {self.start + timedelta(minutes=self.chance.randrange(30 * 24 * 60)) for _ in range(100)}
        found = [slot + timedelta(seconds=self.chance.uniform(SKEW + 1, 20)) for slot in minutes]
        return sorted([moment for moment in found if not self.away(moment)] + [end for _, end in self.outages])


# The oracle


@cache
def _slots(schedule: str, zone: str, since: datetime, until: datetime) -> list[datetime]:
    return list(Oracle(schedule, zone).slots(since, until))


def decided(
    segments: list[Segment], waiting: list[tuple[datetime, Segment]], looks: list[datetime]
) -> Iterator[tuple[datetime, Segment, list[tuple[datetime, Segment]]]]:
    """Each look at which slots of a CronTask are due, with its generation and these slots, oldest first. A slot belongs to the generation
    of its time, whichever is there when it is decided. `waiting` are all of them.
    """
    place = 0
    for look in looks:
        now = next((segment for segment in segments if segment.since < look < segment.until), None)
        if now is not None:
            end = bisect_right(waiting, look, lo=place, key=lambda one: one[0])
            if end > place:
                yield look, now, waiting[place:end]
            place = end


def outcome(slot: datetime, due: list[datetime], look: datetime, policy: dict[str, Any]) -> SlotOutcome:
    """What becomes of one of the slots that are due, by catchUp and startingDeadlineSeconds."""
    mode, limit = policy["catchUp"]["mode"], policy["catchUp"].get("limit", 10)
    if look - slot > timedelta(seconds=policy.get("startingDeadlineSeconds", 10**9)):
        return SlotOutcome.SKIPPED_DEADLINE
    if mode == "Latest" and slot != due[-1]:
        return SlotOutcome.SKIPPED_DEADLINE
    if look - slot < MINUTE:
        return SlotOutcome.RAN
    missed = [one for one in due if look - one >= MINUTE]
    if mode == "None" or (mode == "All" and slot not in missed[-limit:]):
        return SlotOutcome.SKIPPED_DEADLINE
    return SlotOutcome.LATE


# Schedulers


class Silent:
    async def send(self, news: News) -> None:
        """Redis is not told; that what is not published is found is tested elsewhere."""


class Scheduler:
    """A real one whose clock is up to three seconds off, and which can be killed."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self._url = url
        self._chance = chance
        self._pool: Pool | None = None
        self._firing: Firing | None = None
        self.ticks = 0

    async def tick(self, moment: datetime) -> None:
        if self._firing is None or self._pool is None:
            self._pool = await create_pool(self._url, 1)
            self._firing = Firing(self._pool, Silent(), namespace="default", name="agent", suspended=False)
        skew = timedelta(seconds=self._chance.uniform(-SKEW, SKEW))
        self._firing._ahead = moment + skew - datetime.now(UTC)
        await self._firing.tick()
        self.ticks += 1

    async def kill(self, tick: "asyncio.Task[None]") -> bool:
        """Cuts its connection and ends it; the next tick is that of a new process. Whether it was at work."""
        at_work = not tick.done()
        if self._pool is not None:
            self._pool.terminate()
        tick.cancel()
        await asyncio.gather(tick, return_exceptions=True)
        self._pool = self._firing = None
        return at_work

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        self._pool = self._firing = None


class Month:
    """Lets the plan happen."""

    def __init__(self, plan: Plan, url: str, pool: Pool) -> None:
        self.plan = plan
        self.pool = pool
        self.schedulers = [Scheduler(url, plan.chance) for _ in range(SCHEDULERS)]
        self.killed: Counter[str] = Counter()

    async def run(self, looks: list[datetime]) -> None:
        edits = sorted({segment.since for segment in self.plan.segments} - {self.plan.start})
        deadly = set(self.plan.chance.sample(range(10, len(looks)), KILLS))
        await self._write(self.plan.start)
        for number, look in enumerate(looks):
            while edits and edits[0] < look:
                await self._write(edits.pop(0))
            if any(look == end for _, end in self.plan.outages) and self.plan.chance.random() < 0.3:
                for scheduler in self.schedulers:
                    await scheduler.aclose()  # their processes were away; else it was Postgres
            early = look.replace(second=0) - self.plan.chance.uniform(0.1, SKEW) * SECOND  # for some clocks the slot has come
            if self.plan.chance.random() < 0.1 and not self.plan.away(early):
                await self._all(early, number)
            if number in deadly:
                await self._kill_one(look)
            await self._all(look, number)

    async def _write(self, moment: datetime) -> None:
        live = [segment for segment in self.plan.segments if segment.since <= moment < segment.until]
        generations: Counter[UUID] = Counter(segment.uid for segment in self.plan.segments if segment.since <= moment)
        async with self.pool.acquire() as conn:
            await cron_tasks.replace(conn, [segment.row(generations[segment.uid]) for segment in live])

    async def _all(self, moment: datetime, number: int) -> None:
        """All schedulers look at about the same time, in another order each time."""
        first = number % SCHEDULERS
        order = self.schedulers[first:] + self.schedulers[:first]
        async with asyncio.TaskGroup() as group:
            for scheduler in order:
                group.create_task(scheduler.tick(moment))

    async def _kill_one(self, moment: datetime) -> None:
        point = self.plan.chance.choice((*POINTS, "anywhere"))
        if point != "anywhere":
            failpoints.configure(f"{point}=sleep:60@{self.plan.chance.randrange(1, 4)}")
        ticks = {asyncio.create_task(one.tick(moment)): one for one in self.schedulers}
        if point == "anywhere":
            await asyncio.sleep(self.plan.chance.uniform(0, 0.02))
            victim = self.plan.chance.choice(list(ticks))
        else:
            # The others go on without whoever hangs at the point; if nobody comes there as often, nobody is killed.
            await eventually(lambda: sum(not tick.done() for tick in ticks) <= 1, within=30, what="the others are done")
            await asyncio.wait(ticks, timeout=0.05)
            victim = next((tick for tick in ticks if not tick.done()), next(iter(ticks)))
        self.killed[point] += await ticks[victim].kill(victim)
        failpoints.configure("")
        await asyncio.gather(*(tick for tick in ticks if tick is not victim))

    async def aclose(self) -> None:
        failpoints.configure("")
        for scheduler in self.schedulers:
            await scheduler.aclose()


def within(plan: Plan, begin: datetime, end: datetime) -> bool:
    """Whether an outage meets a slot that would else have run."""
    return any(begin < slot < end for segment in plan.segments if not segment.suspended for slot in plan.slots(segment))


@pytest.mark.skipif(
    os.environ.get(store_servers.VARIABLE) == "system", reason="a month is lived through once, with the stores from wheels"
)
@pytest.mark.slow
async def test_a_month_has_each_run_once(database_url: str, proof: Callable[[str], None]) -> None:
    begin = at(START)
    plan = Plan(random.Random(START), begin, begin + 30 * DAY).make()
    looks = plan.looks()
    assert all(within(plan, begin, end) for begin, end in plan.outages), "each outage meets slots"
    assert not any(begin - HOUR < CHANGES[2] < end + HOUR for begin, end in plan.outages), "schedulers see the clocks set back"
    wanted: Counter[tuple[str, datetime]] = Counter()
    outcomes: dict[tuple[UUID, datetime], str] = {}
    edited = 0
    for segments in plan.tasks():
        waiting = [(slot, segment) for segment in segments for slot in plan.slots(segment)]
        for look, now, slots in decided(segments, waiting, looks):
            due = [slot for slot, segment in slots if not (segment.suspended or now.suspended)]
            for slot, segment in slots:
                edited += segment is not now
                known = outcome(slot, due, look, now.policy) if slot in due else SlotOutcome.SKIPPED_SUSPENDED
                outcomes[now.uid, slot] = known.value
                wanted.update([(now.name, slot)] if known in STARTED else [])
    assert edited, "some are decided after an edit"
    assert set(wanted.values()) == {1}, "the oracle says each slot once"

    async with AsyncExitStack() as stack:
        pool = await create_pool(database_url, 2)
        stack.push_async_callback(pool.close)
        month = Month(plan, database_url, pool)
        stack.push_async_callback(month.aclose)
        await month.run(looks)
        rows = await pool.fetch("SELECT t.spec ->> 'name', r.slot FROM runs r JOIN cron_tasks t ON t.uid = r.cron_task")
        found = Counter((row[0], row[1]) for row in rows)
        recorded = {(row[0], row[1]): row[2] for row in await pool.fetch("SELECT task, slot, outcome FROM slots")}
        assert len(rows) == await pool.fetchval("SELECT count(*) FROM runs")

    duplicates = sum(count - 1 for count in found.values())
    missing, unwanted = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    proof(
        f"slots expected {len(outcomes)}, runs expected {len(wanted)}, runs {sum(found.values())}, duplicates {duplicates}, "
        f"missing {len(missing)}, unwanted {len(unwanted)}; looks {sum(one.ticks for one in month.schedulers)}, "
        f"kills at work {sum(month.killed.values())}, outages {len(plan.outages)}; "
        + ", ".join(f"{count} {name}" for name, count in sorted(Counter(recorded.values()).items()))
    )
    assert sum(month.killed[point] for point in POINTS) > 5, "kills have met transactions"
    assert (duplicates, sorted(missing)[:5], sorted(unwanted)[:5]) == (0, [], [])
    wrong = sorted((key, recorded.get(key), outcomes.get(key)) for key in recorded.keys() | outcomes.keys())
    assert [one for one in wrong if one[1] != one[2]][:5] == [], "and each slot has its outcome"
