"""A worker on real stores that fail, answer too late or lose their answers; and workers that are stopped, late or dead."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from fault_proxy import fault_proxy
from processes import Product, ProductProcesses
from waiting import eventually, holds
from worker_bench import KEYS, LIMITS, Bench, bench, echo, say, worker

from agentrun.agents.base import Context, Result, Usage
from agentrun.agents.failures import AgentFailure
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.lag import Demand, ManySampler, Question, Reading
from agentrun.domain.errors import BusMisconfigured, Fenced
from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.maintenance.reaper import Limits as ReaperLimits
from agentrun.maintenance.reaper import Reaper
from agentrun.manifests import load_one
from agentrun.settings import Settings
from agentrun.store import ledger, transitions
from agentrun.store.transitions import RESERVE, Reason, TakeOver
from agentrun.telemetry import REGISTRY
from agentrun.worker import consumer, process
from agentrun.worker import worker as worker_module


@pytest.fixture
async def stores(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(database_url, redis_url) as made:
        yield made


def fenced_writes() -> float:
    return REGISTRY.get_sample_value("agentrun_fenced_writes_total") or 0.0


class Gate:
    """An agent that says something, waits, and says more."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, context: Context) -> Result:
        await say(context, f"before {context.run.attempt} ", 0)
        self.waiting.set()
        await self.open.wait()
        await say(context, f"after {context.run.attempt}", 1)
        return Result("ok")


# ---------------------------------------------------------------- lost replies


@pytest.mark.parametrize("lost", ["agentrun_1.claim", "agentrun_1.flush", "agentrun_1.finish"])
async def test_a_reply_of_postgres_that_is_lost_costs_nothing(stores: Bench, lost: str) -> None:
    async def slow(context: Context) -> Result:
        await say(context, "a ", 0)
        await context.checkpoint({"n": 1})
        await context.book(Usage("demo:chat", "demo", input_tokens=5))
        await say(context, "b", 1)
        return Result("ok")

    async with fault_proxy(stores.database_url) as proxy:
        fault = proxy.lose_reply(lost, times=2)
        async with worker(slow, stores, database_url=proxy.url, lease_database_url=stores.database_url) as (_, executor):
            (run,) = await stores.submit("x")
            assert await stores.ended(run) == [RunStatus.SUCCEEDED]
            await stores.nothing_held()
        assert fault.count == 2
    assert executor.started == [run]
    assert await stores.outcomes(run) == ["finished"]
    assert await stores.text(run) == "a b"
    assert (await ledger.of_run(stores.pool, run)).calls == 1


@pytest.mark.parametrize("way", ["retry", "drain"])
async def test_a_lost_reply_when_a_run_is_given_back_costs_nothing(stores: Bench, way: str) -> None:
    gate = Gate()

    async def fail(context: Context) -> Result:
        await say(context, "x")
        raise AgentFailure("again", retryable=True)

    async with fault_proxy(stores.database_url) as proxy:
        fault = proxy.lose_reply("agentrun_1.take_over")
        agent = fail if way == "retry" else gate
        async with worker(agent, stores, database_url=proxy.url, lease_database_url=stores.database_url):
            (run,) = await stores.submit("x")
            if way == "drain":
                await gate.waiting.wait()
            else:
                await stores.outcomes_are(run, "retrying")
        assert fault.count == 1
    assert await stores.outcomes(run) == ["retrying" if way == "retry" else "handed_back"]
    assert await stores.status(run) is RunStatus.PENDING
    kinds = await stores.kinds(run)
    assert kinds.count("restart") == 1 and "void" not in kinds
    assert await stores.streamed(run) == list(range(len(kinds)))  # the restart has gone out too


async def test_an_event_is_out_before_it_is_stored_and_the_end_only_after_it(stores: Bench) -> None:
    async with fault_proxy(stores.database_url) as proxy:
        held = proxy.hold_request("agentrun_1.finish")
        async with worker(echo, stores, database_url=proxy.url, lease_database_url=stores.database_url):
            (run,) = await stores.submit("x")
            await held.seen(within=5)
            assert await stores.streamed(run) == list(range(6))
            held.release()
            await stores.ended(run)
            await stores.nothing_held()
    assert await stores.streamed(run) == list(range(7))


