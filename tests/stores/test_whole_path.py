"""Client → gateway → Postgres → Redis → worker → provider and back, as real processes, with faults in between."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import httpx2
import pytest
import redis.asyncio
from processes import ProductProcess, ProductProcesses
from store_servers import PrivateServer
from waiting import eventually
from whole_path import LEASE_SECONDS, System, attempt_is_under_way, random_cuts, system

from agentrun.store.migrations import migrate

pytestmark = pytest.mark.whole_path

TWO_STEPS = '[[tool add {"a": 2, "b": 3}]] [[slow ms=30]] [[deltas n=60]] what is it?'


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        yield made


async def running(whole: System, *, workers: int = 1) -> list[ProductProcess]:
    """A gateway, a scheduler and workers, all ready."""
    await asyncio.gather(whole.gateway(), whole.scheduler())
    return list(await asyncio.gather(*(whole.worker() for _ in range(workers))))


async def ended(whole: System, run_id: UUID, within: float = 40) -> str:
    await eventually(lambda: is_final(whole, run_id), within=within, what=f"run {run_id} ends")
    return await whole.status(run_id)


async def is_final(whole: System, run_id: UUID) -> bool:
    return await whole.status(run_id) not in ("pending", "running")


async def test_a_real_agent_with_two_tools_answers_over_http(whole: System) -> None:
    await running(whole)
    run_id = await whole.submit('[[tool add {"a": 2, "b": 3}]] [[tool shout {"text": "five"}]] go')
    seen = await whole.follow(run_id)
    assert seen.transcript.end == "completed"
    assert seen.transcript.text == await whole.log_text(run_id)
    assert seen.seqs == list(range(len(seen.seqs)))
    results = [item.result[1]["content"] for item in seen.transcript.items.values() if item.result]
    assert results == [5, "FIVE!"]
    detail = (await whole.get(f"/v1/runs/{run_id}")).json()
    assert detail["status"] == "succeeded"
    assert detail["usage"]["calls"] == whole.provider.counts["calls"] == 3
    tokens = await whole.pool.fetchrow(
        "SELECT sum(input_tokens) AS i, sum(cached_tokens) AS c, sum(output_tokens) AS o FROM ledger"
    )
    counts = whole.provider.counts
    assert (tokens["i"], tokens["c"], tokens["o"]) == (
        counts["prompt_tokens"],
        counts["cached_tokens"],
        counts["completion_tokens"],
    )


async def test_the_second_message_of_a_session_sees_the_first(whole: System) -> None:
    await running(whole)
    first = await whole.submit("my name is Ümit 🎈")
    second = await whole.submit("who am I?")
    await whole.follow(second)
    assert await whole.status(first) == "succeeded"
    said = [message["content"] for message in whole.provider.requests[-1]["messages"] if message["role"] == "user"]
    assert said == ["my name is Ümit 🎈", "who am I?"]


@pytest.mark.parametrize(
    "text", ["[[languages]]", "[[size n=200000]]", "[[deltas n=5000]]"], ids=["languages", "200 kB", "5,000 deltas"]
)
async def test_what_the_model_said_arrives_byte_for_byte(whole: System, text: str) -> None:
    await running(whole)
    run_id = await whole.submit(text)
    seen = await whole.follow(run_id)
    output = (await whole.get(f"/v1/runs/{run_id}")).json()["output"]
    assert seen.transcript.text == output == await whole.log_text(run_id)
    assert len(output) > 60


async def test_id_02_two_hundred_duplicates_at_once_over_two_gateways_are_one_run(whole: System) -> None:
    await asyncio.gather(whole.gateway(), whole.gateway(), whole.scheduler(), whole.worker())
    posts = (whole.post("once", key="k-1", gateway=whole.gateways[n % 2]) for n in range(200))
    answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {202}
    ids = {answer.json()["run_id"] for answer in answers}
    assert len(ids) == 1
    assert sorted(answer.headers.get("Idempotency-Replayed", "false") for answer in answers).count("false") == 1
    assert await ended(whole, UUID(ids.pop())) == "succeeded"
    assert whole.provider.counts["calls"] == 1
    assert await whole.pool.fetchval("SELECT count(*) FROM runs") == 1


async def test_a_killed_worker_costs_one_restart_and_no_finished_model_call(whole: System) -> None:
    (worker,) = await running(whole)
    run_id = await whole.submit(TWO_STEPS)
    following = asyncio.create_task(whole.follow(run_id))
    await attempt_is_under_way(whole, run_id, events=1, kinds=("tool_result",))
    await attempt_is_under_way(whole, run_id, events=2, kinds=("text_delta",))
    worker.kill()
    await whole.worker()
    seen = await following

    assert seen.transcript.end == "completed"
    assert await whole.outcomes(run_id) == ["lost", "finished"]
    assert seen.kinds.count("restart") == 1
    assert seen.seqs == list(range(len(seen.seqs)))
    assert seen.transcript.text == await whole.log_text(run_id) == (await whole.get(f"/v1/runs/{run_id}")).json()["output"]
    assert whole.provider.counts["calls"] == 3, "the tool call's model call once, the answer's twice"
    assert seen.kinds.count("tool_result") == 1
    assert await whole.has_no_holes()


async def test_qw_04_a_killed_workers_run_goes_on_soon_however_long_a_run_may_take(whole: System) -> None:
    manifest = whole.product.manifest
    manifest.write_text(manifest.read_text().replace("maxRunSeconds: 120", "maxRunSeconds: 7200"))
    workers = await running(whole, workers=2)
    run_id = await whole.submit("[[slow ms=30]] [[deltas n=60]]")
    await attempt_is_under_way(whole, run_id, events=2, kinds=("text_delta",))
    (await whole.worker_of(run_id, workers)).kill()
    await eventually(lambda: _second_attempt(whole, run_id), within=30, what="the other worker has it, after a lease and a pass")
    assert await ended(whole, run_id) == "succeeded"
    assert await whole.outcomes(run_id) == ["lost", "finished"]


async def _second_attempt(whole: System, run_id: UUID) -> bool:
    return len(await whole.outcomes(run_id)) == 2


async def test_a_hundred_cuts_lose_and_repeat_nothing(whole: System) -> None:
    await running(whole)
    runs = [await whole.submit("[[slow ms=4]] [[deltas n=250]]", session=f"s{n}") for n in range(4)]
    followed = await asyncio.gather(*(whole.follow(run_id, cut=random_cuts(n, 12)) for n, run_id in enumerate(runs)))
    assert sum(seen.connections for seen in followed) >= 100
    for run_id, seen in zip(runs, followed, strict=True):
        assert seen.seqs == list(range(len(seen.seqs)))
        assert seen.transcript.text == await whole.log_text(run_id)


async def test_a_flushed_redis_and_a_killed_worker_at_once_lose_nothing(whole: System, redis_url: str) -> None:
    (worker,) = await running(whole)
    run_id = await whole.submit(TWO_STEPS)
    waiting = [await whole.submit(f"wait {n}", session=f"w{n}") for n in range(3)]
    following = asyncio.create_task(whole.follow(run_id))
    await attempt_is_under_way(whole, run_id, events=2, kinds=("text_delta",))
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
        worker.kill()
        await client.flushall()
    await whole.worker()
    seen = await following
    assert seen.transcript.end == "completed"
    assert seen.transcript.text == await whole.log_text(run_id)
    assert seen.seqs == list(range(len(seen.seqs)))
    assert [await ended(whole, other) for other in waiting] == ["succeeded"] * 3
    assert await whole.has_no_holes()


async def test_qw_03_a_worker_that_wakes_up_after_its_lease_changes_nothing_but_the_ledger(whole: System) -> None:
    workers = await running(whole, workers=2)
    run_id = await whole.submit("[[slow ms=40]] [[deltas n=100]]")
    await attempt_is_under_way(whole, run_id, events=3)
    first = await whole.worker_of(run_id, workers)
    first.stop()
    assert await ended(whole, run_id) == "succeeded"
    assert await whole.outcomes(run_id) == ["lost", "finished"]
    columns = "md5(string_agg(t::text, '|' ORDER BY t::text))"
    tables = ("runs", "attempts", "messages", "inputs", "sessions")
    before = [await whole.pool.fetchval(f"SELECT {columns} FROM {table} t") for table in tables]
    ledger = await whole.pool.fetchval("SELECT count(*) FROM ledger")

    first.cont()
    await eventually(lambda: fenced(first), within=20, what="the old attempt's write is refused and counted")
    await eventually(lambda: idle(first), within=20, what="the old attempt has ended")

    assert [await whole.pool.fetchval(f"SELECT {columns} FROM {table} t") for table in tables] == before
    rows = await whole.pool.fetch("SELECT epoch, unmeasured FROM ledger ORDER BY epoch")
    assert len(rows) == ledger + 1 and [row["epoch"] for row in rows] == [1, 2]


async def fenced(worker: ProductProcess) -> bool:
    return (await worker.metrics()).total("agentrun_fenced_writes_total") > 0


async def idle(worker: ProductProcess) -> bool:
    return (await worker.metrics()).total("agentrun_runs_active") == 0


@pytest.mark.parametrize(
    ("process", "point"),
    [
        ("gateway", "gateway.submit.committed"),
        ("gateway", "gateway.publish.before"),
        ("worker", "worker.read"),
        ("worker", "worker.looked"),
        ("worker", "worker.claimed"),
        ("worker", "worker.emitted"),
        ("worker", "worker.flush.before"),
        ("worker", "worker.flush.committed"),
        ("worker", "worker.checkpoint.committed"),
        ("worker", "worker.finish.before"),
        ("worker", "worker.finish.committed"),
        ("worker", "worker.terminal.sent"),
        ("worker", "worker.head.published"),
        ("worker", "worker.acked"),
    ],
)
async def test_a_crash_at_any_line_is_healed(whole: System, process: str, point: str) -> None:
    """The process kills itself at the point; another takes its place; both messages of the session are answered once, in order."""
    at_point = {"failpoints": f"{point}=kill"}
    await asyncio.gather(whole.gateway(**(at_point if process == "gateway" else {})), whole.scheduler())
    victim = whole.gateways[0] if process == "gateway" else await whole.worker(**at_point)
    if process == "gateway":
        first = asyncio.ensure_future(whole.post("[[slow ms=12]] [[deltas n=60]]", key="one", gateway=victim))
        assert await victim.wait() != 0
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.gather(whole.gateway(), whole.worker())
        run_id = await whole.submit("[[slow ms=12]] [[deltas n=60]]", key="one")
        second = await whole.submit("next", key="two")
    else:
        run_id = await whole.submit("[[slow ms=12]] [[deltas n=60]]", key="one")
        second = await whole.submit("next", key="two")
        assert await victim.wait() != 0
        await whole.worker()
    seen = await whole.follow(run_id)
    assert (await whole.follow(second)).transcript.end == "completed"
    assert seen.transcript.end == "completed"
    assert seen.seqs == list(range(len(seen.seqs)))
    assert seen.transcript.text == await whole.log_text(run_id) == (await whole.get(f"/v1/runs/{run_id}")).json()["output"]
    assert await whole.pool.fetchval("SELECT count(*) FROM runs") == 2
    assert await whole.has_no_holes()
    assert await whole.pool.fetchval("SELECT count(*) FROM inputs WHERE fate = 'answered_in'") == 2


async def test_an_expired_lease_whose_entry_is_gone_is_found_in_postgres(whole: System, redis_url: str) -> None:
    (worker,) = await running(whole)
    run_id = await whole.submit("[[slow ms=30]] [[deltas n=60]]")
    await attempt_is_under_way(whole, run_id, events=3)
    worker.kill()
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
        started = time.monotonic()
        await eventually(lambda: taken_over(whole, run_id), within=LEASE_SECONDS + 10, what="the run is taken over")
    await whole.worker()
    assert await ended(whole, run_id) == "succeeded"
    assert time.monotonic() - started < LEASE_SECONDS + 40


async def taken_over(whole: System, run_id: UUID) -> bool:
    return await whole.outcomes(run_id) == ["lost"]


async def test_st_01_while_redis_is_away_submissions_are_accepted_and_done_once_it_is_back(
    database_url: str, private_redis: PrivateServer, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    async with system(database_url, private_redis.url, product_processes, tmp_path) as whole:
        await running(whole)
        await private_redis.stop()
        started = time.monotonic()
        runs = [await whole.submit(f"m{n}", session=f"s{n}") for n in range(5)]
        assert time.monotonic() - started < 5
        await private_redis.start()
        assert [await ended(whole, run_id) for run_id in runs] == ["succeeded"] * 5
        assert whole.provider.counts["calls"] == 5


async def test_while_postgres_is_away_submissions_get_503_and_a_retry_is_done_once(
    private_postgres: PrivateServer, redis_url: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    await migrate(private_postgres.url, say=lambda _: None)
    async with system(private_postgres.url, redis_url, product_processes, tmp_path) as whole:
        await running(whole)
        await private_postgres.stop()
        refused = await whole.post("later", key="k")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert refused.headers["Content-Type"] == "application/problem+json"
        await private_postgres.start()
        await eventually(lambda: accepted(whole), within=20, what="the gateway accepts again")
        assert await ended(whole, await whole.submit("later", key="k")) == "succeeded"
        assert whole.provider.counts["calls"] == 1


async def accepted(whole: System) -> bool:
    return (await whole.post("later", key="k")).status_code == 202


async def test_a_cancelled_run_stops_calling_the_model_and_keeps_its_text(whole: System) -> None:
    (worker,) = await running(whole)
    run_id = await whole.submit("[[slow ms=50]] [[deltas n=60]]")
    following = asyncio.create_task(whole.follow(run_id))
    await attempt_is_under_way(whole, run_id, events=2, kinds=("text_delta",))
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{whole.gateways[0].base_url}/v1/runs/{run_id}/cancel", headers=whole.headers)
    assert answer.status_code == 202
    seen = await following
    assert seen.transcript.end == "cancelled"
    assert seen.transcript.text == await whole.log_text(run_id) != ""
    await eventually(lambda: idle(worker), within=10, what="the attempt ends")
    await eventually(
        lambda: whole.pool.fetchval("SELECT count(*) FROM ledger WHERE unmeasured"), within=10, what="the cut call is booked"
    )
    assert whole.provider.counts["calls"] == 1
    assert await ended(whole, await whole.submit("next")) == "succeeded"


async def test_a_drained_worker_hands_its_run_back_and_nothing_is_void(whole: System) -> None:
    (worker,) = await running(whole)
    run_id = await whole.submit("[[slow ms=50]] [[deltas n=60]]")
    following = asyncio.create_task(whole.follow(run_id))
    await attempt_is_under_way(whole, run_id, events=3)
    _, code = await asyncio.gather(whole.worker(), worker.terminate(within=20))
    assert code == 0
    seen = await following
    assert await whole.outcomes(run_id) == ["handed_back", "finished"]
    assert "void" not in seen.kinds
    assert seen.transcript.text == await whole.log_text(run_id)
