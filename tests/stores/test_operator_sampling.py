"""The sampler and the operator's reaper on real stores: many AgentRuns at once, wakes, outages, and an entry that a dead worker left."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest
from fault_proxy import FaultProxy
from processes import Product, ProductProcesses
from redis.asyncio import Redis
from run_factory import claimed, submitted
from store_servers import Databases, PrivateServer
from waiting import eventually

from agentrun.bus.connection import ReadOnly, connect
from agentrun.bus.keys import GROUP, Keys
from agentrun.bus.lag import Demand, ManySampler, Question, Reading
from agentrun.bus.runs import WorkStream
from agentrun.control.scaling import Bounds
from agentrun.domain.errors import AgentrunError
from agentrun.domain.states import Outcome, RunStatus
from agentrun.maintenance.reaper import Limits
from agentrun.store import attempts, migrations, runs
from agentrun.store.pool import Pool, create_pool
from agentrun_operator.cache import ObjectCache
from agentrun_operator.metrics import REAPED
from agentrun_operator.reaper import FleetReaper
from agentrun_operator.resources import DEPLOYMENTS, Key, Ref
from agentrun_operator.sampler import Sample, Sampler
from agentrun_operator.targets import Target

IDLE_MS = 30_000
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent, namespace: default}
spec:
  agent: {model: "demo:chat"}
  workers: {leaseSeconds: 2}
  reaper: {idleSeconds: 2, intervalSeconds: 1}
"""


def target(
    name: str, url: str, *, database_url: str = "", limits: Limits | None = None, namespace: str = "shop", ready: bool = True
) -> Target:
    worker, scheduler = (Ref(DEPLOYMENTS, namespace, f"{name}-{part}") for part in ("worker", "scheduler"))
    limits = limits or Limits(30, 30, 1, 3)
    return Target(
        Key(namespace, name), "uid", url, database_url, Bounds(0, 10, 1, 60, 300), limits, worker, scheduler, schema_ready=ready
    )


class Seen:
    """Samples by AgentRun, and since when they are waited for."""

    def __init__(self) -> None:
        self.all: list[tuple[Key, Sample]] = []

    def __call__(self, key: Key, sample: Sample) -> None:
        self.all.append((key, sample))

    def of(self, name: str) -> list[Sample]:
        return [sample for key, sample in self.all if key.name == name]

    def newest(self, name: str) -> Demand | None:
        return self.of(name)[-1].demand

    async def shows(self, name: str, demand: Demand | None, *, within: float = 5.0) -> None:
        await eventually(
            lambda: bool(self.of(name)) and self.newest(name) == demand, within=within, what=f"{name} shows {demand}"
        )


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


async def publish(redis: Redis, name: str, count: int = 1, *, namespace: str = "shop") -> None:
    stream = WorkStream(redis, Keys(namespace, name))
    await stream.publish([uuid4() for _ in range(count)])
    await stream.aclose()


async def read(redis: Redis, name: str, consumer: str, count: int) -> list[str]:
    """Has a consumer take entries and hold them."""
    stream = WorkStream(redis, Keys("shop", name))
    await stream.ensure_group()
    taken = await stream.read(consumer, count=count, block_ms=0)
    await stream.aclose()
    return [one.entry_id for one in taken]


async def commands(redis: Redis) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in (await redis.info("commandstats")).items()}


async def test_a_tick_shows_what_waits_and_who_is_busy(redis: Redis, redis_url: str, seen: Seen) -> None:
    await publish(redis, "a", 5)
    await read(redis, "a", "a-worker-x-1-00000001", 2)
    await read(redis, "a", "a-worker-x-2-00000002", 1)
    sampler = Sampler(seen, tick_seconds=0.1)
    sampler.watch(target("a", redis_url))
    sampler.watch(target("b", redis_url))
    await seen.shows("a", Demand(2, 3, 0))
    assert dict(seen.of("a")[-1].held) == {"a-worker-x-1-00000001": 2, "a-worker-x-2-00000002": 1}
    await seen.shows("b", Demand(0, 0, 0))
    await sampler.aclose()