async def test_no_number_is_out_that_no_commit_has_reserved(stores: Bench) -> None:
    """Postgres takes no flush: readers see what the claim has reserved and not one event more, so all of it can be taken back."""

    async def talk(context: Context) -> Result:
        await context.emit(Kind.ITEM_ADDED, {"item": 0, "type": "message"})
        for number in range(3 * RESERVE):
            await context.emit(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": f"{number} "})
        return Result("ok")

    async with fault_proxy(stores.database_url) as proxy:
        held = proxy.hold_request("agentrun_1.flush")
        async with worker(talk, stores, database_url=proxy.url, lease_database_url=stores.database_url):
            (run,) = await stores.submit("x")

            async def all_reserved_are_out() -> bool:
                return len(await stores.streamed(run)) >= RESERVE

            async def no_others_are_out() -> bool:
                return await stores.streamed(run) == list(range(RESERVE))

            async def renewed() -> bool:
                return bool(
                    await stores.pool.fetchval("SELECT lease_expires_at > $1 FROM attempts", expires + timedelta(seconds=1))
                )

            await eventually(all_reserved_are_out, within=5, what="what is reserved is out")
            await held.seen(within=5)
            expires = await stores.pool.fetchval("SELECT lease_expires_at FROM attempts")
            await holds(no_others_are_out, until=renewed, within=10, what="no number is out that is not reserved")
            (taken,) = await transitions.take_over(stores.pool, [TakeOver(run, Reason.CANCELLED)])
            assert taken.ok
            held.release()
    log = await stores.log(run)
    assert [one.seq for one in log] == list(range(RESERVE + 2))
    assert [one.kind.value for one in log] == ["void"] * RESERVE + ["restart", "cancelled"]


# ---------------------------------------------------------------- outages


async def test_rs_23_runs_go_on_while_redis_is_away_and_reading_goes_on_after_it(stores: Bench) -> None:
    gate = Gate()
    async with fault_proxy(stores.redis_url) as proxy, worker(gate, stores, redis_url=proxy.url) as (made, _):
        (first,) = await stores.submit("x", session="a")
        await gate.waiting.wait()
        async with proxy.outage():
            gate.open.set()
            assert await stores.ended(first) == [RunStatus.SUCCEEDED]
        (second,) = await stores.submit("x", session="b")
        assert await stores.ended(second) == [RunStatus.SUCCEEDED]
        assert made.stalled() is None
    assert await stores.text(first) == "before 1 after 1"


async def test_a_redis_that_hangs_holds_up_no_run(stores: Bench) -> None:
    gate = Gate()
    async with fault_proxy(stores.redis_url) as proxy, worker(gate, stores, redis_url=proxy.url):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        proxy.freeze()
        gate.open.set()
        assert await stores.ended(run, within=3) == [RunStatus.SUCCEEDED]
        proxy.thaw()


async def test_postgres_away_for_longer_than_a_lease_pauses_the_attempt_which_then_goes_on(stores: Bench) -> None:
    gate, ready = Gate(), asyncio.Event()

    async def pause(context: Context) -> Result:
        result = await gate(context)
        ready.set()
        return result

    async with fault_proxy(stores.database_url) as proxy, worker(pause, stores, database_url=proxy.url) as (made, executor):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        async with proxy.outage():
            await asyncio.sleep(LIMITS.lease_seconds + 0.3)
            before = await stores.streamed(run)
            gate.open.set()
            await asyncio.sleep(0.3)
            assert not ready.is_set() and await stores.streamed(run) == before  # no event goes out in doubt
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        assert made.active == 0
    assert executor.started == [run] and await stores.outcomes(run) == ["finished"]
    assert await stores.text(run) == "before 1 after 1"


async def test_a_postgres_that_hangs_costs_no_run(stores: Bench) -> None:
    gate = Gate()
    async with fault_proxy(stores.database_url) as proxy, worker(gate, stores, database_url=proxy.url):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        proxy.freeze()
        gate.open.set()
        await asyncio.sleep(LIMITS.lease_seconds + 0.3)
        proxy.thaw()
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert await stores.text(run) == "before 1 after 1"


# ---------------------------------------------------------------- leases


async def test_rs_23_a_run_at_work_counts_as_work_again_after_redis_lost_its_data(stores: Bench) -> None:
    go = asyncio.Event()

    async def busy(context: Context) -> Result:
        await go.wait()
        return Result("ok")

    async with worker(busy, stores) as (made, executor):
        runs = [(await stores.submit("x", session=f"s{n}"))[0] for n in range(2)]
        await eventually(lambda: len(executor.started) == 2, within=5, what="both runs are at work")
        await stores.redis.flushall()

        sampler = ManySampler(stores.redis.connection_pool)

        async def is_counted() -> bool:
            (reading,) = await sampler.sample([Question(KEYS, 60_000)])
            assert isinstance(reading, Reading)
            return reading.demand == Demand(0, 2, 0) and dict(reading.held) == {made.name: 2}

        await eventually(is_counted, within=5, what="the runs are counted, and whose they are")
        await sampler.aclose()
        go.set()
        assert set(await stores.ended(*runs)) == {RunStatus.SUCCEEDED}
        await stores.nothing_held()


async def test_rs_13_a_run_that_lasts_longer_than_leases_and_idle_times_stays_with_its_worker(stores: Bench) -> None:
    """Three times as long, and a reaper looks all the time."""
    gate = Gate()
    limits = ReaperLimits(
        lease_seconds=LIMITS.lease_seconds, idle_seconds=LIMITS.lease_seconds, interval_seconds=1, max_lost_attempts=3
    )
    reaper = Reaper(stores.pool, stores.work, EventStream(stores.redis, KEYS), consumer="reaper", limits=limits)
    async with worker(gate, stores) as (first, _), worker(gate, stores) as (second, _):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        until = time.monotonic() + 3 * LIMITS.lease_seconds
        while time.monotonic() < until:
            await reaper.reap_leases()
            await reaper.reap_entries()
            pending = await stores.redis.xpending_range(KEYS.runs, "workers", "-", "+", 10)
            assert len(pending) == 1 and pending[0]["times_delivered"] == 1
            assert pending[0]["time_since_delivered"] < LIMITS.lease_seconds * 1000
            alive = await stores.pool.fetchval("SELECT lease_expires_at > now() FROM attempts WHERE run_id = $1", run)
            assert alive
            await asyncio.sleep(0.1)
        gate.open.set()
        await stores.ended(run)
        assert first.active + second.active <= 1
    assert await stores.outcomes(run) == ["finished"]


async def test_qw_03_a_worker_that_lost_its_run_changes_nothing_and_its_spending_is_kept_once(stores: Bench) -> None:
    gates = [Gate(), Gate()]

    async def spend(context: Context) -> Result:
        await context.book(Usage("demo:chat", "demo", input_tokens=1_000))
        try:
            return await gates[context.run.attempt - 1](context)
        except BaseException:
            context.book_cut(Usage("demo:chat", "demo", input_tokens=7))
            raise

    alone = replace(LIMITS, capacity=1)
    fenced = fenced_writes()
    async with (
        fault_proxy(stores.database_url) as proxy,
        worker(spend, stores, limits=alone, lease_database_url=proxy.url) as (made, _),
    ):
        (run,) = await stores.submit("x")
        await gates[0].waiting.wait()
        await stores.stored(run, 7)  # a flush that is still to come would find out
        async with proxy.outage():  # the first attempt can neither renew nor find out
            await stores.lease_runs_out(run)
            (taken,) = await transitions.take_over(stores.pool, [TakeOver(run, Reason.LOST, epoch=1)])
            assert taken.ok and taken.status is RunStatus.PENDING
            gates[1].open.set()
            async with worker(spend, stores) as (_, second):
                await stores.republish(run)
                assert await stores.ended(run) == [RunStatus.SUCCEEDED]
                assert second.started == [run]
            log = await stores.log(run)
            # Past its lease it writes nothing until it has found out; before that it might end by itself, with nothing cut.
            (lease,) = made._keeper._held()
            await eventually(lambda: lease.in_doubt, within=5, what="the first attempt's lease is in doubt")
        gates[0].open.set()
        await eventually(lambda: made.active == 0, within=5, what="the first attempt has ended")
        await stores.nothing_held()
    assert await stores.log(run) == log
    assert await stores.outcomes(run) == ["lost", "finished"]
    assert await stores.text(run) == "before 2 after 2"
    assert fenced_writes() == fenced + 1
    rows = await stores.pool.fetch("SELECT epoch, input_tokens FROM ledger WHERE run_id = $1 ORDER BY 1, 2", run)
    assert [tuple(row) for row in rows] == [(1, 7), (1, 1_000), (2, 1_000)]


async def test_a_cancelled_run_ends_at_the_message_or_at_the_next_refused_write(stores: Bench) -> None:
    gate = Gate()
    async with worker(gate, stores, limits=replace(LIMITS, lease_seconds=60.0)) as (made, _):  # no renewal tells them
        (told,) = await stores.submit("x", session="a")
        await gate.waiting.wait()
        await stores.stored(told, 6)  # nothing is left to be written, so no write is refused
        (taken,) = await transitions.take_over(stores.pool, [TakeOver(told, Reason.CANCELLED)])
        assert taken.ok
        await Control(stores.redis, KEYS).send(made.name, ControlMessage(told, taken.epoch, ControlAction.CANCEL))
        await eventually(lambda: made.active == 0, within=1, what="the run ends at the message")

        gate.waiting.clear()
        (untold,) = await stores.submit("x", session="b")
        await gate.waiting.wait()
        await transitions.take_over(stores.pool, [TakeOver(untold, Reason.CANCELLED)])
        gate.open.set()
        await eventually(lambda: made.active == 0, within=5, what="the run ends at its next write")
        await stores.nothing_held()
    for run in (told, untold):
        assert await stores.status(run) is RunStatus.CANCELLED
        assert (await stores.kinds(run))[-1] == "cancelled"
        assert await stores.outcomes(run) == ["interrupted"]


async def test_a_cancel_message_without_a_transaction_behind_it_loses_no_run(stores: Bench) -> None:
    gate = Gate()
    async with worker(gate, stores) as (made, _):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        await Control(stores.redis, KEYS).send(made.name, ControlMessage(run, 1, ControlAction.CANCEL))
        gate.open.set()
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert await stores.outcomes(run) in (["handed_back", "finished"], ["finished"])


# ---------------------------------------------------------------- time limits


async def test_a_run_past_its_time_is_retried_even_if_the_agent_swallows_its_cancellation(stores: Bench) -> None:
    free, refused = asyncio.Event(), asyncio.Event()

    async def stubborn(context: Context) -> Result:
        if context.run.attempt > 1:
            return await echo(context)
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                assert context.cancelled
        try:
            await say(context, "too late")
        except Fenced:
            refused.set()
        return Result("too late")

    async with worker(stubborn, stores, limits=replace(LIMITS, max_run_seconds=0.3)) as (made, _):
        (run,) = await stores.submit("x")
        await stores.outcomes_are(run, "retrying")
        assert made.active == 0 and len(made.left_behind) == 1
        await stores.sweep_until_published(run)
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        free.set()
        await eventually(lambda: refused.is_set() and not made.left_behind, within=5, what="the left one ends, fenced")
        assert made.cut_short
    assert await stores.text(run) == "x"


async def test_a_run_that_always_takes_too_long_fails_as_a_timeout(stores: Bench) -> None:
    async def endless(context: Context) -> Result:
        await asyncio.sleep(60)
        return Result("never")

    limits = replace(LIMITS, max_run_seconds=0.2, retries=replace(LIMITS.retries, most=0))
    async with worker(endless, stores, limits=limits):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.FAILED]
    assert (await stores.error(run))["type"] == "timeout"


