"""CronTasks come and go with their kind: watched while the API server serves it, waited for while it does not.

AgentRuns do without: the rest of the operator goes on. What was known of CronTasks when their kind went stays known.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from agentrun.maintenance.supervise import Stamp
from agentrun_operator.metrics import KIND_MISSING
from agentrun_operator.resources import CRONTASKS

LOOK_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class Discovery(Protocol):
    """What this needs of the API server."""

    async def served(self, group: str, version: str) -> set[str]: ...


class Watch(Protocol):
    async def run(self) -> None:
        """Never returns. Raises WatchEnded."""
        ...


class CronTaskKind:
    """Runs `watch` while the kind is served. `take_all` lists its objects, `hurry` asks for one more full list soon, `tell` hears
    whether the kind is served whenever that changes.
    """

    def __init__(
        self,
        discovery: Discovery,
        watch: Watch,
        *,
        take_all: Callable[[], Awaitable[None]],
        hurry: Callable[[], None],
        tell: Callable[[bool], None],
    ) -> None:
        self._discovery = discovery
        self._watch = watch
        self._take_all = take_all
        self._hurry = hurry
        self._tell = tell
        self._missing = KIND_MISSING.labels(CRONTASKS.plural)
        self._missing.set(0)
        self._was_missing = False

    async def follow(self, stamp: Stamp) -> None:
        """Never returns; raises WatchEnded or KubeError, also when the kind goes. It is to be called again then."""
        await self._is_served()
        watching = asyncio.create_task(self._watch.run(), name="watch of crontasks")
        try:
            await self._take_all()
            stamp()  # no sooner, so that a list that is refused again and again is asked for at growing intervals
            if self._was_missing:
                self._say(missing=False)
                self._hurry()  # a deletion between this list and the watch's own would be missed
            await watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _is_served(self) -> None:
        while CRONTASKS.plural not in await self._discovery.served(CRONTASKS.group, CRONTASKS.version):
            self._say(missing=True)
            await asyncio.sleep(LOOK_SECONDS)

    def _say(self, *, missing: bool) -> None:
        if missing == self._was_missing:
            return
        self._missing.set(missing)
        self._was_missing = missing
        self._tell(not missing)
        if missing:
            _log.warning(
                "the operator goes on without CronTasks",
                why=f"the custom resource definition {CRONTASKS} is not installed; apply it and they are looked after",
            )
        else:
            _log.info("CronTasks are looked after again")