async def test_a_thousand_agentruns_are_a_few_round_trips_without_info(redis: Redis, redis_url: str) -> None:
    questions = [Question(Keys("shop", f"a{number}"), IDLE_MS) for number in range(1000)]
    many = ManySampler(redis.connection_pool)
    await publish(redis, "a7", 3)
    await many.sample(questions)
    await redis.config_resetstat()
    begun = time.perf_counter()
    readings = await many.sample(questions)
    took = time.perf_counter() - begun
    used = await commands(redis)
    clients = [client for client in await redis.client_list() if client["cmd"] != "client|list"]
    await many.aclose()
    assert readings[7] == Reading(Demand(3, 0, 0))
    assert readings[8] == Reading(Demand(0, 0, 0))
    assert used["evalsha"] == 1000
    assert not {"info", "script|exists", "xpending"} & used.keys()
    assert len(clients) == 1, "one connection for all of them"
    assert took < 1.0


async def test_one_agentrun_with_a_foreign_key_does_not_disturb_the_others(redis: Redis, redis_url: str) -> None:
    await redis.set(Keys("shop", "bad").runs, "somebody else's")
    many = ManySampler(redis.connection_pool)
    bad, good = await many.sample([Question(Keys("shop", name), IDLE_MS) for name in ("bad", "good")])
    assert isinstance(bad, AgentrunError)
    assert good == Reading(Demand(0, 0, 0))
    await many.aclose()


async def test_scripts_that_were_flushed_are_loaded_again(redis: Redis, redis_url: str) -> None:
    many = ManySampler(redis.connection_pool)
    questions = [Question(Keys("shop", "a"), IDLE_MS)]
    await many.sample(questions)
    await redis.script_flush()
    assert await many.sample(questions) == [Reading(Demand(0, 0, 0))]
    await many.aclose()


