"""Housekeeping of Postgres: events of old runs are thinned out, old runs and old ledger rows are deleted.

Bounded batches with a rest after each, so that whoever submits never waits for a pass. Any number may run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from agentrun.store import retention
from agentrun.store.pool import Pool
from agentrun.store.retention import BEGINNING
from agentrun.telemetry import RETENTION

RUNS = 100
ROWS = 2000
"""Of one batch."""
REST = 3.0
"""Times the duration of a batch: retention has about a quarter of one connection. With a rest of once, the p99 of submissions was more
than twice the quiet one (`make test-scale`)."""
TICK_SECONDS = 10.0
"""After this time the rest waits for the next tick, so that progress shows."""
DAY_SECONDS = 86_400.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ages:
    """How long is kept what: events one by one in seconds after their run's end, runs and ledger rows in days; 0 days: for ever."""

    event_seconds: float
    run_days: float
    ledger_days: float


class Retention:
    """The retention of one AgentRun."""

    def __init__(self, pool: Pool, ages: Ages) -> None:
        self._pool = pool
        self._ages = ages
        self._place = BEGINNING

    async def tick(self) -> None:
        """One pass, or a part of one. Raises StoreUnavailable."""
        until = time.monotonic() + TICK_SECONDS
        work: list[Callable[[], Awaitable[bool]]] = [self._archive]
        if self._ages.run_days:
            work += [self._delete_slots, self._delete_runs]
        if self._ages.ledger_days:
            work.append(self._delete_ledger)
        for one in work:
            await _until_done(one, until)

    async def _archive(self) -> bool:
        done = await retention.archive(self._pool, age_seconds=self._ages.event_seconds, runs=RUNS, events=ROWS)
        RETENTION.labels("events").inc(done.events)
        RETENTION.labels("archived").inc(done.runs)
        return done.events > 0 or done.runs > 0

    async def _delete_slots(self) -> bool:
        gone = await retention.delete_slots(self._pool, age_seconds=self._ages.run_days * DAY_SECONDS, rows=ROWS)
        RETENTION.labels("slots").inc(gone)
        return gone > 0

    async def _delete_runs(self) -> bool:
        age = self._ages.run_days * DAY_SECONDS
        done = await retention.delete_runs(self._pool, age_seconds=age, after=self._place, runs=RUNS)
        RETENTION.labels("runs").inc(done.runs)
        self._place = done.place or BEGINNING
        return done.place is not None

    async def _delete_ledger(self) -> bool:
        gone = await retention.delete_ledger(self._pool, age_seconds=self._ages.ledger_days * DAY_SECONDS, rows=ROWS)
        RETENTION.labels("ledger").inc(gone)
        return gone > 0


async def _until_done(batch: Callable[[], Awaitable[bool]], until: float) -> None:
    """Batch after batch, at least one, with rests: others come first."""
    while True:
        began = time.monotonic()
        more = await batch()
        now = time.monotonic()
        rest = (now - began) * REST
        if not more or now + rest >= until:
            return
        await asyncio.sleep(rest)
