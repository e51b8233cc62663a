"""Generators that agents leave open are closed one after the other, whoever holds up or fails."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from waiting import eventually

from agentrun.worker import generators
from agentrun.worker.generators import Closer

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def source(done: list[str]) -> AsyncIterator[int]:
    """What a library's stream of bytes is: its end takes a while."""
    try:
        for number in range(1000):
            yield number
    finally:
        await asyncio.sleep(0.05)
        done.append("source")


async def stream(done: list[str]) -> AsyncIterator[int]:
    """What is made of it: it closes what it reads from."""
    numbers = source(done)
    try:
        async for number in numbers:
            yield number
    finally:
        await numbers.aclose()
        done.append("stream")


async def leave_open(done: list[str]) -> None:
    """As an error does whose traceback holds the frame that holds it: only the collector finds it."""
    opened = stream(done)
    await anext(opened)
    cycle: list[Any] = [opened]
    cycle.append(cycle)


def run(loop: str, main: Callable[[list[str]], Coroutine[Any, Any, None]]) -> list[str]:
    """Runs it to its end; what the loop complained of."""
    complaints: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
        await main(complaints)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(watched())
    return complaints


@pytest.mark.parametrize("loop", LOOPS)
def test_those_that_hang_together_are_closed_without_a_complaint(loop: str) -> None:
    done: list[str] = []

    async def main(complaints: list[str]) -> None:
        Closer().install()
        await leave_open(done)
        gc.collect()
        await eventually(lambda: len(done) == 2, within=5, what=f"both have ended: {complaints}")

    assert (run(loop, main), done) == ([], ["source", "stream"])


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_left_at_the_end_is_closed_before_it(loop: str) -> None:
    done: list[str] = []

    async def main(complaints: list[str]) -> None:
        closer = Closer()
        closer.install()
        for _ in range(3):
            await leave_open(done)
        await closer.drain(5.0)
        assert done == ["source", "stream"] * 3

    assert run(loop, main) == []


async def test_one_that_never_ends_and_one_that_fails_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "PATIENCE_SECONDS", 0.05)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(generators.log, "warning", lambda message, **words: told.append(words), raising=False)
    done: list[str] = []

    async def hang() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.Event().wait()

    async def fail() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise ValueError("broken")

    closer = Closer()
    for opened in (hang(), fail(), stream(done)):
        await anext(opened)
        closer._take(opened)  # type: ignore[arg-type]
    await eventually(lambda: len(done) == 2, within=5, what="the last one is closed")
    (words,) = told
    assert words["error"] == "ValueError: broken" and "fail" in words["generator"]
    await eventually(lambda: len(closer._closing) == 1, within=5, what="only the one that hangs is left")
    (hanging,) = closer._closing
    hanging.cancel()
    with suppress(asyncio.CancelledError):
        await hanging


@pytest.mark.parametrize("loop", LOOPS)
def test_without_it_the_loop_complains(loop: str) -> None:
    """So that this file says when it is not needed any more."""
    done: list[str] = []

    async def main(complaints: list[str]) -> None:
        await leave_open(done)
        gc.collect()
        await eventually(lambda: gc.collect() >= 0 and len(complaints) == 1, within=5, what="it complains")

    (complaint,) = run(loop, main)
    assert "asynchronous generator is already running" in complaint