async def test_after_an_answer_that_came_too_late_the_next_one_is_the_right_one(
    redis_proxy: FaultProxy, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(redis_proxy.url)
    many = ManySampler(client.connection_pool)
    await publish(redis, "a", 2)
    first, second = (Question(Keys("shop", name), IDLE_MS) for name in ("a", "b"))
    await many.sample([first])
    asking = asyncio.create_task(many.sample([first]))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await many.sample([second]) == [Reading(Demand(0, 0, 0))]
    await many.aclose()
    await client.aclose()


async def test_a_published_run_is_seen_at_once_although_the_tick_is_far_away(redis: Redis, redis_url: str, seen: Seen) -> None:
    sampler = Sampler(seen, tick_seconds=60)
    for number in range(50):
        sampler.watch(target(f"a{number}", redis_url))
    await seen.shows("a49", Demand(0, 0, 0))
    await eventually(lambda: _subscribers(redis, "a42"), within=5, what="the wake channel is followed")
    delays = []
    for turn in range(1, 6):
        begun = time.monotonic()
        await publish(redis, "a42")
        await seen.shows("a42", Demand(turn, 0, 0))
        delays.append(time.monotonic() - begun)
    await sampler.aclose()
    assert sorted(delays)[2] < 0.5, delays


async def _subscribers(redis: Redis, name: str) -> bool:
    channel = Keys("shop", name).wake
    return bool(dict(await redis.pubsub_numsub(channel))[channel.encode()])


async def test_with_the_wake_lost_the_tick_finds_it(redis: Redis, redis_url: str, seen: Seen) -> None:
    sampler = Sampler(seen, tick_seconds=0.5)
    sampler.watch(target("a", redis_url))
    await seen.shows("a", Demand(0, 0, 0))
    keys = Keys("shop", "a")
    await redis.xadd(keys.runs, {"run": str(uuid4())})
    await seen.shows("a", Demand(1, 0, 0), within=3)
    await sampler.aclose()


async def test_a_flood_of_wakes_is_bounded(redis: Redis, redis_url: str, seen: Seen) -> None:
    sampler = Sampler(seen, tick_seconds=60)
    sampler.watch(target("a", redis_url))
    await seen.shows("a", Demand(0, 0, 0))
    await eventually(lambda: _subscribers(redis, "a"), within=5, what="the wake channel is followed")
    seen.all.clear()
    begun = time.monotonic()
    for _ in range(300):
        await publish(redis, "a")
    took = time.monotonic() - begun
    await seen.shows("a", Demand(300, 0, 0))
    await sampler.aclose()
    assert len(seen.of("a")) <= took / 0.25 + 4


async def test_redis_away_means_unknown_and_its_return_is_noticed(private_redis: PrivateServer, seen: Seen) -> None:
    client = await connect(private_redis.url)
    await publish(client, "a", 4)
    sampler = Sampler(seen, tick_seconds=0.2)
    sampler.watch(target("a", private_redis.url))
    await seen.shows("a", Demand(4, 0, 0))
    await private_redis.kill()
    await seen.shows("a", None)
    await private_redis.start()
    await seen.shows("a", Demand(4, 0, 0), within=10)
    await publish(client, "a")
    await seen.shows("a", Demand(5, 0, 0), within=10)
    await sampler.aclose()
    await client.aclose()


async def test_a_redis_that_hangs_is_unknown_and_delays_no_other(
    private_redis: PrivateServer, redis_url: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(seen, tick_seconds=0.2)
    sampler.watch(target("hangs", private_redis.url))
    sampler.watch(target("works", redis_url))
    await seen.shows("hangs", Demand(0, 0, 0))
    await private_redis.pause()
    seen.all.clear()
    await seen.shows("hangs", None, within=8)
    assert len(seen.of("works")) >= 15
    await private_redis.resume()
    await seen.shows("hangs", Demand(0, 0, 0), within=10)
    await sampler.aclose()


async def test_a_sample_tells_when_the_group_was_made_anew(redis: Redis, redis_url: str, seen: Seen) -> None:
    """Whoever makes the group anew: here a worker does, before the sampler looks."""
    await publish(redis, "a", 3)
    await read(redis, "a", "a-worker-x-1-00000001", 3)
    sampler = Sampler(seen, tick_seconds=0.1)
    sampler.watch(target("a", redis_url))
    await seen.shows("a", Demand(0, 3, 0))

    def age() -> float:
        found = seen.of("a")[-1].age_seconds
        assert found is not None
        return found

    await eventually(lambda: age() > 2, within=5, what="the group is some seconds old")
    await redis.flushall()
    await read(redis, "a", "a-worker-x-1-00000001", 1)
    seen.all.clear()
    await seen.shows("a", Demand(0, 0, 0))
    assert age() < 1
    await eventually(lambda: age() > 2, within=5, what="its age grows")
    await redis.delete(Keys("shop", "a").runs)
    await eventually(lambda: age() < 1, within=5, what="the sampler has made the group")
    await redis.delete(Keys("shop", "a").born)
    await eventually(lambda: seen.of("a")[-1].age_seconds is None, within=5, what="a former version made it")
    await sampler.aclose()


async def test_rs_22_a_demoted_primary_is_not_believed(private_redis: PrivateServer, seen: Seen) -> None:
    client = await connect(private_redis.url)
    await publish(client, "a", 2)
    sampler = Sampler(seen, tick_seconds=0.2)
    sampler.watch(target("a", private_redis.url))
    await seen.shows("a", Demand(2, 0, 0))
    await eventually(lambda: _subscribers(client, "a"), within=5, what="the wake channel is followed")
    mine = await client.client_id()
    before = {one["id"] for one in await client.client_list()} - {str(mine)}
    assert len(before) == 2, "one connection for looks and one for the channels"
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    await seen.shows("a", None)
    assert "replica" in seen.of("a")[-1].problem

    async def connected_anew() -> bool:
        return not before & {one["id"] for one in await client.client_list()}

    await eventually(connected_anew, within=5, what="no connection from before is left")
    await client.execute_command("REPLICAOF", "NO", "ONE")
    await seen.shows("a", Demand(2, 0, 0), within=10)
    await eventually(lambda: _subscribers(client, "a"), within=10, what="the wake channel is followed again")
    await publish(client, "a")
    await seen.shows("a", Demand(3, 0, 0))
    await sampler.aclose()
    await client.aclose()


async def test_rs_22_a_user_who_may_not_ask_for_the_role_learns_of_it_by_the_refusal(private_redis: PrivateServer) -> None:
    client = await connect(private_redis.url)
    await client.execute_command("ACL", "SETUSER", "default", "-role")
    many = ManySampler(client.connection_pool)
    known, fresh = (Question(Keys("shop", name), IDLE_MS) for name in ("a", "b"))
    assert await many.sample([known]) == [Reading(Demand(0, 0, 0))]
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ReadOnly):
        await many.sample([known, fresh])
    await many.aclose()
    await client.aclose()


async def test_sc_03_a_missing_stream_is_made_and_the_others_are_as_before(redis: Redis, redis_url: str, seen: Seen) -> None:
    await publish(redis, "other", 3)
    sampler = Sampler(seen, tick_seconds=0.1)
    sampler.watch(target("other", redis_url))
    await seen.shows("other", Demand(3, 0, 0))
    sampler.watch(target("new", redis_url))
    await seen.shows("new", Demand(0, 0, 0))
    await redis.delete(Keys("shop", "new").runs)
    seen.all.clear()
    await seen.shows("new", Demand(0, 0, 0))
    assert [group["name"] for group in await redis.xinfo_groups(Keys("shop", "new").runs)] == [GROUP.encode()]
    assert seen.newest("other") == Demand(3, 0, 0)
    await sampler.aclose()


async def test_rs_01_and_rs_02_lag_is_not_taken_at_its_word(redis: Redis, redis_url: str, seen: Seen) -> None:
    await publish(redis, "a", 5)
    await read(redis, "a", "w", 2)
    ids = [entry for entry, _ in await redis.xrange(Keys("shop", "a").runs)]
    await redis.xdel(Keys("shop", "a").runs, ids[3])
    await publish(redis, "b", 5)
    await read(redis, "b", "w", 1)
    await redis.xtrim(Keys("shop", "b").runs, maxlen=1, approximate=False)
    sampler = Sampler(seen, tick_seconds=0.1)
    for name in ("a", "b"):
        sampler.watch(target(name, redis_url))
    await seen.shows("a", Demand(2, 2, 0))
    await seen.shows("b", Demand(1, 1, 0))
    await sampler.aclose()


async def test_a_forgotten_agentrun_leaves_its_channel_and_the_last_one_its_connections(
    redis: Redis, redis_url: str, seen: Seen
) -> None:
    sampler = Sampler(seen, tick_seconds=0.1)
    for name in ("a", "b"):
        sampler.watch(target(name, redis_url))
    await eventually(lambda: _subscribers(redis, "a"), within=5, what="followed")
    sampler.forget(Key("shop", "a"))
    await eventually(lambda: _not(_subscribers(redis, "a")), within=5, what="not followed any more")
    sampler.forget(Key("shop", "b"))
    await eventually(lambda: _connections(redis, 1), within=5, what="only this test's connection is left")
    await sampler.aclose()


async def _not(other: object) -> bool:
    return not await other  # type: ignore[misc]


async def _connections(redis: Redis, count: int) -> bool:
    return len(await redis.client_list()) == count


# --- Reaping ------------------------------------------------------------------------------------------------------------------------


class Fleet:
    """One AgentRun under the operator's sampler and reaper, in this process; no scheduler runs."""

    def __init__(self, database_url: str, redis_url: str, *, scheduler: bool = True, connections: int = 8) -> None:
        self.cache = ObjectCache()
        self.reaper = FleetReaper(self.cache, identity="operator-1", connections=connections, scheduler_grace_seconds=0.5)
        self.sampler = Sampler(self.reaper.on_sample, tick_seconds=0.2)
        self.target = target(
            "agent", redis_url, database_url=database_url, limits=Limits(2, 2, 1, 3), namespace="default", ready=True
        )
        if scheduler:
            self.cache.put(
                DEPLOYMENTS,
                {
                    "metadata": {"name": "agent-scheduler", "namespace": "default", "uid": "s", "resourceVersion": "1"},
                    "status": {"availableReplicas": 1},
                },
            )

    async def __aenter__(self) -> "Fleet":
        self.reaper.watch(self.target)
        self.sampler.watch(self.target)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sampler.aclose()
        await self.reaper.aclose()


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 3)
    yield made
    await made.close()


