"""Working on many items in one round trip, without one bad item spoiling the rest."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from agentrun.domain.errors import AgentrunError
from agentrun.telemetry import ENTRY_ERRORS

T = TypeVar("T")

_log = structlog.get_logger(__name__)


async def in_batch(items: Sequence[T], work: Callable[[Sequence[T]], Awaitable[None]], *, loop: str) -> list[T]:
    """Calls `work` with all items; if that fails, halves them until the bad ones are alone. Returns those, counted and logged.

    `work` must be harmless to repeat. An AgentrunError, such as an outage, is nobody's own fault and is raised.
    """
    bad = await _bad_ones(items, work)
    if bad:
        item, error = bad[0]
        ENTRY_ERRORS.labels(loop).inc(len(bad))
        _log.error("left for the next pass", loop=loop, count=len(bad), first=str(item), exc_info=error)
    return [item for item, _ in bad]


async def _bad_ones(items: Sequence[T], work: Callable[[Sequence[T]], Awaitable[None]]) -> list[tuple[T, Exception]]:
    if not items:
        return []
    try:
        await work(items)
    except AgentrunError:
        raise
    except Exception as error:
        if len(items) == 1:
            return [(items[0], error)]
        middle = len(items) // 2
        return [*await _bad_ones(items[:middle], work), *await _bad_ones(items[middle:], work)]
    return []
