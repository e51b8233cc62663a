"""Takes keys from the queue and has them reconciled. What fails is tried again later, whatever it was."""

import asyncio
import time
from typing import Protocol

import structlog

from agentrun.domain.errors import AgentrunError
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun_operator.kube import Unavailable
from agentrun_operator.metrics import QUEUE_LENGTH, RECONCILE_SECONDS, RECONCILES
from agentrun_operator.resources import Key
from agentrun_operator.work_queue import WorkQueue

STALE_SECONDS = 30.0
_IDLE_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class Reconcile(Protocol):
    """Brings the cluster to what one object says. Level-triggered: it looks at what is, not at what happened."""

    async def __call__(self, key: Key, /) -> float | None:
        """Seconds after which to look again without an event; None: an event will come. Raises AgentrunError to be retried."""
        ...


class Reconciler:
    """The workers of one queue."""

    def __init__(self, name: str, queue: WorkQueue[Key], reconcile: Reconcile, *, seconds: float) -> None:
        """`seconds` is the most that one reconcile may take."""
        self._name = name
        self._queue = queue
        self._reconcile = reconcile
        self._seconds = seconds

    def start(self, supervisor: Supervisor, *, workers: int) -> None:
        for number in range(workers):
            supervisor.run(f"reconcile-{self._name}-{number}", self._work, stale_after=self._seconds + STALE_SECONDS)

    async def _work(self, stamp: Stamp) -> None:
        while True:
            stamp()
            QUEUE_LENGTH.labels(self._name).set(len(self._queue))
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    key = await self._queue.get()
            except TimeoutError:
                continue
            try:
                await self._one(key)
            finally:
                self._queue.done(key)

    async def _one(self, key: Key) -> None:
        begun = time.monotonic()
        log = _log.bind(queue=self._name, key=str(key))
        try:
            async with asyncio.timeout(self._seconds):
                again = await self._reconcile(key)
        except asyncio.CancelledError:
            self._queue.add(key)  # the lease was lost in the middle of it
            raise
        except TimeoutError:
            self._count("timeout", begun)
            log.warning("reconcile took too long", seconds=self._seconds, retry_in=self._queue.retry(key))
        except Unavailable as error:
            self._count("failed", begun)
            pause = self._queue.retry(key, at_least=error.retry_after or 0.0)
            log.warning("reconcile failed", error=str(error), retry_in=round(pause, 1))
        except AgentrunError as error:
            self._count("failed", begun)
            log.warning("reconcile failed", error=str(error), retry_in=round(self._queue.retry(key), 1))
        except Exception:
            self._count("failed", begun)
            log.exception("reconcile failed", retry_in=round(self._queue.retry(key), 1))
        else:
            self._count("done", begun)
            self._queue.forget(key)
            if again is not None:
                self._queue.look_again(key, again)

    def _count(self, result: str, begun: float) -> None:
        RECONCILES.labels(self._name, result).inc()
        RECONCILE_SECONDS.labels(self._name).observe(time.monotonic() - begun)