async def status(pool: Pool, run_id: UUID) -> RunStatus:
    return (await runs.look(pool, [run_id]))[run_id].status


async def open_connections(pool: asyncpg.Pool, _: None = None) -> int:
    found: int = await pool.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agentrun-operator' AND datname = current_database()"
    )
    return found


async def test_an_entry_delivered_and_never_claimed_moves_by_xautoclaim(
    tmp_path: Path, database_url: str, redis_url: str, redis: Redis, pool: Pool, product_processes: ProductProcesses
) -> None:
    """A worker dies between its read and its claim. Nothing but the operator looks after it: no scheduler, no sweep."""
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(MANIFEST)
    product = Product(manifest, database_url, redis_url, tmp_path / "keys")
    keys = Keys("default", "agent")
    stream = WorkStream(redis, keys)
    await stream.ensure_group()
    run = await submitted(pool)
    async with Fleet(database_url, redis_url):
        dying = await product_processes.worker(product, failpoints="worker.read=kill")
        await stream.publish([run.run_id])
        assert await dying.wait() == -9
        assert await status(pool, run.run_id) is RunStatus.PENDING
        assert (await redis.xpending(keys.runs, GROUP))["pending"] == 1
        await product_processes.worker(product)

        async def succeeded() -> bool:
            return await status(pool, run.run_id) is RunStatus.SUCCEEDED

        await eventually(succeeded, within=20, what="another worker executes the run")
        await eventually(lambda: _nothing_pending(redis, keys), within=5, what="the pending list is empty")
    assert (await commands(redis)).get("xautoclaim", 0) >= 1
    assert [row.outcome for row in await attempts.of_run(pool, run.run_id)] == [Outcome.FINISHED]
    await stream.aclose()


