"""What is said to one worker while it works, and the call that there is work. Both may be lost.

A worker that misses a message ends its attempt at the next refused write; whoever misses a wake finds the work at the next
tick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

import msgspec
from redis.asyncio import Redis

from agentrun.bus.connection import answering
from agentrun.bus.keys import Keys
from agentrun.bus.pubsub import follow


class ControlAction(StrEnum):
    """What the worker shall do with the attempt."""

    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A message about one attempt: {"run_id", "epoch", "action"} as JSON."""

    run_id: UUID
    epoch: int
    action: ControlAction


class Control:
    """The control channels of one AgentRun's workers."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def send(self, consumer: str, message: ControlMessage) -> bool:
        """Sends; whether anybody was listening. Raises BusUnavailable."""
        async with answering(self._redis.connection_pool):
            return int(await self._redis.publish(self._keys.control(consumer), msgspec.json.encode(message))) > 0

    async def listen(self, consumer: str, callback: Callable[[ControlMessage], None]) -> None:
        """Calls `callback` with each message to this consumer, until cancelled; comes back by itself after an outage."""
        decoder = msgspec.json.Decoder(ControlMessage)
        await follow(self._redis.connection_pool, self._keys.control(consumer), decoder.decode, callback)

    async def listen_for_work(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the number of runs added, at each publication, until cancelled."""
        await follow(self._redis.connection_pool, self._keys.wake, int, callback)