async def test_qw_02_an_agent_that_blocks_the_loop_for_longer_than_a_lease_keeps_its_run(stores: Bench) -> None:
    blocked: list[str] = []

    async def block(context: Context) -> Result:
        await say(context, "a ", 0)
        time.sleep(1.5 * LIMITS.lease_seconds)
        await say(context, "b", 1)
        return Result("ok")

    async with worker(block, stores, on_blocked=blocked.append) as (_, executor):
        (run,) = await stores.submit("x")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert executor.started == [run] and blocked == []
    assert await stores.outcomes(run) == ["finished"]
    assert await stores.text(run) == "a b"


async def test_an_agent_that_blocks_the_loop_past_its_time_is_reported_to_end_the_process(stores: Bench) -> None:
    blocked: list[str] = []
    free = threading.Event()

    async def block(context: Context) -> Result:
        free.wait(10)
        return Result("ok")

    def ended(message: str) -> None:
        blocked.append(message)
        free.set()

    async with worker(block, stores, on_blocked=ended, limits=replace(LIMITS, max_run_seconds=0.2)):
        await stores.submit("x")
        await eventually(lambda: blocked, within=10, what="the block is reported")


# ---------------------------------------------------------------- stopping


async def test_a_worker_that_stops_lets_runs_end_and_hands_back_the_rest(stores: Bench) -> None:
    quick, slow = Gate(), Gate()

    async def either(context: Context) -> Result:
        return await (quick if context.inputs[0].text == "quick" else slow)(context)

    async with worker(either, stores) as (made, _):
        (one,) = await stores.submit("quick", session="a")
        (other,) = await stores.submit("slow", session="b")
        await quick.waiting.wait()
        await slow.waiting.wait()
        stopping = asyncio.create_task(made.stop(1.0))
        await asyncio.sleep(0.3)
        (late,) = await stores.submit("quick", session="c")
        quick.open.set()
        await stopping
        assert made.active == 0
    assert await stores.status(one) is RunStatus.SUCCEEDED
    assert await stores.status(late) is RunStatus.PENDING
    assert await stores.outcomes(other) == ["handed_back"]
    slow.open.set()
    async with worker(either, stores) as (_, executor):  # nobody has to sweep or to reap
        assert await stores.ended(other, late) == [RunStatus.SUCCEEDED, RunStatus.SUCCEEDED]
        await stores.nothing_held()
    assert sorted(executor.started) == sorted([other, late])
    assert await stores.text(other) == "before 2 after 2"
    assert "void" not in await stores.kinds(other)


