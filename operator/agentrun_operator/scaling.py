"""All that follows the queues: one sampler, one scaler and one reaper for all AgentRuns. Lives as long as a leadership."""

import asyncio
from collections.abc import Callable, Sequence

from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun_operator.autoscalers import Autoscalers
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import ScalingFact
from agentrun_operator.kube import Kube
from agentrun_operator.probes import StoreProbes
from agentrun_operator.reaper import FleetReaper
from agentrun_operator.reasons import EventReason
from agentrun_operator.resources import Key
from agentrun_operator.sampler import Sample, Sampler
from agentrun_operator.scaler import Scaler
from agentrun_operator.targets import Target

_AUTOSCALERS_SECONDS = 60.0
_CHECK_SECONDS = 5.0


class Scaling:
    """What the reconciler talks to. `watch` at each reconcile of an accepted AgentRun whose stores are known; `forget` otherwise.

    A forgotten AgentRun keeps the workers that it has.
    """

    def __init__(
        self,
        kube: Kube,
        cache: ObjectCache,
        probes: StoreProbes,
        *,
        identity: str,
        on_change: Callable[[Key], None],
        on_event: Callable[[Key, EventReason, str], None] = lambda _key, _reason, _message: None,
        namespaces: Sequence[str] = (),
        tick_seconds: float = 2.0,
    ) -> None:
        """`identity` is this pod's name. `on_change` is told when `fact` has changed."""
        self._probes = probes
        self._targets: dict[Key, Target] = {}
        self._unknown: set[Key] = set()
        self._autoscalers = Autoscalers(kube, namespaces)
        self._reaper = FleetReaper(cache, identity=identity)
        self._scaler = Scaler(
            kube, cache, self._autoscalers, on_change=on_change, on_event=on_event, dead_lettered=self._dead_lettered
        )
        self._sampler = Sampler(self._take, tick_seconds=tick_seconds)

    def start(self, supervisor: Supervisor) -> None:
        """Starts the loops; the supervisor stops them, and then `aclose` ends the rest."""
        supervisor.run("sampler", self._watch_sampler, stale_after=60.0)
        supervisor.every("autoscalers", _AUTOSCALERS_SECONDS, self._autoscalers.refresh)

    def watch(self, target: Target) -> None:
        """Follows this AgentRun from now on. An equal target changes nothing; a new one is acted on at once."""
        self._targets[target.key] = target
        self._reaper.watch(target)
        changed = self._scaler.watch(target)
        self._sampler.watch(target)
        if changed:
            self._sampler.wake(target.key)

    def forget(self, key: Key) -> None:
        """Follows it no more and leaves everything as it is."""
        if self._targets.pop(key, None) is None:
            return
        self._unknown.discard(key)
        self._sampler.forget(key)
        self._scaler.forget(key)
        self._reaper.forget(key)

    def fact(self, key: Key) -> ScalingFact | None:
        """For status; None while nothing is known."""
        return self._scaler.fact(key)

    def target(self, key: Key) -> Target | None:
        """What is followed; None if it is not."""
        return self._targets.get(key)

    async def aclose(self) -> None:
        """Ends samples, writes and visits."""
        await self._sampler.aclose()
        await self._scaler.aclose()
        await self._reaper.aclose()

    def _take(self, key: Key, sample: Sample) -> None:
        self._suspect(key, sample)
        self._scaler.on_sample(key, sample)
        self._reaper.on_sample(key, sample)

    def _suspect(self, key: Key, sample: Sample) -> None:
        """When Redis falls silent or comes back, what was known about it is asked anew."""
        known = sample.demand is not None
        if known == (key not in self._unknown):
            return
        self._unknown.symmetric_difference_update({key})
        self._probes.invalidate_queue(self._targets[key].redis_url)

    def _dead_lettered(self, target: Target) -> int | None:
        found = self._probes.known_database(target.database_url)
        return found.dead_lettered if found is not None else None

    async def _watch_sampler(self, stamp: Stamp) -> None:
        """Progress of the sampler is progress of this loop."""
        while True:
            if self._sampler.stalled() is None:
                stamp()
            await asyncio.sleep(_CHECK_SECONDS)
