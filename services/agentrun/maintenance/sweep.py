"""Publishes what waits and nobody will hear of: pending, due heads of their sessions without an entry on the work stream.

Postgres is the promise and the stream only a hint, so whatever is lost on the way to it (a gateway that died after its commit, Redis
away or emptied, a retry whose time has come) is found here, about every second. Publishing twice is harmless.
"""

from collections.abc import Sequence
from uuid import UUID

from redis.asyncio import Redis

from agentrun import failpoints
from agentrun.bus.connection import answering
from agentrun.bus.runs import Held, WorkStream
from agentrun.maintenance.batches import in_batch
from agentrun.store import runs
from agentrun.store.pool import Pool
from agentrun.telemetry import SWEEP_PUBLISHED

PAGE = 500
MOST_PAGES = 20


class Sweep:
    """The sweep of one AgentRun. A tick looks at up to PAGE * MOST_PAGES runs and goes on there at the next."""

    def __init__(self, pool: Pool, redis: Redis, stream: WorkStream, *, idle_seconds: float) -> None:
        """An entry is trusted for `idle_seconds`; an older one of a run that still waits is looked up."""
        self._pool = pool
        self._redis = redis
        self._stream = stream
        self._idle_ms = int(idle_seconds * 1000)
        self._after: UUID | None = None
        self._now_ms = 0

    async def tick(self) -> None:
        """One pass, or a part of one. Raises StoreUnavailable, BusUnavailable, BusMisconfigured."""
        self._now_ms = await self._redis_now_ms()
        for _ in range(MOST_PAGES):
            page = [head.run_id for head in await runs.due_heads(self._pool, after=self._after, limit=PAGE)]
            await in_batch(page, self._publish_missing, loop="sweep")
            self._after = page[-1] if len(page) == PAGE else None
            if self._after is None:
                return

    async def _publish_missing(self, run_ids: Sequence[UUID]) -> None:
        entries = await self._stream.entries(run_ids)
        missing = [run_id for run_id, entry in entries.items() if entry is None]
        old = {entry: run_id for run_id, entry in entries.items() if entry and self._is_old(entry)}
        gone = set(old) - await self._stream.existing(list(old)) if old else set()
        if not missing and not gone:
            return
        await failpoints.hit("sweep.found")
        SWEEP_PUBLISHED.inc(await self._stream.publish(missing))
        SWEEP_PUBLISHED.inc(len(await self._stream.republish([Held(old[entry], entry) for entry in sorted(gone)])))

    def _is_old(self, entry: str) -> bool:
        """An entry's id begins with the milliseconds at which Redis added it."""
        return self._now_ms - int(entry.partition("-")[0]) > self._idle_ms

    async def _redis_now_ms(self) -> int:
        async with answering(self._redis.connection_pool):
            seconds, micros = await self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000
