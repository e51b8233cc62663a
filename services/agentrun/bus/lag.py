"""How much work there is, as Redis sees it: what the number of workers follows."""

from dataclasses import dataclass

from redis.asyncio import Redis

from agentrun.bus.connection import answering, script
from agentrun.bus.keys import GROUP, Keys
from agentrun.domain.errors import BusUnavailable

COUNT_ALWAYS = 1_000
COUNT_AT_MOST = 10_000
PENDING_AT_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Demand:
    """Entries: not delivered yet; being worked on; delivered, and untouched for so long that a reaper will take them."""

    undelivered: int
    in_flight: int
    reclaimable: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.undelivered + self.in_flight + self.reclaimable


async def sample(redis: Redis, keys: Keys, idle_ms: int) -> Demand | None:
    """The demand now, in one round trip, or None if Redis does not tell: unknown is not zero.

    A backlog up to 1,000 is exact. A missing stream or group is created, and is no demand.
    """
    try:
        async with answering(redis.connection_pool):
            undelivered, pending, idle = await script(redis, "sample")(
                [keys.runs], [GROUP, idle_ms, COUNT_ALWAYS, COUNT_AT_MOST, PENDING_AT_MOST]
            )
    except BusUnavailable:
        return None
    return Demand(int(undelivered), int(pending) - int(idle), int(idle))
