"""Async generators that agents leave open: closed one after the other, when nobody holds them any more.

An event loop closes each that is collected in a task of its own, and at its end all of them at once. Those of an agent hang together: one
reads from another and closes it in its `finally`. If both are closed at the same time, the second close fails (`aclose(): asynchronous
generator is already running`), and with it what the outer one had still to do.
"""

import asyncio
import contextlib
import gc
import sys
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from agentrun.worker.patience import log

PATIENCE_SECONDS = 1.0
"""The next one waits so long for one that takes its time."""


class Closer:
    """Closes what is left. Made in a running loop; `install` comes before the first agent."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left: deque[AsyncGenerator[Any, Any]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def install(self) -> None:
        """Takes care of the generators that are begun in this thread from now on, as long as its loop runs."""
        sys.set_asyncgen_hooks(finalizer=self._found)

    async def drain(self, seconds: float) -> None:
        """Closes those that are left now, as far as there is time."""
        gc.collect()
        await asyncio.sleep(0)
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    def _found(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Called by whichever thread collects it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, generator)

    def _take(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._left.append(generator)
        if self._task is None:
            self._task = asyncio.create_task(self._close_all(), name="close generators")

    async def _close_all(self) -> None:
        try:
            while self._left:
                closing = asyncio.create_task(_close(self._left.popleft()))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                await asyncio.wait({closing}, timeout=PATIENCE_SECONDS)
        finally:
            self._task = None


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    try:
        await generator.aclose()
    except Exception as error:
        name = getattr(generator, "__qualname__", repr(generator))
        log.warning("a generator of an agent failed when it was closed", generator=name, error=f"{type(error).__name__}: {error}")