async def _nothing_pending(redis: Redis, keys: Keys) -> bool:
    return (await redis.xpending(keys.runs, GROUP))["pending"] == 0


async def _stuck(redis: Redis, pool: Pool, *, session: str = "s1") -> tuple[UUID, str]:
    """A run whose entry was delivered to a worker that then did nothing."""
    stream = WorkStream(redis, Keys("default", "agent"))
    await stream.ensure_group()
    run = await submitted(pool, session=session)
    await stream.publish([run.run_id])
    (delivery,) = await stream.read("agent-worker-x-dead0000", count=1, block_ms=0)
    await stream.aclose()
    return run.run_id, delivery.entry_id


async def test_a_dead_attempt_is_taken_over_after_a_lease_of_contact(
    redis: Redis, redis_url: str, database_url: str, pool: Pool
) -> None:
    run_id, _ = await _stuck(redis, pool)
    await claimed(pool, run_id, owner="agent-worker-x-dead0000/n", lease=0.01)
    async with Fleet(database_url, redis_url):

        async def waits_again() -> bool:
            return await status(pool, run_id) is RunStatus.PENDING

        await eventually(waits_again, within=20, what="the run is taken over")
    assert [row.outcome for row in await attempts.of_run(pool, run_id)] == [Outcome.LOST]


