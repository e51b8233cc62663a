"""Budgets in Postgres: reserved at admission, settled by each booking and each end, never above the limit whoever comes first."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from money import books, budget, counted, ends, paid, today, wrong
from run_factory import claimed, event, submission
from waiting import eventually

from agentrun.domain.events import Kind
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import budgets, follow_ups, transitions
from agentrun.store.budgets import Budget, Refused
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Claim, Finish, Flush, Reason, Submission, Submitted, TakeOver
from agentrun_operator.store_looks import ask_database


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 10)
    yield made
    await made.close()


async def admit(pool: Pool, limits: Budget | None, count: int = 1, *, user: str = "ann", prefix: str = "s") -> list[UUID]:
    """New runs in sessions of their own, submitted in one group; those that fit."""
    group = [submission(session=f"{prefix}{n}", user=user) for n in range(count)]
    return [one.run_id for one in await follow_ups.submit(pool, group, Policy.MERGE, limits) if isinstance(one, Submitted)]


async def lost(pool: Pool, run_id: UUID, epoch: int, *, most: int = 3) -> None:
    await pool.execute(
        "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1 AND epoch = $2", run_id, epoch
    )
    (taken,) = await transitions.take_over(pool, [TakeOver(run_id, Reason.LOST, epoch=epoch)], max_lost_attempts=most)
    assert taken.ok


async def test_what_fits_into_the_day_is_admitted_in_the_order_asked_and_the_rest_leaves_nothing(pool: Pool) -> None:
    group = [submission(session=f"s{n}") for n in range(5)]
    found = await follow_ups.submit(pool, group, Policy.MERGE, budget("1", day="3.5"))
    assert [type(one) for one in found] == [Submitted] * 3 + [Refused] * 2
    assert {one.scope for one in found if isinstance(one, Refused)} == {"agent"}
    assert all(1 <= one.wait_seconds <= 30 for one in found if isinstance(one, Refused)), (
        "unfinished runs may give something back"
    )
    assert await pool.fetchval("SELECT count(*) FROM runs") == await pool.fetchval("SELECT count(*) FROM inputs") == 3
    assert await pool.fetchval("SELECT count(*) FROM sessions") == 3
    assert await counted(pool) == await counted(pool, "user:ann") == (3, 0)
    assert await wrong(pool) == []


async def test_each_user_has_a_day_of_their_own(pool: Pool) -> None:
    limits = budget("1", day="4", user="2")
    group = [submission(session=f"{user}{n}", user=user) for user in ("ann", "bob", "eve") for n in range(3)]
    found = await follow_ups.submit(pool, group, Policy.ENQUEUE, limits)
    assert [one.scope if isinstance(one, Refused) else "in" for one in found] == ["in", "in", "user"] * 2 + ["agent"] * 2 + [
        "user"
    ]
    assert await wrong(pool) == []


async def test_a_repeated_submission_reserves_nothing_and_is_never_refused(pool: Pool) -> None:
    item = submission(client_key="k")
    limits = budget("1", day="1")
    first, again = [(await follow_ups.submit(pool, [one], Policy.MERGE, limits))[0] for one in (item, item)]
    other = (await follow_ups.submit(pool, [submission(client_key="k")], Policy.MERGE, limits))[0]
    assert isinstance(first, Submitted) and isinstance(again, Submitted) and isinstance(other, Submitted)
    assert first.run_id == again.run_id == other.run_id and other.replayed
    assert await counted(pool) == (1, 0) and await wrong(pool) == []
    refused = submission("another", client_key="l", session="s2")
    assert isinstance((await follow_ups.submit(pool, [refused], Policy.MERGE, limits))[0], Refused)
    (run,) = [first.run_id]
    await claimed(pool, run)
    await ends(pool, run)
    assert isinstance((await follow_ups.submit(pool, [refused], Policy.MERGE, limits))[0], Submitted), (
        "the same key, decided anew"
    )


async def test_a_booking_moves_money_from_reserved_to_spent_and_an_end_gives_back_the_rest(pool: Pool) -> None:
    (run,) = await admit(pool, budget("1", day="10"))
    await claimed(pool, run)
    await books(pool, run, paid("0.25"))
    assert await counted(pool) == (Decimal("0.75"), Decimal("0.25"))
    await books(pool, run, paid("0.25", 1), paid(None, 2))
    await books(pool, run, paid("0.25", 1))  # reported again
    assert await counted(pool) == (Decimal("0.5"), Decimal("0.5")) and await wrong(pool) == []
    assert await ends(pool, run, paid("0.1", 3))
    assert await counted(pool) == await counted(pool, "user:ann") == (0, Decimal("0.6")) and await wrong(pool) == []
    await books(pool, run, paid("0.01", 4))
    assert await counted(pool) == (0, Decimal("0.61")) and await wrong(pool) == [], (
        "spent after the end, nothing left to give back"
    )


async def test_more_than_was_set_aside_is_spent_all_the_same(pool: Pool) -> None:
    (run,) = await admit(pool, budget("1", day="10"))
    await claimed(pool, run)
    await books(pool, run, paid("0.9"), paid("0.4", 1))
    assert await counted(pool) == (0, Decimal("1.3")) and await wrong(pool) == []
    await ends(pool, run)
    assert await counted(pool) == (0, Decimal("1.3")) and await wrong(pool) == []


@pytest.mark.parametrize("way", ["retrying", "handed_back", "lost"])
async def test_a_run_keeps_its_reserve_and_what_it_has_spent_over_its_attempts(pool: Pool, way: str) -> None:
    (run,) = await admit(pool, budget("1", day="10"))
    await claimed(pool, run)
    await books(pool, run, paid("0.25"))
    if way == "lost":
        await lost(pool, run, 1)
    else:
        await transitions.take_over(pool, [TakeOver(run, Reason(way), epoch=1, last_seq=-1, ledger=[paid("0.25", 1)])])
    booked = Decimal("0.25") if way == "lost" else Decimal("0.5")
    assert await counted(pool) == (1 - booked, booked) and await wrong(pool) == []
    await claimed(pool, run)
    assert (await budgets.purses(pool, [run]))[run] == budgets.Purse(Decimal(1), booked)
    await books(pool, run, paid("0.125"), epoch=2)
    assert await wrong(pool) == []
    await ends(pool, run, epoch=2, seq=200)
    assert await counted(pool) == (0, booked + Decimal("0.125")) and await wrong(pool) == []


@pytest.mark.parametrize("end", ["cancelled", "superseded", "lost too often", "cancelled before its first attempt"])
async def test_however_a_run_is_taken_its_reserve_comes_back(pool: Pool, end: str) -> None:
    (run,) = await admit(pool, budget("1", day="1"))
    if end != "cancelled before its first attempt":
        await claimed(pool, run)
        await books(pool, run, paid("0.25"))
    if end == "lost too often":
        await lost(pool, run, 1, most=1)
    else:
        reason = Reason.SUPERSEDED if end == "superseded" else Reason.CANCELLED
        for _ in range(2):  # also if the reply of the first one was lost
            await transitions.take_over(pool, [TakeOver(run, reason)])
    reserved, spent = await counted(pool)
    assert (reserved, spent) == (0, 0 if "before" in end else Decimal("0.25")) and await wrong(pool) == []


async def test_a_late_call_of_an_old_attempt_counts_in_the_attempt_that_goes_on(pool: Pool) -> None:
    (run,) = await admit(pool, budget("1", day="10"))
    await claimed(pool, run)
    await lost(pool, run, 1)
    await claimed(pool, run)
    await lost(pool, run, 2)
    await claimed(pool, run)
    await books(pool, run, paid("0.25"), epoch=1)
    await books(pool, run, paid("0.125"), epoch=2)
    assert await counted(pool) == (Decimal("0.625"), Decimal("0.375")) and await wrong(pool) == []
    assert [row["lost"] for row in await pool.fetch("SELECT lost FROM ledger ORDER BY epoch")] == [True, True]
    await ends(pool, run, epoch=3, seq=400)
    assert await counted(pool) == (0, Decimal("0.375")) and await wrong(pool) == []


@pytest.mark.parametrize("way", ["flush", "finish", "handed back"])
async def test_a_late_call_in_a_group_takes_the_later_attempts_in_their_order(pool: Pool, way: str) -> None:
    """A reaper has the later attempt of the first run and comes to the second one: the group does not hold that yet."""
    first, second = sorted(await admit(pool, budget("1", day="10"), 2))
    await claimed(pool, first)
    await lost(pool, first, 1)
    await claimed(pool, first)
    await claimed(pool, second)
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM attempts WHERE run_id = $1 AND epoch = 2 FOR NO KEY UPDATE", first)
        group = asyncio.create_task(late_group(pool, way, first, second))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await eventually(lambda: pool.fetchval(waits), within=10, what="the group waits for the later attempt")
        await conn.execute("SELECT FROM attempts WHERE run_id = $1 FOR NO KEY UPDATE NOWAIT", second)
    await group
    assert await counted(pool, "agent") == (Decimal("0.75") if way == "finish" else Decimal("1.25"), Decimal("0.75"))
    assert await wrong(pool) == []


async def late_group(pool: Pool, way: str, first: UUID, second: UUID) -> None:
    """Each of two attempts, of which the first one was lost, brings a call in one group."""
    calls = ((first, 1, [paid("0.25")]), (second, 1, [paid("0.5")]))
    if way == "flush":
        await transitions.flush(pool, [Flush(run, epoch, 128, ledger=rows) for run, epoch, rows in calls])
    elif way == "finish":
        last = {run: [event(400, Kind.COMPLETED, epoch=epoch)] for run, epoch, _ in calls}
        wishes = [Finish(run, epoch, RunStatus.SUCCEEDED, events=last[run], ledger=rows) for run, epoch, rows in calls]
        assert [one.ok for one in await transitions.finish(pool, wishes)] == [False, True]
    else:
        backs = [TakeOver(run, Reason.HANDED_BACK, epoch=epoch, last_seq=0, ledger=rows) for run, epoch, rows in calls]
        assert [one.ok for one in await transitions.take_over(pool, backs)] == [False, True]


async def test_a_merged_run_gives_its_reserve_to_the_one_that_takes_its_messages(pool: Pool) -> None:
    limits = budget("1", day="1.5")
    (first,) = await admit(pool, limits)
    await claimed(pool, first)
    await books(pool, first, paid("0.25"))
    merged = await follow_ups.follow_up(pool, submission("more", session="s0"), Policy.MERGE, window_seconds=30, budget=limits)
    assert not isinstance(merged, Refused) and merged.superseded is not None
    assert await counted(pool) == (1, Decimal("0.25")) and await wrong(pool) == []


async def test_a_merge_that_does_not_fit_changes_nothing_at_all(pool: Pool) -> None:
    limits = budget("1", day="1.5")
    (first,) = await admit(pool, limits)
    await claimed(pool, first)
    await books(pool, first, paid("0.75"))
    refused = await follow_ups.follow_up(pool, submission("more", session="s0"), Policy.MERGE, window_seconds=30, budget=limits)
    assert isinstance(refused, Refused) and refused.scope == "agent"
    assert await pool.fetchval("SELECT status FROM runs") == "running" and await pool.fetchval("SELECT count(*) FROM inputs") == 1
    assert await counted(pool) == (Decimal("0.25"), Decimal("0.75")) and await wrong(pool) == []


async def test_a_queued_message_reserves_too_and_a_rejected_one_does_not(pool: Pool) -> None:
    limits = budget("1", day="5")
    await admit(pool, limits)
    more = submission("more", session="s0")
    rejected = await follow_ups.follow_up(pool, more, Policy.REJECT, window_seconds=30, budget=limits)
    assert not isinstance(rejected, Refused) and rejected.rejected and await counted(pool) == (1, 0)
    queued = await follow_ups.follow_up(pool, more, Policy.ENQUEUE, window_seconds=30, budget=limits)
    again = await follow_ups.follow_up(pool, more, Policy.ENQUEUE, window_seconds=30, budget=limits)
    assert queued == again and await counted(pool) == (2, 0) and await wrong(pool) == []


async def test_a_run_keeps_its_day_and_a_new_day_begins_empty(pool: Pool) -> None:
    limits = budget("1", day="1")
    (old,) = await admit(pool, limits)
    yesterday = await today(pool) - timedelta(days=1)
    await pool.execute("UPDATE runs SET budget_day = $1; ", yesterday)
    await pool.execute("UPDATE budget_counters SET day = $1", yesterday)
    (new,) = await admit(pool, limits, prefix="new")
    await claimed(pool, old)
    await ends(pool, old, paid("0.5"))
    by_day = {
        row["day"]: (row["reserved"], row["spent"])
        for row in await pool.fetch("SELECT * FROM budget_counters WHERE scope = 'agent'")
    }
    assert by_day == {yesterday: (0, Decimal("0.5")), yesterday + timedelta(days=1): (1, 0)}
    assert await wrong(pool) == [] and new != old


async def test_a_day_begins_at_midnight_of_the_budgets_zone(pool: Pool) -> None:
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):  # never the same day
        await admit(pool, budget("1", day="5", zone=zone), prefix=zone)
    days = await pool.fetch("SELECT DISTINCT budget_day FROM runs ORDER BY 1")
    assert len(days) == 2
    full = await follow_ups.submit(pool, [submission(session="x")], Policy.MERGE, budget("1", day="0", zone="Pacific/Kiritimati"))
    left = await pool.fetchval(
        "SELECT extract(epoch FROM date_trunc('day', now() AT TIME ZONE $1) + interval '1 day' - (now() AT TIME ZONE $1))",
        "Pacific/Kiritimati",
    )
    assert isinstance(full[0], Refused) and abs(full[0].wait_seconds - left) < 60


async def test_a_run_without_a_days_limit_is_not_counted(pool: Pool) -> None:
    (run,) = await admit(pool, None)
    await claimed(pool, run)
    await ends(pool, run, paid("0.5"))
    assert await pool.fetchval("SELECT count(*) FROM budget_counters") == 0
    assert (await budgets.purses(pool, [run]))[run] == budgets.Purse(None, Decimal("0.5"))


async def test_older_code_submits_without_a_budget_and_what_was_reserved_is_settled_by_it_too(pool: Pool) -> None:
    (run,) = await admit(pool, budget("1", day="5"))
    old = await transitions.submit(pool, [submission(session="old")])
    assert old[0].is_head and await counted(pool) == (1, 0)
    await claimed(pool, run)
    await ends(pool, run, paid("0.5"))
    assert await counted(pool) == (0, Decimal("0.5")) and await wrong(pool) == []


async def test_groups_at_once_admit_exactly_what_fits(pool: Pool) -> None:
    limits = budget("0.1", day="1", user="0.4")
    users = [f"u{n % 5}" for n in range(50)]
    groups = [[submission(session=f"g{g}-{n}", user=users[n]) for n in range(g, 50, 5)] for g in range(5)]
    found = await asyncio.gather(*(follow_ups.submit(pool, group, Policy.MERGE, limits) for group in groups))
    assert sum(isinstance(one, Submitted) for group in found for one in group) == 10
    assert await counted(pool) == (1, 0) and await wrong(pool) == []


async def test_whatever_happens_at_the_same_time_the_counters_agree_at_every_moment(pool: Pool) -> None:
    """Runs are admitted, merged, booked, retried, lost, claimed, cancelled and finished by ten at once, late calls included."""
    rng, limits = random.Random(7), budget("1", day="40", user="15")
    runs: list[UUID] = []
    broken: list[str] = []

    async def one(turn: int) -> None:
        session, user = f"s{rng.randrange(12)}", f"u{rng.randrange(3)}"
        item = submission(f"m{turn}", session=session, user=user)
        found = (await follow_ups.submit(pool, [item], Policy.MERGE, limits))[0]
        if found is None:
            follow = await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=30, budget=limits)
            found = follow if isinstance(follow, Refused) else follow.run
        if isinstance(found, Submitted):
            runs.append(found.run_id)
        if runs:
            await act(rng.choice(runs), rng.random(), turn)

    async def act(run: UUID, chance: float, turn: int) -> None:
        row = await pool.fetchrow("SELECT status, epoch FROM runs WHERE id = $1", run)
        epoch = row["epoch"]
        if row["status"] == "pending":
            epoch += len(await transitions.claim(pool, [Claim(run, epoch, f"w/{turn}")], lease_seconds=30))
        late = rng.randint(1, max(epoch, 1))
        calls = [paid(f"0.{rng.randrange(1, 40):02}", turn)] if epoch else []
        if calls:
            await books(pool, run, *calls, epoch=late)
        if chance < 0.2:
            await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
        elif chance < 0.5:
            await pool.execute(
                "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1 AND outcome = 'running'", run
            )
            await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch=epoch)], max_lost_attempts=4)
        elif chance < 0.8 and epoch:
            await ends(pool, run, paid("0.05", 1000 + turn), epoch=epoch, seq=10_000)

    async def watch(done: asyncio.Event) -> None:
        while not done.is_set():
            broken.extend(await wrong(pool))
            await asyncio.sleep(0.01)

    async def work(lane: int) -> None:
        for turn in range(lane, 240, 8):
            await one(turn)

    done = asyncio.Event()
    watching = asyncio.create_task(watch(done))
    await asyncio.gather(*(work(lane) for lane in range(8)))
    done.set()
    await watching
    assert broken == [] and await wrong(pool) == []
    assert await pool.fetchval("SELECT count(*) FROM ledger WHERE lost") > 0
    for run in runs:
        await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
    reserved, spent = await counted(pool)
    assert reserved == 0 and spent == await pool.fetchval("SELECT sum(cost_usd) FROM ledger") > 0


async def test_a_refused_run_is_found_by_nobody(pool: Pool) -> None:
    item: Submission = submission(client_key="k")
    (found,) = await follow_ups.submit(pool, [item], Policy.MERGE, budget("1", day="0.5"))
    assert isinstance(found, Refused)
    assert await pool.fetchval("SELECT count(*) FROM runs") == 0
    (plain,) = await follow_ups.submit(pool, [submission(client_key="k")], Policy.MERGE, None)
    assert isinstance(plain, Submitted) and not plain.replayed and plain.status is RunStatus.PENDING


async def test_the_operator_sees_what_the_days_around_now_have_spent(pool: Pool, database_url: str) -> None:
    (run,) = await admit(pool, budget("1", day="5"))
    await claimed(pool, run)
    await ends(pool, run, paid("0.5"))
    await pool.execute("INSERT INTO budget_counters (scope, day, spent) SELECT 'agent', current_date - 9, 7")
    fact, _ = await ask_database(database_url)
    assert [(one.day, one.spent) for one in fact.spending.days] == [(await today(pool), Decimal("0.5"))]


async def test_a_gateway_of_schema_3_calls_what_it_knows_and_is_not_limited(pool: Pool) -> None:
    """Its functions have thirteen and fourteen arguments, and answer the columns that it reads."""
    (first,) = await admit(pool, budget("1", day="1"))
    group = [submission(session="old")]
    rows = await pool.fetch(
        f"SELECT * FROM agentrun_1.submit_group({marks(13)})", *transitions.submission_columns(group), Policy.MERGE.value
    )
    assert list(rows[0].keys()) == ["run_id", "session_id", "status", "inserted", "reused", "is_head"] and rows[0]["inserted"]
    more = submission("more", session="s0")
    row = await pool.fetchrow(
        f"SELECT * FROM agentrun_1.follow_up({marks(14)})", *transitions.submission_row(more), "Merge", 30.0
    )
    assert row is not None and row["superseded"] == first and "refused" not in dict(row)
    assert await counted(pool) == (0, 0) and await wrong(pool) == [], "what it superseded gives its reserve back"


def marks(count: int) -> str:
    return ", ".join(f"${n + 1}" for n in range(count))
