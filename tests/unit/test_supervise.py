"""Background loops: none vanishes, none fails unseen, none stalls unseen."""

import ast
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import eventually

import agentrun
import agentrun_operator
from agentrun.domain.errors import StoreUnavailable
from agentrun.maintenance.supervise import Stamp, Supervisor


@pytest.mark.parametrize("error", [RuntimeError("bug"), StoreUnavailable("away"), asyncio.CancelledError()])
async def test_qw_08_a_loop_that_fails_is_started_again(error: BaseException) -> None:
    runs = 0

    async def tick() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise error

    supervisor = Supervisor(first_pause=0.001)
    supervisor.every("reaper", 0.001, tick)
    await eventually(lambda: runs >= 5, within=5, what="the loop goes on")

    assert supervisor.failing() is None
    await supervisor.stop()


async def test_qw_08_a_loop_that_returns_is_started_again() -> None:
    runs = 0

    async def body(stamp: Stamp) -> None:
        nonlocal runs
        runs += 1

    supervisor = Supervisor(first_pause=0.001, longest_pause=0.002)
    supervisor.run("heartbeat", body)
    await eventually(lambda: runs >= 3, within=5, what="the loop goes on")
    await supervisor.stop()


async def test_qw_08_a_loop_that_hangs_shows_as_stalled() -> None:
    now = 0.0

    async def body(stamp: Stamp) -> None:
        await asyncio.Event().wait()

    supervisor = Supervisor(clock=lambda: now)
    supervisor.run("sweep", body, stale_after=30)
    await asyncio.sleep(0)
    assert supervisor.stalled() is None

    now = 31.0

    assert supervisor.stalled() == "no progress: sweep"
    await supervisor.stop()


async def test_a_store_outage_is_no_stall_since_a_restart_would_not_mend_it() -> None:
    now = 0.0
    failures = 0

    async def tick() -> None:
        nonlocal now, failures
        now += 20.0
        failures += 1
        raise StoreUnavailable("away")

    supervisor = Supervisor(first_pause=0.001, longest_pause=0.001, clock=lambda: now)
    supervisor.every("reaper", 0.001, tick, stale_after=30)
    await eventually(lambda: failures >= 5, within=5, what="the loop goes on")

    assert supervisor.stalled() is None
    assert supervisor.failing() == "failing: reaper"
    await supervisor.stop()


async def test_pauses_grow_while_a_loop_keeps_failing(caplog: pytest.LogCaptureFixture) -> None:
    failures = 0

    async def tick() -> None:
        nonlocal failures
        failures += 1
        raise StoreUnavailable("away")

    supervisor = Supervisor(first_pause=0.02, longest_pause=10)
    with caplog.at_level(logging.CRITICAL):
        supervisor.every("reaper", 0.001, tick)
        await asyncio.sleep(0.5)
    await supervisor.stop()

    assert 2 <= failures <= 5


async def test_stopping_ends_all_loops() -> None:
    ended = []

    def ticking(name: str) -> Callable[[Stamp], "asyncio.Future[None]"]:
        async def body(stamp: Stamp) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        return lambda stamp: asyncio.ensure_future(body(stamp))

    supervisor = Supervisor()
    for name in ("a", "b"):
        supervisor.run(name, ticking(name))
    await asyncio.sleep(0.01)
    await supervisor.stop()

    assert sorted(ended) == ["a", "b"]
    assert supervisor.stalled() is None


async def test_a_name_is_one_loop() -> None:
    async def tick() -> None: ...

    supervisor = Supervisor()
    supervisor.every("sweep", 1, tick)

    with pytest.raises(ValueError, match="running already"):
        supervisor.every("sweep", 1, tick)
    await supervisor.stop()


def test_qw_08_no_task_is_started_without_keeping_it() -> None:
    """A task that nothing refers to may be collected in the middle of its work."""
    dropped, kept = [], 0
    for file in (file for product in (agentrun, agentrun_operator) for file in Path(product.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                kept += _starts_a_task(node)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _starts_a_task(node.value):
                dropped.append(f"{file.name}:{node.lineno}")

    assert dropped == []
    assert kept > 20, "it finds those that are kept"


def _starts_a_task(call: ast.Call) -> bool:
    """Whether it is one that only the caller can keep; a TaskGroup keeps its own."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    starts = name in ("create_task", "ensure_future", "run_coroutine_threadsafe")
    return starts and (owner == "asyncio" or owner.endswith(("loop", "loop()")))
