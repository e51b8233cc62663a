"""Everything that moves money at the same time: the budgets agree at every moment, and no two transactions wait for each other."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from money import budget, counted, paid, wrong
from run_factory import event, submission

from agentrun.domain.events import Kind
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.scheduler.loop import Firing, News
from agentrun.store import cron_tasks, dead_letters, follow_ups, ledger, transitions
from agentrun.store.budgets import Budget
from agentrun.store.cron_tasks import Schedule
from agentrun.store.ids import new_id
from agentrun.store.ledger import Priced
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Claim, Finish, Flush, LedgerRow, Reason, TakeOver

LANES = 8
TURNS = 60
REPRICED = Decimal("0.01")
ZONES = ("Etc/GMT+12", "Etc/UTC", "Pacific/Kiritimati")
"""Never all on the same day: as about midnight, and after a change of budget.timeZone."""

Call = tuple[UUID, int, int]


@dataclass
class Storm:
    """Lanes that each do something at random, and what the ledger has to say in the end: the calls with the cost that was reported last."""

    pool: Pool
    rng: random.Random
    calls: dict[Call, Decimal | None] = field(default_factory=dict)
    estimates: list[tuple[Call, LedgerRow]] = field(default_factory=list)
    corrected: int = 0
    repriced: int = 0
    redriven: int = 0
    minutes: int = 0
    number: int = 0

    async def lane(self) -> None:
        acts = (self.admit, self.claim, self.book, self.book, self.book, self.correct, self.end, self.take, self.lose, self.lose)
        for _ in range(TURNS):
            await self.rng.choice((*acts, self.reprice, self.redrive, self.redrive, self.fire))()

    @property
    def limits(self) -> Budget:
        return budget("1", day="40", user="15", zone=self.rng.choice(ZONES))

    async def some(self, *, most: int = 4) -> list[tuple[UUID, int, str]]:
        """Runs in no order, with their last attempt; mostly such as have not ended."""
        live = " WHERE status IN ('pending', 'running')" if self.rng.random() < 0.8 else ""
        rows = await self.pool.fetch(f"SELECT id, epoch, status FROM runs{live} ORDER BY id")
        return [(row[0], row[1], row[2]) for row in self.rng.sample(rows, min(len(rows), self.rng.randint(1, most)))]

    async def admit(self) -> None:
        users = (f"u{self.rng.randrange(3)}" for _ in range(3))
        group = [submission(session=f"s{self.rng.randrange(20)}", user=user) for user in users]
        limits = self.limits
        for item, found in zip(group, await follow_ups.submit(self.pool, group, Policy.MERGE, limits), strict=True):
            if found is None:
                await follow_ups.follow_up(self.pool, item, Policy.MERGE, window_seconds=30, budget=limits)

    async def claim(self) -> None:
        wanted = [Claim(run, epoch, f"w/{uuid4()}") for run, epoch, status in await self.some() if status == "pending"]
        await transitions.claim(self.pool, wanted, lease_seconds=30)

    def rows(self, run: UUID, epoch: int) -> list[LedgerRow]:
        """New calls of an attempt: measured, an estimate, or without a price."""
        made = []
        for _ in range(self.rng.randint(1, 3)):
            self.number += 1
            cost = None if self.rng.random() < 0.2 else f"0.{self.rng.randrange(1, 20):02}"
            row = paid(cost, self.number, unmeasured=self.rng.random() < 0.3)
            made.append(row)
            self.calls[run, epoch, row.call] = row.cost_usd
        return made

    def noted(self, run: UUID, epoch: int, rows: list[LedgerRow]) -> None:
        self.estimates += [((run, epoch, row.call), row) for row in rows if row.unmeasured]

    async def book(self) -> None:
        """One group of several attempts, also of those that ended long ago."""
        group = []
        for run, epoch, _ in await self.some():
            if epoch:
                late = self.rng.randint(1, epoch)
                group.append(Flush(run, late, 128, ledger=self.rows(run, late)))
        await transitions.flush(self.pool, group)
        for one in group:
            self.noted(one.run_id, one.epoch, list(one.ledger))

    async def correct(self) -> None:
        """The real figures of calls that were booked as estimates, in one group with new calls of the same attempts."""
        taken = [self.estimates.pop(self.rng.randrange(len(self.estimates))) for _ in range(3) if self.estimates]
        group: dict[tuple[UUID, int], list[LedgerRow]] = {}
        for (run, epoch, call), _ in taken:
            real = paid(f"0.{self.rng.randrange(1, 20):02}", call)
            self.calls[run, epoch, call] = real.cost_usd
            group.setdefault((run, epoch), []).append(real)
            self.corrected += 1
        await transitions.flush(self.pool, [Flush(*key, 128, ledger=rows) for key, rows in group.items()])

    async def end(self) -> None:
        wishes = [
            Finish(
                run,
                epoch,
                self.rng.choice((RunStatus.SUCCEEDED, RunStatus.FAILED)),
                events=[event(10_000, Kind.COMPLETED, epoch=epoch)],
                ledger=self.rows(run, epoch),
            )
            for run, epoch, status in await self.some()
            if status == "running"
        ]
        await transitions.finish(self.pool, wishes)

    async def take(self) -> None:
        """Cancelled, retried and handed back, with the calls that their workers bring along."""
        group = []
        for run, epoch, status in await self.some():
            if status == "running" and self.rng.random() < 0.8:
                reason = self.rng.choice((Reason.RETRYING, Reason.HANDED_BACK))
                group.append(TakeOver(run, reason, epoch=epoch, last_seq=-1, ledger=self.rows(run, epoch)))
            elif self.rng.random() < 0.3:
                group.append(TakeOver(run, Reason.CANCELLED))
        await transitions.take_over(self.pool, group)

    async def lose(self) -> None:
        lost = [(run, epoch) for run, epoch, status in await self.some() if status == "running"]
        for run, epoch in lost:
            await self.pool.execute(
                "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1 AND epoch = $2", run, epoch
            )
        await transitions.take_over(
            self.pool, [TakeOver(run, Reason.LOST, epoch=epoch) for run, epoch in lost], max_lost_attempts=self.rng.randint(1, 2)
        )

    async def reprice(self) -> None:
        now = datetime.now(UTC)
        day = timedelta(days=1)
        found = await ledger.unpriced(self.pool, since=now - day, until=now + day, after=None, limit=6)
        prices = [Priced(one.run_id, one.epoch, one.call, REPRICED, "own") for one in found]
        self.repriced += (await ledger.reprice(self.pool, prices))[0]

    async def redrive(self) -> None:
        """Two persons at once, for the same dead letter."""
        row = await self.pool.fetchrow(
            """SELECT d.run_id, (SELECT count(*) FROM inputs i WHERE i.run_id = d.run_id) FROM dead_letters d
               WHERE d.redriven_run_id IS NULL ORDER BY d.run_id LIMIT 1"""
        )
        if row is None:
            return
        limits = self.limits
        asked = (
            dead_letters.redrive(self.pool, row[0], run_id=new_id(), inputs=[new_id() for _ in range(row[1])], budget=limits)
            for _ in range(2)
        )
        done = await asyncio.gather(*asked)
        self.redriven += sum(isinstance(one, dead_letters.Redriven) and not one.replayed for one in done)

    async def fire(self) -> None:
        """A scheduler, a minute after the one before: each task's run is replaced by the next one."""
        self.minutes += 1
        ahead = timedelta(minutes=self.minutes)
        await Firing(self.pool, Silent(), namespace="test", name="agent", suspended=False, budget=self.limits, ahead=ahead).tick()


