"""The sign of life of the watches, whose loop runs in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from waiting import eventually

from agentrun_operator import handlers
from agentrun_operator.handlers import Watcher
from agentrun_operator.settings import OperatorSettings


class Thread:
    """A loop in a thread, as the watches have it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def hangs(self, *, and_ends: bool = False) -> None:
        """From now on, until `go_on`."""

        def hang() -> None:
            self.busy.set()
            self.go_on.wait(60)
            if and_ends:
                self.loop.stop()

        self.loop.call_soon_threadsafe(hang)
        await eventually(self.busy.is_set, within=10, what="it hangs")


@pytest.fixture
def thread() -> Iterator[Thread]:
    found = Thread()
    yield found
    found.go_on.set()
    if found.thread.is_alive():
        found.loop.call_soon_threadsafe(found.loop.stop)
    found.thread.join(10)


@pytest.fixture
def watcher(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    async def login() -> None:
        raise AssertionError("nothing is watched")

    monkeypatch.setattr(handlers, "ANSWER_SECONDS", 0.05)
    found = Watcher(OperatorSettings(), [], login, lambda *_: None)  # type: ignore[arg-type]
    found._loop = thread.loop
    return found


async def test_watches_that_have_not_begun_or_have_ended_owe_no_answer(watcher: Watcher, thread: Thread) -> None:
    thread.loop.call_soon_threadsafe(thread.loop.stop)
    await eventually(thread.loop.is_closed, within=10, what="the loop has ended")
    async with asyncio.timeout(10):
        await watcher.answers()
        watcher._loop = None
        await watcher.answers()


async def test_a_loop_that_gets_on_answers(watcher: Watcher) -> None:
    async with asyncio.timeout(10):
        for _ in range(100):
            await watcher.answers()


async def test_a_loop_that_hangs_is_no_sign_of_life_until_it_goes_on(watcher: Watcher, thread: Thread) -> None:
    await thread.hangs()
    asked = asyncio.ensure_future(watcher.answers())
    await asyncio.wait([asked], timeout=0.5)
    assert not asked.done()
    thread.go_on.set()
    async with asyncio.timeout(10):
        await asked


async def test_a_loop_that_ends_while_it_is_asked_is_not_waited_for(watcher: Watcher, thread: Thread) -> None:
    await thread.hangs(and_ends=True)
    asked = asyncio.ensure_future(watcher.answers())
    await asyncio.wait([asked], timeout=0.2)
    assert not asked.done()
    thread.go_on.set()
    async with asyncio.timeout(10):
        await asked
