"""Workers that are killed around an effect: the call is made once, made again with the same id, asked about or left to a person."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes import ProductProcesses
from waiting import eventually
from whole_path import System, system

AGENT = '''
"""Makes one refund; what arrives on the other side is a line in a file. The message says the order and the policy."""
import os
from pathlib import Path

from agentrun.agents.effects import Happened, NotHappened

CALLS = Path(__file__).with_name("calls")


def note(what, id):
    with CALLS.open("a") as file:
        file.write(f"{what} {id}\\n")
        file.flush()
        os.fsync(file.fileno())


async def look(effect):
    found = CALLS.exists() and f"made {effect.id}\\n" in CALLS.read_text()
    note("asked", effect.id)
    return Happened("found") if found else NotHappened()


async def agent(ctx):
    order, policy = ctx.inputs[-1].text.split()
    options = {"reconcile": look} if policy == "reconcile" else {}
    async with ctx.effect("refund", key=order, policy=policy, **options) as effect:
        if effect.due:
            note("made", effect.id)
            effect.response = "made"
    yield effect.response
'''


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        (tmp_path / "whole_path_agent.py").write_text(AGENT)
        yield made


@pytest.mark.parametrize(
    ("point", "policy", "lines", "answer", "state"),
    [
        ("before", "retry", ["made"], "made", "done"),
        ("before", "reconcile", ["made"], "made", "done"),
        ("before", "fail", ["made"], "made", "done"),
        ("initiated", "retry", ["made"], "made", "done"),
        ("initiated", "reconcile", ["asked", "made"], "made", "done"),
        ("initiated", "fail", [], None, "unknown"),
        ("called", "retry", ["made", "made"], "made", "done"),
        ("called", "reconcile", ["made", "asked"], "found", "done"),
        ("called", "fail", ["made"], None, "unknown"),
        ("settled", "retry", ["made"], "made", "done"),
        ("settled", "reconcile", ["made"], "made", "done"),
        ("settled", "fail", ["made"], "made", "done"),
    ],
)
async def test_a_worker_killed_around_an_effect(
    whole: System, tmp_path: Path, point: str, policy: str, lines: list[str], answer: str | None, state: str
) -> None:
    await whole.gateway()
    await whole.scheduler()
    doomed = await whole.worker(failpoints=f"worker.effect.{point}=kill")
    run_id = await whole.submit(f"o-1 {policy}")
    assert await doomed.wait(within=20) == -9
    await whole.worker()
    await eventually(lambda: _final(whole, run_id), within=30, what="the run has ended")

    calls = tmp_path / "calls"
    found = [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []
    assert [what for what, _ in found] == lines
    assert len({id_ for _, id_ in found}) <= 1, "every attempt passes the same id on"
    run = (await whole.get(f"/v1/runs/{run_id}")).json()
    assert [(one["name"], one["key"], one["state"]) for one in run["effects"]] == [("refund", "o-1", state)]
    assert [one["outcome"] for one in run["attempts"]] == ["lost", "finished"]
    if answer is None:
        assert run["status"] == "failed" and run["error"]["type"] == "effect_unknown"
    else:
        assert run["status"] == "succeeded" and run["output"] == answer


async def _final(whole: System, run_id: object) -> bool:
    return await whole.status(run_id) in ("succeeded", "failed")  # type: ignore[arg-type]
