"""One reconcile of an AgentRun: observe, plan, apply."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from agentrun import failpoints
from agentrun_operator.apply import Memory, NameTaken, ObjectRefused, execute
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import Observed
from agentrun_operator.failure import plan_of_failure
from agentrun_operator.kube import Kube
from agentrun_operator.observe import Observer
from agentrun_operator.plan import Plan, plan
from agentrun_operator.resources import Key, Ref
from agentrun_operator.situation import Defaults

SECOND_LOOK_SECONDS = 3.0
"""After a change of a Deployment: how it is afterwards, should no event tell. An event, which is the rule, comes sooner."""


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
        """Seconds until the next look without an event. Raises KubeError, and NameTaken if names change hands all the time."""
        try:
            return await self._once(key)
        except NameTaken as taken:
            return await self._once(key, doubted=taken.ref)

    async def _once(self, key: Key, *, doubted: Ref | None = None) -> float | None:
        now = self._clock()
        observed = await self._observer.observe(key, now=now, doubted=doubted)
        if observed is None:
            self._memory.forget(key)
            self._observer.forget(key)
            self._cache.disturbed(key)
            self._on_gone(key)
            return None
        observed = replace(observed, rewritten=self._memory.rewritten(key))
        planned = await self._plan(observed, now)
        self._on_planned(observed, planned)
        try:
            changed = await self._execute(planned, observed, now)
        except ObjectRefused as error:
            observed = replace(observed, refusal=error.refusal)
            planned = await self._plan(observed, now)
            changed = await self._execute(planned, observed, now)
        again = [planned.requeue_after, SECOND_LOOK_SECONDS if changed else None, 0.0 if self._cache.disturbed(key) else None]
        return min((seconds for seconds in again if seconds is not None), default=None)

    async def _plan(self, observed: Observed, now: datetime) -> Plan:
        """Whatever goes wrong in it is said in the status, too, and raised."""
        try:
            await failpoints.hit("operator.plan")
            return plan(observed, now=now, defaults=self._defaults)
        except Exception as error:
            await self._execute(plan_of_failure(observed, error, now=now), observed, now)
            raise

    async def _execute(self, planned: Plan, observed: Observed, now: datetime) -> bool:
        return await execute(planned, observed, kube=self._kube, cache=self._cache, memory=self._memory, now=now)