async def test_postgres_is_opened_only_with_cause_and_closed_afterwards(
    redis: Redis, redis_url: str, database_url: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrun_operator.reaper.MARGIN_SECONDS", 0.0)
    async with Fleet(database_url, redis_url) as fleet:
        await asyncio.sleep(1)  # nothing is to be seen for a while
        assert fleet.reaper.visits == 0
        await _stuck(redis, pool)
        await eventually(lambda: fleet.reaper.visits == 1, within=5, what="a visit begins")
        await eventually(lambda: _nothing_pending(redis, Keys("default", "agent")), within=10, what="the entry is handled")
        await eventually(lambda: fleet.reaper.visits == 0, within=15, what="the visit ends")
        assert await open_connections(pool) == 0


async def test_while_the_scheduler_is_away_leases_are_looked_after(redis_url: str, database_url: str, pool: Pool) -> None:
    run = await submitted(pool)
    await claimed(pool, run.run_id, lease=0.01)
    async with Fleet(database_url, redis_url, scheduler=False):

        async def waits_again() -> bool:
            return await status(pool, run.run_id) is RunStatus.PENDING

        await eventually(waits_again, within=20, what="the run is taken over")


async def test_a_schema_that_is_not_ready_is_not_looked_into(redis: Redis, redis_url: str, empty_database_url: str) -> None:
    fleet = Fleet(empty_database_url, redis_url, scheduler=False)
    fleet.target = replace(fleet.target, schema_ready=False)
    async with fleet:
        await asyncio.sleep(1.5)  # three times the scheduler's grace
        assert fleet.reaper.visits == 0


@contextlib.asynccontextmanager
async def silent_database() -> AsyncIterator[str]:
    """A server that takes connections and says nothing."""

    clients: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: clients.append(writer), "127.0.0.1", 0)
    try:
        yield f"postgresql://u:p@127.0.0.1:{server.sockets[0].getsockname()[1]}/d"
    finally:
        server.close()
        for client in clients:
            client.close()


def failed_visits() -> float:
    return REAPED.labels("failed")._value.get()


async def _lost_run(pool: Pool, session: str = "s1") -> UUID:
    """A run whose attempt is past its lease."""
    run = await submitted(pool, session=session)
    await claimed(pool, run.run_id, lease=0.01)
    return run.run_id


async def test_many_databases_share_few_connections(redis_url: str, databases: Databases) -> None:
    """Twelve databases, two places: each is opened in its turn, and all runs are taken over."""
    reaper = FleetReaper(ObjectCache(), identity="operator-1", connections=2, scheduler_grace_seconds=0)
    async with contextlib.AsyncExitStack() as stack:
        pools: list[Pool] = []
        lost: list[UUID] = []
        for number in range(12):
            url = await stack.enter_async_context(databases.migrated())
            pools.append(await create_pool(url, 1))
            stack.push_async_callback(pools[-1].close)
            lost.append(await _lost_run(pools[-1]))
            reaper.watch(target(f"a{number}", redis_url, database_url=url, limits=Limits(4, 4, 1, 3)))
        for number in range(12):
            reaper.on_sample(Key("shop", f"a{number}"), Sample(time.monotonic(), None))
        stack.push_async_callback(reaper.aclose)
        most = 0

        async def all_wait_again() -> bool:
            nonlocal most
            found = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agentrun-operator'"
            most = max(most, await pools[0].fetchval(found))
            return all([await status(pool, run) is RunStatus.PENDING for pool, run in zip(pools, lost, strict=True)])

        await eventually(all_wait_again, within=60, what="all are taken over")
        assert reaper.visits == 12
        assert 1 <= most <= 3, "two places, and one that is about to close"


@pytest.mark.slow
async def test_databases_that_hang_keep_no_other_from_its_turn(redis_url: str, database_url: str, pool: Pool) -> None:
    """As many as there are places, and more: those that have failed once wait for places of their own."""
    reaper = FleetReaper(ObjectCache(), identity="operator-1", connections=2, scheduler_grace_seconds=0)
    async with silent_database() as hanging:
        before = failed_visits()
        for key in [Key("shop", f"h{number}") for number in range(12)]:
            reaper.watch(target(key.name, redis_url, database_url=hanging, limits=Limits(4, 4, 1, 3)))
            reaper.on_sample(key, Sample(time.monotonic(), None))
        await eventually(lambda: failed_visits() - before >= 12, within=60, what="each has failed once")
        run = await _lost_run(pool)
        reaper.watch(target("good", redis_url, database_url=database_url, limits=Limits(4, 4, 1, 3)))
        begun = time.monotonic()
        reaper.on_sample(Key("shop", "good"), Sample(begun, None))

        async def waits_again() -> bool:
            return await status(pool, run) is RunStatus.PENDING

        await eventually(waits_again, within=15, what="the run is taken over")
        assert reaper.visits == 13
        await reaper.aclose()


