"""CronTasks and budgets: a slot that does not fit is skipped, and no run is given up for one that is not stored."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from money import books, budget, counted, paid, wrong
from run_factory import claimed
from waiting import eventually

from agentrun.domain.slots import SlotOutcome
from agentrun.scheduler.loop import Firing, News
from agentrun.schedules import manual
from agentrun.store import cron_tasks, slots
from agentrun.store.budgets import Budget
from agentrun.store.cron_tasks import Schedule
from agentrun.store.pool import Pool, create_pool

RAN, BUDGET = SlotOutcome.RAN, SlotOutcome.SKIPPED_BUDGET


class Silent:
    async def send(self, news: News) -> None:
        """Tells nobody."""


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 5)
    yield made
    await made.close()


async def task(pool: Pool, **spec: Any) -> UUID:
    """A CronTask of every minute, which is looked at from now on."""
    uid, now = uuid4(), await pool.fetchval("SELECT date_trunc('minute', now())")
    document = {"name": "t", "schedule": "* * * * *", "timeZone": "Etc/UTC", "input": "go", "suspend": False, **spec}
    async with pool.acquire() as conn:
        await cron_tasks.replace(conn, [Schedule(uid, 1, json.dumps(document), now)])
    return uid


async def tick(pool: Pool, minutes: int, limits: Budget | None) -> None:
    """A scheduler looks once, so many minutes after the CronTask's beginning."""
    begun = await pool.fetchval("SELECT slots_from FROM cron_tasks")
    ahead = begun + timedelta(minutes=minutes, seconds=5) - await pool.fetchval("SELECT now()")
    await Firing(pool, Silent(), namespace="default", name="agent", suspended=False, budget=limits, ahead=ahead).tick()


async def outcomes(pool: Pool, uid: UUID) -> list[SlotOutcome]:
    return [one.outcome for one in reversed(await slots.history(pool, uid))]


async def test_a_slot_that_does_not_fit_into_the_day_is_skipped_with_its_reason(pool: Pool) -> None:
    uid, limits = await task(pool), budget("1", day="2.5")
    for minute in (1, 2, 3):
        await tick(pool, minute, limits)
    assert await outcomes(pool, uid) == [RAN, RAN, BUDGET]
    newest = (await slots.history(pool, uid))[0]
    assert newest.run_id is None and "budget" in str(newest.detail)
    assert await counted(pool) == await counted(pool, "user:cron:t") == (2, 0) and await wrong(pool) == []
    await tick(pool, 4, None)
    assert await outcomes(pool, uid) == [RAN, RAN, BUDGET, RAN], "the skipped slot is not made up for"


async def test_of_slots_that_are_due_together_those_that_fit_are_run(pool: Pool) -> None:
    uid = await task(pool)
    await tick(pool, 4, budget("1", day="2"))
    found = await outcomes(pool, uid)
    assert found.count(BUDGET) == 2 and len(found) == 4 and found[2:] == [BUDGET, BUDGET]
    assert await counted(pool) == (2, 0) and await wrong(pool) == []


async def test_a_run_is_replaced_only_by_one_that_fits(pool: Pool) -> None:
    uid = await task(pool, concurrencyPolicy="Replace", session={"mode": "Fixed", "id": "daily"})
    limits = budget("1", day="1.5")
    await tick(pool, 1, limits)
    (first,) = [one.run_id for one in await slots.history(pool, uid)]
    assert first is not None
    await claimed(pool, first)
    await books(pool, first, paid("0.25"))
    await tick(pool, 2, limits)  # what the first has left is enough
    second = (await slots.history(pool, uid))[0].run_id
    assert second is not None and await pool.fetchval("SELECT status FROM runs WHERE id = $1", first) == "cancelled"
    assert await counted(pool) == (1, Decimal("0.25")) and await wrong(pool) == []
    await claimed(pool, second)
    await books(pool, second, paid("0.5"))
    await tick(pool, 3, limits)
    assert await outcomes(pool, uid) == [RAN, RAN, BUDGET]
    assert await pool.fetchval("SELECT status FROM runs WHERE id = $1", second) == "running"
    assert await counted(pool) == (Decimal("0.5"), Decimal("0.75")) and await wrong(pool) == []


async def test_replace_takes_the_counters_of_both_days_in_their_order(pool: Pool) -> None:
    """The run that is replaced counts on a later day than the new one, as in a zone that was edited or about midnight: who holds the
    earlier day meets no scheduler that already holds the later one, so neither waits for the other.
    """
    uid = await task(pool, concurrencyPolicy="Replace")
    await tick(pool, 1, budget("1", day="5", zone="Pacific/Kiritimati"))
    earlier, later = [
        await pool.fetchval("SELECT (now() AT TIME ZONE $1)::date", zone) for zone in ("Etc/GMT+12", "Pacific/Kiritimati")
    ]
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT agentrun_1.hold_counters($1, $2)", ["agent"], [earlier])
        replacing = asyncio.create_task(tick(pool, 2, budget("1", day="5", zone="Etc/GMT+12")))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await eventually(lambda: pool.fetchval(waits), within=10, what="the scheduler waits for the earlier day")
        held = "SELECT count(*) FROM (SELECT FROM budget_counters WHERE day = $1 FOR NO KEY UPDATE NOWAIT) c"
        assert await conn.fetchval(held, later) == 2
    await replacing
    assert await outcomes(pool, uid) == [RAN, RAN]
    assert {row["day"]: row["reserved"] for row in await pool.fetch("SELECT day, reserved FROM budget_counters")} == {
        earlier: 1,
        later: 0,
    }
    assert await wrong(pool) == []


async def test_what_somebody_asks_for_must_fit_too_and_leaves_nothing_if_it_does_not(pool: Pool) -> None:
    await task(pool)
    limits = budget("1", day="1")
    done = await manual.trigger(pool, agent="default/agent", name="t", client_id="one", budget=limits)
    assert done is not None and not done.run.replayed
    again = await manual.trigger(pool, agent="default/agent", name="t", client_id="one", budget=limits)
    assert again is not None and again.run.run_id == done.run.run_id and again.run.replayed
    with pytest.raises(manual.OverBudget) as over:
        await manual.trigger(pool, agent="default/agent", name="t", client_id="two", budget=limits)
    assert over.value.refused.scope == "agent"
    now = await pool.fetchval("SELECT now()")
    with pytest.raises(manual.OverBudget):
        await manual.backfill(
            pool,
            agent="default/agent",
            name="t",
            since=now - timedelta(minutes=5),
            until=now,
            limit=3,
            dry_run=False,
            budget=limits,
        )
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1 and await pool.fetchval("SELECT count(*) FROM slots") == 0
    assert await counted(pool) == (1, 0) and await wrong(pool) == []
