"""One reconcile of an AgentRun: observe, plan, apply."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from agentrun_operator.apply import Memory, ObjectRefused, execute
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import Observed
from agentrun_operator.kube import Kube
from agentrun_operator.observe import Observer
from agentrun_operator.plan import Plan, plan
from agentrun_operator.resources import Key
from agentrun_operator.situation import Defaults


def _nothing(*_: object) -> None:
    pass


class ReconcileAgentRun:
    """Brings the cluster to what an AgentRun says; see `reconciler.Reconcile`.

    `on_planned` is told what was seen and what was decided, `on_gone` that there is no such AgentRun any more.
    """

    def __init__(
        self,
        kube: Kube,
        cache: ObjectCache,
        observer: Observer,
        *,
        defaults: Defaults,
        on_planned: Callable[[Observed, Plan], None] = _nothing,
        on_gone: Callable[[Key], None] = _nothing,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._observer = observer
        self._defaults = defaults
        self._on_planned = on_planned
        self._on_gone = on_gone
        self._clock = clock
        self._memory = Memory()

    async def __call__(self, key: Key, /) -> float | None:
        """Seconds until the next look without an event. Raises KubeError."""
        now = self._clock()
        observed = await self._observer.observe(key, now=now)
        if observed is None:
            self._memory.forget(key)
            self._observer.forget(key)
            self._on_gone(key)
            return None
        observed = replace(observed, rewritten=self._memory.rewritten(key))
        planned = plan(observed, now=now, defaults=self._defaults)
        self._on_planned(observed, planned)
        try:
            await self._execute(planned, observed, now)
        except ObjectRefused as error:
            observed = replace(observed, refusal=error.refusal)
            planned = plan(observed, now=now, defaults=self._defaults)
            await self._execute(planned, observed, now)
        return planned.requeue_after

    async def _execute(self, planned: Plan, observed: Observed, now: datetime) -> None:
        await execute(planned, observed, kube=self._kube, cache=self._cache, memory=self._memory, now=now)
