"""Keeps the work stream small: removes entries that nobody needs, what is remembered of lost ones, and consumers that are gone.

A consumer is named after a pod's start, so each restart leaves one behind. It may go only with an empty pending list, which the
script proves: deleting it would drop its pending entries. A living one that has only been idle for long (Redis 7.0 does not count
reads that find nothing) comes back with its next read.
"""

import structlog

from agentrun.bus.runs import WorkStream
from agentrun.telemetry import CONSUMERS_RETIRED

SHORTEST_GRACE_SECONDS = 60
"""Well above the time that a worker's read blocks: a consumer that waits for work is not gone."""

_log = structlog.get_logger(__name__)


class Tidying:
    """The tidying of one AgentRun's work stream."""

    def __init__(self, stream: WorkStream, *, idle_seconds: float, grace_seconds: float) -> None:
        """An entry is trusted for `idle_seconds`. A consumer goes after `grace_seconds` without a sign of life; twice
        reaper.idleSeconds is a good value.
        """
        self._stream = stream
        self._idle_ms = int(idle_seconds * 1000)
        self._cursor = 0
        self._grace_ms = int(max(grace_seconds, SHORTEST_GRACE_SECONDS) * 1000)

    async def tick(self) -> None:
        """Once. Raises BusUnavailable, BusMisconfigured."""
        await self._stream.trim()
        self._cursor, forgotten = await self._stream.forget_lost(idle_ms=self._idle_ms, cursor=self._cursor)
        if forgotten:
            _log.warning("forgot entries that the work stream has lost", entries=forgotten)
        retired = await self._stream.retire_consumers(self._grace_ms)
        CONSUMERS_RETIRED.inc(len(retired))
        if retired:
            _log.info("retired idle consumers", consumers=len(retired))
