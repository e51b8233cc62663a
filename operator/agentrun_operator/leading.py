"""What only the holder of the Lease does: reconcile, follow demand, reap, write cron tasks. Built anew each time the Lease is taken."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from agentrun import failpoints
from agentrun.maintenance.supervise import Supervisor
from agentrun_operator.apply import tell
from agentrun_operator.cache import ObjectCache
from agentrun_operator.crontasks import CronTasks
from agentrun_operator.facts import NOTHING_SPENT, Observed, QueueFact, SchemaFact, SpendingFact
from agentrun_operator.following import followed
from agentrun_operator.kube import Kube
from agentrun_operator.observe import Observer
from agentrun_operator.plan import Defaults, Event, Plan
from agentrun_operator.probes import StoreProbes
from agentrun_operator.reasons import EventReason
from agentrun_operator.reconcile import ReconcileAgentRun
from agentrun_operator.reconciler import Reconcile
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, Key, Ref
from agentrun_operator.scaling import Scaling
from agentrun_operator.settings import OperatorSettings
from agentrun_operator.targets import Target
from agentrun_operator.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Shared:
    """What both replicas keep, leading or not."""

    settings: OperatorSettings
    kube: Kube
    cache: ObjectCache
    runs: WorkQueue[Key]
    cron_tasks: WorkQueue[Key]


class Work(Protocol):
    """One leadership."""

    @property
    def reconcile_run(self) -> Reconcile: ...

    @property
    def reconcile_cron_task(self) -> Reconcile: ...

    def start(self, supervisor: Supervisor) -> None:
        """Starts the loops; the supervisor stops them."""
        ...

    async def aclose(self) -> None:
        """Closes connections, after the loops have ended."""
        ...


Build = Callable[[Shared], Work]


def build(shared: Shared) -> Work:
    """The work of the operator."""
    return _Leadership(shared)


class _Leadership:
    def __init__(self, shared: Shared) -> None:
        settings, self._kube, self._cache = shared.settings, shared.kube, shared.cache
        defaults = Defaults(settings.image)
        self._tellings: set[asyncio.Task[None]] = set()
        self._probes = StoreProbes(shared.runs.add)
        self._scaling = Scaling(
            self._kube,
            self._cache,
            self._probes,
            identity=settings.pod_name,
            on_change=shared.runs.add,
            on_event=self._tell,
            namespaces=settings.namespaces,
            tick_seconds=settings.tick_seconds,
        )
        self._cron_tasks = CronTasks(
            self._kube,
            self._cache,
            target_of=self._scaling.target,
            stored=self._schedules_stored,
            known=lambda: self._cache.is_complete(CRONTASKS),
        )
        observer = Observer(self._kube, self._cache, _Facts(self._probes), defaults=defaults, scaling=self._scaling.fact)
        self._reconcile = ReconcileAgentRun(
            self._kube, self._cache, observer, defaults=defaults, on_planned=self._follow, on_gone=self._forget
        )

    async def reconcile_run(self, key: Key, /) -> float | None:
        await failpoints.hit("operator.observe.before")
        return await self._reconcile(key)

    async def reconcile_cron_task(self, key: Key, /) -> float | None:
        return await self._cron_tasks.reconcile(key)

    def start(self, supervisor: Supervisor) -> None:
        self._scaling.start(supervisor)
        self._cron_tasks.start(supervisor)

    async def aclose(self) -> None:
        await self._scaling.aclose()
        await self._probes.aclose()
        for task in self._tellings:
            task.cancel()
        await asyncio.gather(*self._tellings, return_exceptions=True)

    def _follow(self, observed: Observed, plan: Plan) -> None:
        """Hands an AgentRun whose stores are known to what follows demand; of any other the workers stay as they are."""
        target = followed(observed, plan, self._scaling.target(observed.key))
        if target is None:
            self._scaling.forget(observed.key)
        else:
            self._scaling.watch(target)

    def _forget(self, key: Key) -> None:
        self._scaling.forget(key)
        self._probes.forget(key)

    def _schedules_stored(self, target: Target) -> int | None:
        found = self._probes.known_database(target.database_url)
        return found.schedules if found is not None else None

    def _tell(self, key: Key, reason: EventReason, message: str) -> None:
        """Writes an Event without making anybody wait for it."""
        raw = self._cache.get(Ref(AGENTRUNS, key.namespace, key.name))
        if raw is None:
            return
        event = Event(reason, message, warning=reason is EventReason.SCALER_CONFLICT)
        task = asyncio.create_task(tell(self._kube, Observed(key, raw, None), event, datetime.now(UTC)), name="event")
        self._tellings.add(task)
        task.add_done_callback(self._tellings.discard)


class _Facts:
    """The probes as `observe` asks them."""

    def __init__(self, probes: StoreProbes) -> None:
        self._probes = probes

    async def schema(self, key: Key, url: str) -> SchemaFact | None:
        return await self._probes.schema(key, url)

    async def queue(self, key: Key, url: str) -> QueueFact | None:
        return await self._probes.queue(key, url)

    def spending(self, url: str) -> SpendingFact:
        found = self._probes.known_database(url)
        return found.spending if found is not None else NOTHING_SPENT

    def invalidate(self, url: str) -> None:
        self._probes.invalidate_database(url)
