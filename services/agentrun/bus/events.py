"""A run's output on its way: a short-lived stream that can be read again, and a channel for who is listening right now."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import structlog
from redis.asyncio import Redis

from agentrun.bus.connection import answering, refusal, script
from agentrun.bus.keys import Keys
from agentrun.domain.errors import BusUnavailable
from agentrun.domain.events import Event, decode

TTL_SECONDS = 3600
"""How long a run's stream lives after its last event; Postgres has them all."""

_log = structlog.get_logger(__name__)


class EventStream:
    """The event streams of one AgentRun's runs."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._append = script(redis, "append")

    async def append(self, events: Sequence[tuple[UUID, Event]], *, ttl_seconds: int = TTL_SECONDS) -> list[bool]:
        """Appends events of any runs, in this order, and publishes those that were appended; one round trip.

        False for an event whose number the stream had reached already, or whose stream refused it (that is logged). A
        stream lives for `ttl_seconds` after its last event. Raises BusUnavailable if Redis refused for a reason of its own,
        such as no memory left; some of the events may have been sent by then, and sending them again does no harm.
        """
        if not events:
            return []
        streams = [self._keys.run(run_id) for run_id, _ in events]
        arguments: list[str | bytes | int] = [ttl_seconds]
        for run_id, event in events:
            arguments += [f"{event.seq + 1}-0", self._keys.live(run_id), event.encode()]
        async with answering(self._redis.connection_pool):
            results = await self._append(streams, arguments)
            refused = {stream: text for stream, text in zip(streams, results, strict=True) if isinstance(text, bytes)}
            for stream, text in refused.items():
                error = refusal(text.decode())
                if isinstance(error, BusUnavailable):
                    raise error
                _log.warning("events were refused", stream=stream, error=str(error))
        return [result == 1 for result in results]

    async def read(self, run_id: UUID, *, after: int, limit: int) -> list[Event]:
        """At most `limit` events with a number above `after` (-1: from the first) that the stream still holds, in order.

        The first may be later than `after` + 1 and there may be holes: what is missing is in Postgres.
        """
        async with answering(self._redis.connection_pool):
            found: Any = await self._redis.xrange(self._keys.run(run_id), f"{after + 2}-0", "+", count=limit)
        return [event for entry, fields in found if (event := self._decoded(run_id, entry, fields)) is not None]

    def _decoded(self, run_id: UUID, entry: bytes, fields: dict[bytes, bytes]) -> Event | None:
        try:
            return decode(fields[b"e"])
        except (KeyError, ValueError) as error:  # not written here; what is missing is then in Postgres
            _log.warning("an entry is not an event", run_id=str(run_id), entry=entry.decode(), error=str(error))
            return None