async def test_more_agentruns_than_can_be_looked_at_in_half_a_lease_take_turns(
    redis_url: str, database_url: str, pool: Pool
) -> None:
    """Of 40 visits with a lease of 2 s each: to look at all of them at the same pace would break every contact."""
    reaper = FleetReaper(ObjectCache(), identity="operator-1", scheduler_grace_seconds=0)
    lost = await _lost_run(pool)
    for number in range(40):
        reaper.watch(target(f"a{number}", redis_url, database_url=database_url, limits=Limits(2, 2, 1, 3)))
        reaper.on_sample(Key("shop", f"a{number}"), Sample(time.monotonic(), None))

    async def waits_again() -> bool:
        return await status(pool, lost) is RunStatus.PENDING

    await eventually(waits_again, within=30, what="the run is taken over")
    last = await _lost_run(pool, session="s2")
    for number in range(39):
        reaper.forget(Key("shop", f"a{number}"))
    await eventually(lambda: _is(pool, last, RunStatus.PENDING), within=30, what="the last one has its turn as well")
    assert reaper.visits == 1
    await reaper.aclose()


async def _is(pool: Pool, run_id: UUID, expected: RunStatus) -> bool:
    return await status(pool, run_id) is expected


async def test_while_redis_hangs_leases_are_looked_after(private_redis: PrivateServer, database_url: str, pool: Pool) -> None:
    lost = await _lost_run(pool)
    fleet = Fleet(database_url, private_redis.url, scheduler=False)
    fleet.target = replace(fleet.target, limits=Limits(4, 4, 1, 3))
    async with fleet:
        await eventually(lambda: fleet.reaper.visits == 1, within=5, what="a visit begins")
        await private_redis.pause()
        try:
            await eventually(lambda: _is(pool, lost, RunStatus.PENDING), within=40, what="the run is taken over")
        finally:
            await private_redis.resume()


@pytest.mark.parametrize("change", ["forgotten", "another object", "another Redis", "another database"])
async def test_a_visit_ends_when_what_it_depends_on_changes(
    private_redis: PrivateServer, private_postgres: PrivateServer, redis_url: str, database_url: str, change: str
) -> None:
    """Nothing stays open at the stores that are not this AgentRun's any more."""
    await migrations.migrate(private_postgres.url, say=lambda _: None)
    client = await connect(private_redis.url)
    pool = await create_pool(private_postgres.url, 1)
    reaper = FleetReaper(ObjectCache(), identity="operator-1", scheduler_grace_seconds=0)
    old = target("a", private_redis.url, database_url=private_postgres.url, limits=Limits(4, 4, 1, 3))
    reaper.watch(old)
    reaper.on_sample(old.key, Sample(time.monotonic(), None))

    async def connections() -> tuple[bool, bool]:
        """Whether the reaper has one to Redis, and one to Postgres."""
        return len(await client.client_list()) > 1, await open_connections(pool) > 0

    async def are(redis: bool, postgres: bool) -> bool:
        return await connections() == (redis, postgres)

    await eventually(lambda: are(True, True), within=10, what="the reaper is at work")
    match change:
        case "forgotten":
            reaper.forget(old.key)
        case "another object":
            reaper.watch(replace(old, uid="successor"))
        case "another Redis":
            reaper.watch(replace(old, redis_url=redis_url))
        case _:
            reaper.watch(replace(old, database_url=database_url))
    await eventually(lambda: are(False, False), within=5, what="the visit has ended")
    assert reaper.visits == 0
    await reaper.aclose()
    await pool.close()
    await client.aclose()