class Silent:
    async def send(self, news: News) -> None:
        """Tells nobody."""


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, LANES + 4)
    yield made
    await made.close()


async def cron(pool: Pool, *names: str) -> None:
    """CronTasks whose runs replace each other."""
    spec: dict[str, Any] = {"schedule": "* * * * *", "timeZone": "Etc/UTC", "input": "go", "concurrencyPolicy": "Replace"}
    now = await pool.fetchval("SELECT now()")
    async with pool.acquire() as conn:
        await cron_tasks.replace(conn, [Schedule(uuid4(), 1, json.dumps({"name": name, **spec}), now) for name in names])


@pytest.mark.parametrize("seed", [1, 2])
async def test_groups_corrections_new_prices_redrives_and_replaced_runs_at_the_same_time(
    pool: Pool, seed: int, proof: Callable[[str], None]
) -> None:
    storm = Storm(pool, random.Random(seed))
    await cron(pool, "a", "b")
    broken: list[str] = []
    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            broken.extend(await wrong(pool))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(storm.lane() for _ in range(LANES)))
    finally:
        over.set()
        await watching
    assert broken == [] and await wrong(pool) == []

    rows = {(row[0], row[1], row[2]): row[3] for row in await pool.fetch("SELECT run_id, epoch, call, cost_usd FROM ledger")}
    assert rows.keys() == storm.calls.keys(), "each call is one row"
    for call, cost in storm.calls.items():
        assert rows[call] == cost or (cost is None and rows[call] == REPRICED)
    replaced = await pool.fetchval("SELECT count(*) FROM runs WHERE cron_task IS NOT NULL AND status = 'cancelled'")
    days = await pool.fetchval("SELECT count(DISTINCT day) FROM budget_counters")
    assert min(storm.corrected, storm.repriced, storm.redriven, replaced) > 0 and days > 1, "all of it has happened"
    proof(
        f"{len(rows)} calls, {storm.corrected} corrected, {storm.repriced} priced later, {storm.redriven} redriven, {replaced} replaced"
    )
    for run in await pool.fetch("SELECT id FROM runs WHERE status IN ('pending', 'running')"):
        await transitions.take_over(pool, [TakeOver(run[0], Reason.CANCELLED)])
    reserved, spent = await counted(pool)
    assert reserved == 0
    assert spent == await pool.fetchval(
        "SELECT sum(l.cost_usd) FROM ledger l JOIN runs r ON r.id = l.run_id WHERE r.reserved_usd IS NOT NULL"
    )
