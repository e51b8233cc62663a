"""Tells Redis what the slots loop has committed, for a bounded time. What does not get through is found by the sweep."""

import asyncio

import structlog

from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.runs import WorkStream
from agentrun.domain.errors import BusMisconfigured, BusUnavailable
from agentrun.scheduler.loop import News

SECONDS = 2.0

_log = structlog.get_logger(__name__)


class BusAnnouncer:
    """Cancellations first, then events, then runs to work on."""

    def __init__(self, stream: WorkStream, events: EventStream, control: Control) -> None:
        self._stream = stream
        self._events = events
        self._control = control
        self._checked = False

    async def send(self, news: News) -> None:
        """Sends, or gives up after SECONDS."""
        try:
            async with asyncio.timeout(SECONDS):
                if not self._checked:
                    await self._stream.ensure_group()  # a Redis that may drop keys is not used
                    self._checked = True
                for taken in news.cancelled:
                    if taken.owner is not None:
                        message = ControlMessage(taken.run_id, taken.epoch, ControlAction.CANCEL)
                        await self._control.send(taken.owner.rpartition("/")[0], message)
                await self._events.append([(taken.run_id, event) for taken in news.cancelled for event in taken.events])
                heads = [taken.next_head for taken in news.cancelled if taken.next_head is not None]
                await self._stream.publish([*heads, *news.heads])
        except (TimeoutError, BusUnavailable, BusMisconfigured) as error:
            self._checked = False
            _log.warning("scheduled runs are stored, and Redis could not be told", runs=len(news.heads), error=str(error))
