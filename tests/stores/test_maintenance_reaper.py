"""The reaper on real stores: dead attempts, forgotten entries, outages, and entries that make it fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from redis.asyncio import Redis
from run_factory import claimed, submitted
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.events import EventStream
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.runs import Delivery, Held, WorkStream
from agentrun.domain.events import Kind
from agentrun.domain.states import Outcome, RunStatus
from agentrun.maintenance import reaper as reaper_module
from agentrun.maintenance.reaper import Limits, Reaper
from agentrun.store import attempts, migrations, runs, transitions
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish, Reason, TakeOver
from agentrun.telemetry import REGISTRY

KEYS = Keys("test", "agent")
DEAD = 0.001
"""A lease that is over when the next statement runs."""
AT_ONCE = Limits(lease_seconds=0, idle_seconds=0.0, interval_seconds=1, max_lost_attempts=3)
"""No lease to wait for before the first take-over, and every pending entry counts as forgotten."""


@dataclass
class Stores:
    pool: Pool
    redis: Redis
    stream: WorkStream
    events: EventStream

    def reaper(self, limits: Limits = AT_ONCE) -> Reaper:
        return Reaper(self.pool, self.stream, self.events, consumer="reaper-1", limits=limits)

    async def deliver(self, run_id: UUID, *, to: str = "w-1") -> Delivery:
        """Publishes a run and lets a worker read its entry."""
        await self.stream.publish([run_id])
        (delivery,) = await self.stream.read(to, count=1, block_ms=100)
        assert delivery.run_id == run_id
        return delivery

    async def lost(self, run_id: UUID) -> Delivery:
        """A run whose worker died after its claim."""
        delivery = await self.deliver(run_id)
        await claimed(self.pool, run_id, owner="w-1/n", lease=DEAD)
        await asyncio.sleep(2 * DEAD)
        return delivery

    async def status(self, run_id: UUID) -> RunStatus:
        return (await runs.look(self.pool, [run_id]))[run_id].status

    async def outcomes(self, run_id: UUID) -> list[Outcome]:
        return [row.outcome for row in await attempts.of_run(self.pool, run_id)]

    async def waiting(self) -> list[UUID | None]:
        """The runs whose entries a worker would get now."""
        return [one.run_id for one in await self.stream.read("probe", count=1000, block_ms=0)]

    async def pending(self) -> dict[str, str]:
        """Entries on the pending list, and whose they are."""
        rows = await self.redis.xpending_range(KEYS.runs, GROUP, "-", "+", 10_000)
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    async def sent(self, run_id: UUID) -> list[Kind]:
        return [event.kind for event in await self.events.read(run_id, after=-1, limit=100)]


def done_with(action: str) -> float:
    """How many entries have been counted so in this process."""
    return REGISTRY.get_sample_value("agentrun_entries_total", {"action": action}) or 0.0


@contextlib.asynccontextmanager
async def opened(database_url: str, redis_url: str) -> AsyncIterator[Stores]:
    pool = await create_pool(database_url, 5)
    redis = await connect(redis_url)
    stream = WorkStream(redis, KEYS)
    try:
        yield Stores(pool, redis, stream, EventStream(redis, KEYS))
    finally:
        await stream.aclose()
        await redis.aclose()
        await pool.close()


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Stores]:
    async with opened(database_url, redis_url) as found:
        await found.stream.ensure_group()
        yield found


async def test_a_lost_run_waits_again_with_a_new_entry_and_its_readers_are_told(stores: Stores) -> None:
    run = await submitted(stores.pool)
    old = await stores.lost(run.run_id)

    await stores.reaper().reap_leases()

    assert await stores.status(run.run_id) is RunStatus.PENDING
    assert await stores.outcomes(run.run_id) == [Outcome.LOST]
    assert await stores.sent(run.run_id) == [Kind.RESTART]
    assert old.entry_id not in await stores.pending()
    assert await stores.waiting() == [run.run_id]


async def test_a_living_attempt_is_left_alone(stores: Stores) -> None:
    run = await submitted(stores.pool)
    await stores.deliver(run.run_id)
    await claimed(stores.pool, run.run_id, lease=30)

    await stores.reaper().tick()

    assert await stores.status(run.run_id) is RunStatus.RUNNING


async def test_a_running_run_is_recovered_after_redis_lost_everything(stores: Stores) -> None:
    run = await submitted(stores.pool)
    await stores.lost(run.run_id)
    await stores.redis.flushall()

    await stores.reaper().tick()

    assert await stores.waiting() == [run.run_id]


async def test_a_lost_run_is_taken_over_while_redis_is_away(database_url: str, private_redis: PrivateServer) -> None:
    async with opened(database_url, private_redis.url) as stores:
        run = await submitted(stores.pool)
        await stores.lost(run.run_id)
        await private_redis.kill()
        reaper = stores.reaper()

        await reaper.reap_leases()

        assert await stores.status(run.run_id) is RunStatus.PENDING
        await private_redis.start()
        await eventually(lambda: _quiet(reaper), within=10, what="Redis answers")
        assert await stores.outcomes(run.run_id) == [Outcome.LOST]


async def _quiet(reaper: Reaper) -> bool:
    await reaper.tick()
    return True


async def test_too_many_lost_attempts_end_in_a_dead_letter_and_the_session_goes_on(stores: Stores) -> None:
    poison = await submitted(stores.pool, "poison")
    neighbour = await submitted(stores.pool, "next")
    reaper = stores.reaper()
    for _ in range(3):
        await stores.redis.delete(KEYS.runs, KEYS.entries)
        await stores.stream.ensure_group()
        await stores.lost(poison.run_id)
        await reaper.reap_leases()

    assert await stores.status(poison.run_id) is RunStatus.FAILED
    assert await stores.outcomes(poison.run_id) == [Outcome.LOST] * 3
    assert (await stores.sent(poison.run_id))[-1] is Kind.FAILED
    assert await stores.pool.fetchval("SELECT count(*) FROM dead_letters WHERE run_id = $1", poison.run_id) == 1
    assert await stores.pending() == {}
    assert await stores.waiting() == [neighbour.run_id]


async def test_what_is_done_with_each_kind_of_forgotten_entry(stores: Stores) -> None:
    reaper = stores.reaper()
    orphan = await stores.deliver(new_id())
    finished = await submitted(stores.pool, session="finished")
    await stores.deliver(finished.run_id)
    claim = await claimed(stores.pool, finished.run_id)
    await transitions.finish(stores.pool, [Finish(finished.run_id, claim.epoch, RunStatus.SUCCEEDED, result="{}")])
    head = await submitted(stores.pool, session="waiting")
    blocked = await submitted(stores.pool, session="waiting")
    await stores.deliver(head.run_id)
    await stores.deliver(blocked.run_id)
    alive = await submitted(stores.pool, session="alive")
    kept = await stores.deliver(alive.run_id, to="w-2")
    await claimed(stores.pool, alive.run_id, owner="w-2/n")
    lost = await submitted(stores.pool, session="lost")
    await stores.lost(lost.run_id)
    await stores.redis.xadd(KEYS.runs, {"nonsense": "1"})
    await stores.stream.read("w-1", count=1, block_ms=0)
    assert len(await stores.pending()) == 7
    before = {action: done_with(action) for action in ("orphan", "ack", "republish", "give_back", "take_over")}

    await reaper.reap_entries()

    assert await stores.pending() == {kept.entry_id: "w-2"}
    assert sorted(await stores.waiting(), key=str) == sorted([head.run_id, lost.run_id], key=str)
    assert await stores.outcomes(lost.run_id) == [Outcome.LOST]
    assert await stores.outcomes(alive.run_id) == [Outcome.RUNNING]
    assert orphan.entry_id not in await stores.pending()
    assert {action: done_with(action) - count for action, count in before.items()} == {
        "orphan": 2,
        "ack": 2,
        "republish": 1,
        "give_back": 1,
        "take_over": 1,
    }


async def test_a_retry_that_is_not_due_loses_its_entry_and_is_published_by_nobody(stores: Stores) -> None:
    run = await submitted(stores.pool)
    await stores.deliver(run.run_id)
    claim = await claimed(stores.pool, run.run_id)
    wish = TakeOver(run.run_id, Reason.RETRYING, claim.epoch, last_seq=-1, retry_after=60)
    await transitions.take_over(stores.pool, [wish])

    await stores.reaper().tick()

    assert await stores.pending() == {}
    assert await stores.waiting() == []


async def test_entries_that_were_deleted_while_pending_are_counted_and_gone(stores: Stores) -> None:
    run = await submitted(stores.pool)
    delivery = await stores.deliver(run.run_id)
    await stores.redis.xdel(KEYS.runs, delivery.entry_id)
    before = done_with("deleted")

    await stores.reaper().reap_entries()

    assert await stores.pending() == {}
    assert done_with("deleted") == before + 1


async def test_several_reapers_at_once_take_a_run_over_once(stores: Stores) -> None:
    lost = [(await submitted(stores.pool, session=f"s{number}")).run_id for number in range(30)]
    for run_id in lost:
        await stores.lost(run_id)

    await asyncio.gather(*(stores.reaper().tick() for _ in range(4)))

    for run_id in lost:
        assert await stores.outcomes(run_id) == [Outcome.LOST]
        assert await stores.status(run_id) is RunStatus.PENDING
    assert set(await stores.waiting()) == set(lost)


async def test_nothing_is_taken_over_before_one_lease_of_contact(stores: Stores) -> None:
    reaper = stores.reaper(Limits(lease_seconds=0.6, idle_seconds=0.0, interval_seconds=0.2, max_lost_attempts=3))
    run = await submitted(stores.pool)
    await stores.lost(run.run_id)

    await reaper.tick()
    assert await stores.status(run.run_id) is RunStatus.RUNNING

    async def taken() -> bool:
        await reaper.tick()
        return await stores.status(run.run_id) is RunStatus.PENDING

    started = asyncio.get_running_loop().time()
    await eventually(taken, within=10, what="the run is taken over")
    assert asyncio.get_running_loop().time() - started >= 0.55


async def test_after_a_restart_of_postgres_the_living_get_one_lease_to_renew(
    private_postgres: PrivateServer, redis_url: str
) -> None:
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    async with opened(private_postgres.url, redis_url) as stores:
        await stores.stream.ensure_group()
        reaper = stores.reaper(Limits(lease_seconds=2, idle_seconds=0.0, interval_seconds=0.2, max_lost_attempts=3))
        run = await submitted(stores.pool)
        await stores.deliver(run.run_id)
        for _ in range(12):
            await reaper.tick()
            await asyncio.sleep(0.2)
        claim = await claimed(stores.pool, run.run_id, lease=0.5)
        await private_postgres.restart()
        await asyncio.sleep(0.5)

        await eventually(lambda: _quiet(reaper), within=10, what="Postgres answers")

        assert await stores.status(run.run_id) is RunStatus.RUNNING
        mine = transitions.AttemptRef(run.run_id, claim.epoch)
        assert mine in (await transitions.renew(stores.pool, [mine], lease_seconds=30)).renewed


async def test_rs_12_a_page_that_always_fails_does_not_hide_the_later_ones(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [new_id() for _ in range(250)]
    await stores.stream.publish(ids)
    await stores.stream.read("w-1", count=250, block_ms=0)
    bad, tried = set(ids[:100]), set()

    async def look(conn: Any, run_ids: Sequence[UUID]) -> dict[UUID, runs.RunLook]:
        tried.update(run_ids)
        if bad & set(run_ids):
            raise ValueError("cannot be looked at")
        return {}

    monkeypatch.setattr(reaper_module.runs, "look", look)
    monkeypatch.setattr(reaper_module, "MOST_PAGES", 1)
    reaper = stores.reaper()
    for _ in range(3):
        await reaper.reap_entries()

    assert tried == set(ids)
    assert len(await stores.pending()) == 100


async def test_rs_12_after_the_group_was_made_anew_the_cursor_begins_at_the_start(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "MOST_PAGES", 1)
    await stores.stream.publish([new_id() for _ in range(150)])
    await stores.stream.read("w-1", count=150, block_ms=0)
    reaper = stores.reaper()
    await reaper.reap_entries()
    assert len(await stores.pending()) == 50

    await stores.redis.xgroup_destroy(KEYS.runs, GROUP)
    await reaper.reap_entries()
    run = await submitted(stores.pool)
    await stores.stream.publish([run.run_id])
    await stores.stream.read("w-1", count=1000, block_ms=0)
    for _ in range(3):
        await reaper.reap_entries()

    assert await stores.pending() == {}
    assert await stores.waiting() == [run.run_id]


async def test_attempts_that_cannot_be_taken_over_do_not_hide_the_later_ones(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "PAGE", 2)
    lost = [(await submitted(stores.pool, session=f"s{number}")).run_id for number in range(5)]
    for run_id in lost:
        await stores.lost(run_id)
    take_over, bad = transitions.take_over, set(lost[:3])

    async def failing(conn: Any, group: Sequence[TakeOver], **options: Any) -> list[transitions.TakenOver]:
        if any(wish.run_id in bad for wish in group):
            raise ValueError("cannot be taken over")
        return await take_over(conn, group, **options)

    monkeypatch.setattr(reaper_module.transitions, "take_over", failing)
    await stores.reaper().reap_leases()

    for run_id in lost:
        assert await stores.status(run_id) is (RunStatus.RUNNING if run_id in bad else RunStatus.PENDING)


async def test_rs_16_an_error_while_a_poison_run_is_put_aside_ends_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = await submitted(stores.pool, session="poison")
    good = await submitted(stores.pool, session="good")
    for run in (poison, good):
        await stores.lost(run.run_id)
    reaper = stores.reaper(Limits(lease_seconds=0, idle_seconds=0.0, interval_seconds=1, max_lost_attempts=1))
    acknowledge, failures = stores.stream.acknowledge, 0

    async def failing_once(held: Sequence[Held]) -> int:
        nonlocal failures
        if any(one.run_id == poison.run_id for one in held) and failures < 2:
            failures += 1
            raise ValueError("cannot be acknowledged")
        return await acknowledge(held)

    monkeypatch.setattr(stores.stream, "acknowledge", failing_once)
    await reaper.reap_leases()
    assert failures == 2
    await reaper.reap_entries()

    assert await stores.pending() == {}
    for run in (poison, good):
        assert await stores.status(run.run_id) is RunStatus.FAILED
        assert await stores.pool.fetchval("SELECT count(*) FROM dead_letters WHERE run_id = $1", run.run_id) == 1