async def test_qw_05_what_is_read_after_the_stop_is_given_back_unclaimed(stores: Bench) -> None:
    async with worker(echo, stores) as (made, executor):
        with patch.object(consumer, "BLOCK_MS", 5_000):
            await asyncio.sleep(0.3)  # the read that is waiting now is a long one
            stopping = asyncio.create_task(made.stop(5.0))
            await asyncio.sleep(0)
            (run,) = await stores.submit("x")
            await stopping
    assert executor.started == [] and await stores.outcomes(run) == []
    async with worker(echo, stores):
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()


async def test_a_worker_that_stops_gives_up_on_a_postgres_that_is_away(stores: Bench) -> None:
    gate = Gate()
    async with fault_proxy(stores.database_url) as proxy, worker(gate, stores, database_url=proxy.url) as (made, _):
        (run,) = await stores.submit("x")
        await gate.waiting.wait()
        async with proxy.outage():
            with patch.object(worker_module, "HAND_BACK_SECONDS", 0.5), patch.object(worker_module, "CLOSE_SECONDS", 0.2):
                async with asyncio.timeout(5):
                    await made.stop(0.1)
            assert made.cut_short
    assert await stores.outcomes(run) == ["running"]  # until its lease is over


# ---------------------------------------------------------------- processes

MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {entrypoint: "worker_test_agent:run"}
  workers: {leaseSeconds: 2, drainSeconds: 2, concurrency: 4}
  reaper: {idleSeconds: 2}
