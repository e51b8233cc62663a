"""The live feed: one connection that brings a process the events of all the runs that its clients follow."""

from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import UUID

from agentrun.bus.connection import pool
from agentrun.bus.keys import Keys
from agentrun.bus.pubsub import Subscriptions
from agentrun.domain.events import Event, decode

Listener = Callable[[Event], None]


class LiveFeed:
    """Events of runs, as they are sent. A fast wire and no more: one that is lost shows as a missing number at the next.

    `on_reconnect` is called whenever the feed works again after it did not, so that the last events are looked up then.
    Listeners must not block; an exception in one is logged and touches no other.
    """

    def __init__(self, url: str, keys: Keys, *, on_reconnect: Callable[[], None] | None = None) -> None:
        self._keys = keys
        self._subscriptions = Subscriptions(pool(url), decode=decode, on_reconnect=on_reconnect)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self._subscriptions.connected

    async def subscribe(self, run_id: UUID, listener: Listener) -> bool:
        """Calls `listener` with each event of the run.

        True once the server has confirmed it, so that whatever is read from elsewhere afterwards leaves no hole. False if
        Redis is away or slow: the subscription stands, and `on_reconnect` tells when it works.
        """
        return await self._subscriptions.subscribe(self._keys.live(run_id), listener)

    def unsubscribe(self, run_id: UUID, listener: Listener) -> None:
        """Ends one subscription."""
        self._subscriptions.unsubscribe(self._keys.live(run_id), listener)

    async def aclose(self) -> None:
        """Ends all subscriptions and the connection."""
        await self._subscriptions.aclose()
