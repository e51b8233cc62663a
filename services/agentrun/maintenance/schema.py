"""Watches whether this process may work on the database: its schema, and whose it is."""

import asyncio

import structlog

from agentrun.control.schema_gate import decide, foreign
from agentrun.maintenance.supervise import Stamp
from agentrun.store import migrations
from agentrun.store.pool import Pool

CHECK_SECONDS = 30.0
RETRY_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class SchemaWatch:
    """Knows what stands against working, from the last time that Postgres answered: an outage by itself changes nothing."""

    def __init__(self, pool: Pool, *, agent: str) -> None:
        self._pool = pool
        self._agent = agent
        self._opened = asyncio.Event()
        self._wrong: str | None = "the schema has not been checked yet"

    def wrong(self) -> str | None:
        """What is wrong, None if this process may work: its readiness."""
        return self._wrong

    async def opened(self) -> None:
        """Waits until this process may work for the first time."""
        await self._opened.wait()

    async def check(self) -> None:
        """Asks Postgres once. Raises StoreUnavailable."""
        state = await migrations.check(self._pool)
        decision = decide(required=state.required, present=state.present, oldest_accepted=state.oldest_accepted)
        wrong = foreign(owner=state.owner, agent=self._agent) if decision.serves else decision.message
        if wrong != self._wrong:
            if wrong is None:
                _log.info("ready", schema=decision.message)
            else:
                _log.warning("not ready", why=wrong)
        self._wrong = wrong
        if wrong is None:
            self._opened.set()

    async def watch(self, stamp: Stamp) -> None:
        """Checks again and again, for a supervisor. Raises StoreUnavailable."""
        while True:
            await self.check()
            stamp()
            await asyncio.sleep(RETRY_SECONDS if self._wrong else CHECK_SECONDS)