"""
AGENT = """
import asyncio, os

async def run(ctx):
    word = ctx.inputs[0].text
    if word == "die":
        os._exit(9)
    await asyncio.sleep({"slow": 30, "short": 4}.get(word, 0))
    yield "heard " + word
"""


@pytest.fixture
def product(stores: Bench, tmp_path: Path) -> Product:
    for name, text in (("agentrun.yaml", MANIFEST), ("worker_test_agent.py", AGENT), ("keys", "")):
        (tmp_path / name).write_text(text)
    manifest = tmp_path / "agentrun.yaml"
    return Product(manifest, stores.database_url, stores.redis_url, tmp_path / "keys", namespace="test")


def settings(product: Product) -> Settings:
    return Settings(
        namespace=product.namespace,
        name=product.name,
        manifest=product.manifest,
        database_url=product.database_url,
        redis_url=product.redis_url,
        health_port=None,
    )


async def test_a_worker_process_works_drains_on_sigterm_and_ends_with_0(
    stores: Bench, product: Product, product_processes: ProductProcesses
) -> None:
    started = await product_processes.worker(product)
    (quick,) = await stores.submit("hello", session="a")
    (slow,) = await stores.submit("slow", session="b")
    assert await stores.ended(quick) == [RunStatus.SUCCEEDED]
    assert await stores.text(quick) == "heard hello"
    await stores.outcomes_are(slow, "running")
    assert (await started.metrics()).total("agentrun_runs_active") == 1
    assert (await started.get("/healthz")).status_code == 200
    start = time.monotonic()
    assert await started.terminate() == 0
    assert 2 <= time.monotonic() - start < 8
    assert await stores.outcomes(slow) == ["handed_back"]


async def test_qw_05_a_worker_process_ends_its_run_after_the_signal_and_takes_no_other(
    stores: Bench, product: Product, product_processes: ProductProcesses
) -> None:
    manifest = product.manifest.read_text()
    product.manifest.write_text(manifest.replace("drainSeconds: 2", "drainSeconds: 60"))
    started = await product_processes.worker(product)
    (run,) = await stores.submit("short", session="a")
    await stores.outcomes_are(run, "running")
    started.signal(signal.SIGTERM)
    await eventually(lambda: "worker stops" in started.log.read_text(), within=5, what="it has the signal")
    (late,) = await stores.submit("hello", session="b")
    assert await started.wait(within=15) == 0
    assert (await stores.status(run), await stores.outcomes(run)) == (RunStatus.SUCCEEDED, ["finished"])
    assert (await stores.status(late), await stores.outcomes(late)) == (RunStatus.PENDING, [])
    await product_processes.worker(product)
    assert await stores.ended(late) == [RunStatus.SUCCEEDED]
    await stores.nothing_held()


async def test_rs_15_a_run_that_kills_its_worker_leaves_an_expiring_lease_and_its_neighbours_unharmed(
    stores: Bench, product: Product, product_processes: ProductProcesses
) -> None:
    started = await product_processes.worker(product)
    (bad,) = await stores.submit("die", session="a")
    assert await started.wait() == 9
    assert await stores.outcomes(bad) == ["running"]
    await stores.lease_runs_out(bad)
    (taken,) = await transitions.take_over(stores.pool, [TakeOver(bad, Reason.LOST, epoch=1)], max_lost_attempts=1)
    assert taken.status is RunStatus.FAILED
    async with worker(echo, stores) as (_, executor):
        await stores.republish(bad)
        (good,) = await stores.submit("hello", session="b")
        assert await stores.ended(good) == [RunStatus.SUCCEEDED]
        await stores.nothing_held()
    assert executor.started == [good]
    assert await stores.outcomes(bad) == ["lost"]


async def test_rs_24_a_worker_refuses_a_redis_that_may_drop_keys(stores: Bench, product: Product) -> None:
    await stores.redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        async with asyncio.timeout(10):
            with pytest.raises(BusMisconfigured, match="noeviction"):
                await process.run(settings(product), load_one(product.manifest))
    finally:
        await stores.redis.config_set("maxmemory-policy", "noeviction")


async def test_a_worker_waits_for_its_stores_and_can_be_stopped_then_and_later(stores: Bench, product: Product) -> None:
    async with fault_proxy(stores.database_url) as proxy:
        away = settings(replace(product, database_url=proxy.url))
        async with proxy.outage():
            waiting = asyncio.create_task(process.run(away, load_one(product.manifest)))
            await asyncio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(waiting, 5)
            working = asyncio.create_task(process.run(away, load_one(product.manifest)))
            await asyncio.sleep(0.1)
        (run,) = await stores.submit("hello")
        assert await stores.ended(run) == [RunStatus.SUCCEEDED]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(working, 5)


CLOSING_AGENT = """
from pathlib import Path
from agentrun.agents.base import Result

class Agent:
    async def execute(self, context):
        return Result("ok")

    async def aclose(self):
        Path(__file__).with_name("closed").touch()

run = Agent()
"""


async def test_a_worker_that_stops_closes_its_agents_connections(
    stores: Bench, product: Product, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    (tmp_path / "worker_test_agent.py").write_text(CLOSING_AGENT)
    started = await product_processes.worker(product)
    (run,) = await stores.submit("hello")
    assert await stores.ended(run) == [RunStatus.SUCCEEDED]
    assert not (tmp_path / "closed").exists()
    assert await started.terminate() == 0
    assert (tmp_path / "closed").exists()
