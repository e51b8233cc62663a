"""Failpoints: off without the variable, exact with it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from agentrun import failpoints


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_to(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints._parse(text))

    return set_to


async def raised(name: str) -> bool:
    try:
        await failpoints.hit(name)
    except failpoints.FailpointError:
        return True
    return False


async def test_nothing_happens_without_the_variable(points: Callable[[str], None]) -> None:
    points("")
    assert not await raised("worker.claimed")


async def test_a_point_acts_at_its_first_time_only(points: Callable[[str], None]) -> None:
    points("a=raise")
    assert [await raised("a"), await raised("a")] == [True, False]


async def test_a_point_acts_at_the_time_that_is_named(points: Callable[[str], None]) -> None:
    points("a=raise@2")
    assert [await raised("a"), await raised("a"), await raised("a")] == [False, True, False]


async def test_a_star_acts_every_time(points: Callable[[str], None]) -> None:
    points("a=raise@*")
    assert [await raised("a"), await raised("a")] == [True, True]


async def test_other_points_and_their_counts_are_not_touched(points: Callable[[str], None]) -> None:
    points(" a=raise@2 ; b=raise;")
    assert not await raised("c")
    assert await raised("b")
    assert [await raised("a"), await raised("a")] == [False, True]


async def test_sleep_delays_without_blocking_the_loop(points: Callable[[str], None]) -> None:
    points("a=sleep:0.2")
    ran = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, ran.set)
    before = time.monotonic()
    await failpoints.hit("a")
    assert time.monotonic() - before >= 0.2
    assert ran.is_set()


@pytest.mark.parametrize("text", ["a=explode", "a", "a=", "a=sleepy:1"])
def test_an_unknown_action_is_an_error_that_names_the_entry(text: str) -> None:
    with pytest.raises(ValueError, match=f"AGENTRUN_FAILPOINTS: '{text}'"):
        failpoints._parse(text)


def run_process(setting: str) -> subprocess.Popen[str]:
    code = "import asyncio; from agentrun.failpoints import hit; asyncio.run(hit('a')); print('went on')"
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, failpoints.VARIABLE: setting}, stdout=subprocess.PIPE, text=True
    )


def test_kill_ends_the_process_on_the_spot() -> None:
    with run_process("a=kill") as process:
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (-9, "")


def test_stop_halts_the_process_until_it_is_continued() -> None:
    with run_process("a=stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "went on\n")
