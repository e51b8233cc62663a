"""Which names in a namespace objects have that do not carry our label.

What is found serves all AgentRuns of the namespace for a few seconds, so it can be wrong by as much: a name that is in it is looked up
before anything is made of that, and what is made under a name that is not in it is made as a new object or not at all.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agentrun_operator.kube import Kube
from agentrun_operator.resources import MANAGED_BY, MANAGED_BY_LABEL, Ref, Resource

FRESH_SECONDS = 10.0
NOT_OURS = f"{MANAGED_BY_LABEL}!={MANAGED_BY}"


@dataclass(slots=True)
class _Names:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    names: frozenset[str] = frozenset()
    fresh_until: float = float("-inf")


class ForeignNames:
    """The names by kind and namespace."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[tuple[Resource, str], _Names] = {}

    async def among(self, refs: Iterable[Ref]) -> frozenset[Ref]:
        """Those of `refs` that were taken within the last FRESH_SECONDS. Raises KubeError."""
        return frozenset([ref for ref in sorted(refs) if ref.name in await self._names(ref.resource, ref.namespace)])

    async def _names(self, resource: Resource, namespace: str) -> frozenset[str]:
        found = self._known.get((resource, namespace))
        if found is None:
            self._drop_old()
            found = self._known[(resource, namespace)] = _Names()
        async with found.lock:
            if self._clock() >= found.fresh_until:
                asked_at = self._clock()
                listing = await self._kube.list_metadata(resource, namespace=namespace, labels=NOT_OURS)
                found.names = frozenset(item["metadata"]["name"] for item in listing.items)
                found.fresh_until = asked_at + FRESH_SECONDS
        return found.names

    def _drop_old(self) -> None:
        now = self._clock()
        for place, found in [*self._known.items()]:
            if now >= found.fresh_until and not found.lock.locked():
                del self._known[place]
