"""An operator inside the test's process whose decisions are a stub that notes what it was asked to reconcile."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from processes import free_port
from waiting import eventually

from agentrun.maintenance.supervise import Supervisor
from agentrun_operator import main
from agentrun_operator.handlers import WatchEnded
from agentrun_operator.leading import Shared
from agentrun_operator.resources import AGENTRUNS, Key, Ref
from agentrun_operator.settings import OperatorSettings


class Stub:
    """A leadership that notes what happens. `act` is what a reconcile does."""

    def __init__(self, act: Callable[[Shared, Key], Awaitable[None]] | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.generations: dict[str, int | None] = {}
        self.leading = 0
        self.ended = 0
        self.shared: Shared | None = None
        self.act = act

    @property
    def works(self) -> bool:
        return self.leading > self.ended

    def __call__(self, shared: Shared) -> "Stub":
        self.shared, self.leading = shared, self.leading + 1
        print("leading", flush=True)
        return self

    async def reconcile_run(self, key: Key, /) -> float | None:
        assert self.shared is not None
        self.asked[key.name] += 1
        found = self.shared.cache.get(Ref(AGENTRUNS, key.namespace, key.name))
        self.generations[key.name] = found["metadata"]["generation"] if found else None
        if self.act is not None:
            await self.act(self.shared, key)
        return None

    async def reconcile_cron_task(self, _key: Key, /) -> float | None:
        return None

    def start(self, _supervisor: Supervisor) -> None: ...

    async def aclose(self) -> None:
        self.ended += 1
        print("ended", flush=True)

    async def rests(self) -> None:
        """No key waits, for now or for later, and none is being handled."""

        def is_empty() -> bool:
            assert self.shared is not None
            return not len(self.shared.runs) and not self.shared.runs.handled

        await eventually(is_empty, within=60, what="the queue is empty")

    async def was_asked(self, name: str, *, times: int = 1, within: float = 30.0) -> None:
        await eventually(lambda: self.asked[name] >= times, within=within, what=f"{name} is reconciled {times} times")


@dataclasses.dataclass
class Running:
    """An operator inside this process."""

    stub: Stub
    task: asyncio.Task[None]
    stop: asyncio.Event
    port: int

    async def wrong(self, path: str = "/readyz") -> str | None:
        """What the probe says is wrong."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return None if answer.startswith("HTTP/1.1 200") else answer.partition("\r\n\r\n")[2].strip()

    async def is_ready(self, *, within: float = 60.0) -> None:
        async def ready() -> bool:
            return self.task.done() or await self.wrong() is None

        await eventually(ready, within=within, what="the operator is ready")
        assert not self.task.done(), self.task

    async def works(self, *, within: float = 30.0) -> None:
        await eventually(lambda: self.stub.works, within=within, what="it leads")


@contextlib.asynccontextmanager
async def running(
    kubeconfig: Path, stub: Stub | None = None, *, namespace: str = "", name: str = "here", **settings: Any
) -> AsyncIterator[Running]:
    """With a namespace the operator looks at nothing else, and its Lease is there."""
    stub, stop, port = stub or Stub(), asyncio.Event(), free_port()
    given: dict[str, Any] = {
        "lease_seconds": 60,  # a busy machine does not end a leadership in the middle of a test
        "renew_seconds": 40.0,
        "retry_seconds": 0.3,
        **settings,
    }
    given |= {"watched_namespaces": namespace, "pod_namespace": namespace or "default"}
    current = OperatorSettings(kubeconfig=str(kubeconfig), pod_name=name, health_host="127.0.0.1", health_port=port, **given)
    running = Running(stub, asyncio.create_task(main.run(current, build=stub, stop=stop)), stop, port)
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait([running.task], timeout=60)
        assert running.task.done()
        await _watches_have_ended()
        if not running.task.cancelled() and running.task.exception() and not isinstance(running.task.exception(), WatchEnded):
            running.task.result()


async def _watches_have_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "watches":
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive(), "the watches go on"


def collect_what_kopf_left() -> None:
    """kopf leaves connections of sessions that it replaced, or that ended by an error, to the collector. A process's end closes them.

    To be called when the test is over: as long as it holds its operator's task, it holds the errors in it, and with them the sessions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
