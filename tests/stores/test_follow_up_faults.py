"""Follow-ups over real processes: gateways and workers that are killed at any line lose no input and block no session."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import httpx2
import pytest
from processes import ProductProcesses
from waiting import eventually
from whole_path import MANIFEST, System, system

MERGE = MANIFEST.replace("policy: Enqueue", "policy: Merge")
AGENT = '''
"""Says again what it was told. `wait` in a message makes it tick into a file, slowly, before it answers."""
import asyncio
from pathlib import Path

TICKS = Path(__file__).with_name("ticks")


async def agent(ctx):
    if ctx.inputs[-1].text.startswith("wait"):
        yield "working "
        for _ in range(int(ctx.inputs[-1].text.split()[1])):
            with TICKS.open("a") as file:
                file.write(".")
            await asyncio.sleep(0.05)
    yield "|".join(one.text for one in ctx.inputs)
'''


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        (tmp_path / "agentrun.yaml").write_text(MERGE)
        (tmp_path / "whole_path_agent.py").write_text(AGENT)
        yield made


async def send(whole: System, text: str, key: str, *, within: float = 30.0) -> UUID:
    """As a client does: the same key again until it is accepted, at whatever gateway answers."""
    async with asyncio.timeout(within):
        while True:
            for gateway in reversed(whole.gateways):
                try:
                    answer = await whole.post(text, key=key, gateway=gateway)
                except httpx2.TransportError:
                    continue
                if answer.status_code == 202:
                    return UUID(answer.json()["run_id"])
                assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.05)


async def all_ended(whole: System, within: float = 40.0) -> None:
    unfinished = "SELECT count(*) = 0 FROM runs WHERE status IN ('pending', 'running')"
    await eventually(lambda: whole.pool.fetchval(unfinished), within=within, what="every run has ended")


async def judge(whole: System, texts: list[str]) -> None:
    """Every message has one input with one fate, in a run that answered it; texts are in the order of their positions."""
    rows = await whole.pool.fetch(
        "SELECT i.content #>> '{}' AS text, i.fate, i.fate_run = i.held_by AS agree, r.status, r.result ->> 'output' AS output "
        "FROM inputs i JOIN runs r ON r.id = i.held_by ORDER BY i.position"
    )
    assert [row["text"] for row in rows] == texts
    assert all(row["fate"] == "answered_in" and row["agree"] and row["status"] == "succeeded" for row in rows)
    assert all(row["text"] in row["output"] for row in rows)
    loose = "SELECT count(*) FROM runs WHERE (status = 'superseded') <> (superseded_by IS NOT NULL)"
    assert await whole.pool.fetchval(loose) == 0
    assert await whole.has_no_holes()


async def test_a_superseded_attempt_stops_promptly(whole: System, tmp_path: Path) -> None:
    """Not at its next renewal, which is far away: it is told."""
    (tmp_path / "agentrun.yaml").write_text(
        MERGE.replace("leaseSeconds: 2,", "leaseSeconds: 300,").replace("idleSeconds: 2,", "idleSeconds: 300,")
    )
    await whole.gateway()
    worker = await whole.worker()
    first = await whole.submit("wait 100000", key="a")
    ticks = tmp_path / "ticks"
    await eventually(lambda: ticks.exists() and ticks.stat().st_size > 3, within=20, what="the agent works")
    follower = asyncio.create_task(whole.follow(first))
    second = await whole.submit("stop that", key="b")
    seen = await follower
    assert seen.transcript.end == "superseded" and seen.transcript.end_data == {"by": str(second)}
    await all_ended(whole, within=20)
    size = ticks.stat().st_size
    await judge(whole, ["wait 100000", "stop that"])

    async def free() -> bool:
        return (await worker.metrics()).total("agentrun_runs_active") == 0

    await eventually(free, within=10, what="the worker holds nothing any more")
    await asyncio.sleep(0.3)
    assert ticks.stat().st_size <= size + 5, "the agent of the superseded attempt does nothing more"
    assert await whole.outcomes(first) == ["interrupted"]


@pytest.mark.parametrize(
    "point", ["gateway.submit.before", "gateway.submit.committed", "gateway.follow_up.before", "gateway.follow_up.committed"]
)
async def test_a_gateway_killed_while_a_follow_up_is_decided_loses_no_input(whole: System, point: str) -> None:
    await whole.gateway()
    await whole.scheduler()
    await send(whole, "one", "a")
    doomed = await whole.gateway(failpoints=f"{point}=kill")
    sending = asyncio.create_task(send(whole, "two", "b"))
    assert await doomed.wait(within=20) == -9
    second = await sending
    await whole.worker()
    await all_ended(whole)
    await judge(whole, ["one", "two"])
    assert await whole.status(second) == "succeeded"
    assert await whole.pool.fetchval("SELECT count(*) FROM runs") == 2


async def test_st_10_the_window_outlives_the_gateway(whole: System) -> None:
    """Two messages, the gateway dies inside the window, the third goes through another one: one run has all three."""
    one, other = await whole.gateway(), await whole.gateway()
    for text in ("one", "two"):
        assert (await whole.post(text, key=text, gateway=one)).status_code == 202
    one.kill()
    third = UUID((await whole.post("three", key="three", gateway=other)).json()["run_id"])
    await whole.worker()
    await all_ended(whole)
    await judge(whole, ["one", "two", "three"])
    assert (await whole.get(f"/v1/runs/{third}", other)).json()["output"] == "one|two|three"


@pytest.mark.parametrize(
    "point",
    [
        "worker.claimed",
        "worker.flush.before",
        "worker.flush.committed",
        "worker.finish.before",
        "worker.finish.committed",
        "worker.terminal.sent",
    ],
)
async def test_a_worker_killed_while_messages_merge_loses_no_input(whole: System, point: str) -> None:
    await whole.gateway()
    await whole.scheduler()
    doomed = await whole.worker(failpoints=f"{point}=kill")
    await send(whole, "wait 1", "a")
    await send(whole, "wait 20", "b")
    assert await doomed.wait(within=20) == -9
    await send(whole, "three", "c")
    await whole.worker()
    await all_ended(whole)
    await judge(whole, ["wait 1", "wait 20", "three"])


async def test_fifty_clients_post_to_one_session_at_once_while_workers_finish(whole: System) -> None:
    """Each message has its own run, each run an end, and whoever follows `superseded {by}` comes to an answer that holds the message."""
    await whole.gateway()
    await whole.gateway()
    await whole.scheduler()
    for _ in range(2):
        await whole.worker()

    async def client(number: int) -> tuple[str, UUID, str]:
        text = f"m{number}."
        await asyncio.sleep(0.02 * (number % 25))
        run_id = first = await send(whole, text, f"{secrets.token_hex(4)}-{number}")
        while True:
            transcript = (await whole.follow(run_id)).transcript
            if transcript.end != "superseded":
                return text, first, transcript.text
            assert transcript.end_data is not None
            run_id = UUID(transcript.end_data["by"])

    answers = await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(50))), 90)
    assert len({run_id for _, run_id, _ in answers}) == 50
    assert all(text in answer for text, _, answer in answers)
    await all_ended(whole)
    order = await whole.pool.fetch("SELECT content #>> '{}' AS text FROM inputs ORDER BY position")
    await judge(whole, [row["text"] for row in order])
    both = "SELECT count(*) FILTER (WHERE status = 'superseded'), count(*) FILTER (WHERE status = 'succeeded') FROM runs"
    superseded, succeeded = await whole.pool.fetchrow(both) or (0, 0)
    assert superseded + succeeded == 50 and superseded > 0 and succeeded > 0
