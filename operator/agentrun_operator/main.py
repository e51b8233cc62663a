"""The operator's process: what starts, in which order, and how it ends.

kinds served → watches and first full list (ready) → Lease → work. Both replicas watch, so a new leader knows the cluster already.
"""

import asyncio
import contextlib
import os
import signal
import time

import structlog

from agentrun import health
from agentrun.domain.errors import AgentrunError
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun_operator import kube_config, leading
from agentrun_operator.cache import Body, ObjectCache, owners, ref_of, uid_of
from agentrun_operator.cron_task_kind import CronTaskKind
from agentrun_operator.elector import Elector, Terms, WorkDidNotEnd
from agentrun_operator.handlers import Watcher, set_up_watch_logs
from agentrun_operator.kube import Kube
from agentrun_operator.leading import Build, Shared
from agentrun_operator.metrics import QUEUE_LENGTH, WATCH_EVENTS
from agentrun_operator.reconciler import Reconciler
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, LEASES, OPTIONAL, OURS, WATCHED, Key, Ref, Resource
from agentrun_operator.resync import STALE_SECONDS, Resync
from agentrun_operator.schedules import agent_of
from agentrun_operator.secret_watch import SecretWatch
from agentrun_operator.settings import OperatorSettings
from agentrun_operator.work_queue import WorkQueue

CRON_WORKERS = 2
KINDS_SECONDS = 1.0
PING_SECONDS = 10.0
FIRST_LISTS_SECONDS = 20.0
"""So long after the first full list, objects without a kind of event may still be of the watches' own first lists."""

_log = structlog.get_logger(__name__)


async def run(settings: OperatorSettings, *, stop: asyncio.Event | None = None, build: Build = leading.build) -> None:
    """Runs until SIGTERM or SIGINT, or until `stop` is set by whoever runs it as a part of a larger process.

    Waits for an API server that is away and for CRDs that are not installed. Raises ConfigurationError if there are no credentials or
    the health port is taken, WatchEnded if a watched kind was removed (but for CronTasks): a new process then waits for it.
    """
    stop = _stopped_by_signals() if stop is None else stop
    set_up_watch_logs()
    api = await Kube.connect(settings.kubeconfig_paths, seconds=settings.request_seconds)
    operator = _Operator(settings, api, build)
    try:
        async with health.serve(
            host=settings.health_host, port=settings.health_port, alive=operator.alive, ready=operator.ready
        ) as port:
            _log.info("operator started", health_port=port, namespaces=settings.namespaces or "all")
            await operator.run(stop)
    except WorkDidNotEnd as error:
        _log.critical("operator ends at once", error=str(error))
        os._exit(70)  # an orderly end would wait for that work
    finally:
        await api.aclose()
    _log.info("operator stopped")


class _Operator:
    def __init__(self, settings: OperatorSettings, api: Kube, build: Build) -> None:
        self._settings = settings
        self._build = build
        self._shared = shared = Shared(settings, api, ObjectCache(), _queue(), _queue())
        self._rest()
        self._resync = Resync(
            api,
            shared.cache,
            runs=shared.runs,
            cron_tasks=shared.cron_tasks,
            namespaces=settings.namespaces,
            spread_seconds=settings.resync_seconds / 2,
        )
        self._elector = Elector(
            api,
            Ref(LEASES, settings.pod_namespace, settings.lease),
            settings.pod_name,
            terms=Terms(settings.lease_seconds, settings.renew_seconds, settings.retry_seconds),
        )
        self._watcher = self._watcher_of(*(resource for resource in WATCHED if resource not in OPTIONAL))
        self._cron_watcher = self._watcher_of(CRONTASKS)
        self._cron_kind = CronTaskKind(
            api,
            self._cron_watcher,
            take_all=self._resync.take_cron_tasks,
            hurry=self._resync.hurry,
            tell=self._note_cron_tasks,
        )
        self._supervisor = Supervisor()
        self._leading: Supervisor | None = None
        self._waits_for = "the API server was not asked yet"
        self._elects = False
        self._relist_after = float("inf")

    def _watcher_of(self, *resources: Resource) -> Watcher:
        paths = self._settings.kubeconfig_paths
        return Watcher(self._settings, resources, lambda: kube_config.connection(paths), self._see)

    def ready(self) -> str | None:
        """What is missing until the first full list is done."""
        return None if self._resync.done.is_set() else self._waits_for or self._resync.wrong

    def alive(self) -> str | None:
        """What makes no progress."""
        for supervisor in (self._supervisor, self._leading):
            if supervisor is not None and (wrong := supervisor.stalled()):
                return wrong
        return self._elector.stalled() if self._elects else None

    async def run(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait(), name="stop")
        kinds = asyncio.create_task(self._kinds_are_served(), name="kinds")
        try:
            await asyncio.wait([stopped, kinds], return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await kinds
                await self._run(stopped)
        finally:
            await _cancel(stopped, kinds)

    async def _run(self, stopped: asyncio.Task[bool]) -> None:
        watches = asyncio.create_task(self._watcher.run(), name="watches")
        election = asyncio.create_task(self._elect(), name="election")
        self._start_loops()
        try:
            done, _ = await asyncio.wait([stopped, watches, election], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(election)
            if election.cancelled():
                await self._elector.release()
            await self._supervisor.stop()
            await _cancel(watches)
            if not election.cancelled():
                election.result()

    async def _kinds_are_served(self) -> None:
        """Waits for the AgentRun CRD. A watch that begins before it would never notice it. CronTasks come when theirs is there."""
        said = None
        while True:
            try:
                served = await self._shared.kube.served(OURS[0].group, OURS[0].version)
                if AGENTRUNS.plural in served:
                    self._waits_for = ""
                    return
                missing = [str(resource) for resource in OURS if resource.plural not in served]
                self._waits_for = (
                    f"the custom resource definitions {', '.join(missing)} are not installed; apply them and the operator starts"
                )
            except AgentrunError as error:
                self._waits_for = str(error)
            if self._waits_for != said:
                said = self._waits_for
                _log.warning("operator waits", why=said)
            await asyncio.sleep(KINDS_SECONDS)

    def _start_loops(self) -> None:
        settings, shared = self._settings, self._shared

        async def resync(stamp: Stamp) -> None:
            await self._resync.watch(stamp, seconds=settings.resync_seconds)

        self._supervisor.run("resync", resync, stale_after=STALE_SECONDS)
        # It ends with its kind, and begins again when that is there. It has no news for hours, but a loop that answers.
        self._supervisor.run("watch of crontasks", self._cron_kind.follow, stale_after=float("inf"))
        self._supervisor.every("watches", PING_SECONDS, self._watches_answer)
        for namespace in settings.namespaces or (None,):
            secrets = SecretWatch(shared.kube, shared.cache, shared.runs, namespace=namespace, silence=settings.silence_seconds)
            # Silence is normal here, and its requests have limits of their own.
            self._supervisor.run(f"secrets-{namespace or 'all'}", secrets.watch, stale_after=float("inf"))

    async def _watches_answer(self) -> None:
        await self._watcher.answers()
        await self._cron_watcher.answers()

    def _see(self, resource: Resource, kind: str | None, body: Body) -> None:
        """Takes a watch event. An object that changed hands concerns its former AgentRun, too.

        An object without a kind of event comes from a list: the watch had lost its place, and with it deletions.
        """
        cache, ref = self._shared.cache, ref_of(resource, body)
        before = cache.get(ref)
        if kind is None and time.monotonic() > self._relist_after:
            self._resync.hurry()
        changed = cache.remove(ref, uid=uid_of(body)) if kind == "DELETED" else cache.put(resource, body)
        WATCH_EVENTS.labels(resource.plural, str(changed).lower()).inc()
        if changed:
            queue = self._shared.cron_tasks if resource == CRONTASKS else self._shared.runs
            for key in {*owners(resource, body), *(owners(resource, before) if before else ())}:
                queue.add(key)
            self._measure()
        if resource == AGENTRUNS and (before is None or kind in ("ADDED", "DELETED")):
            # Also where a reconcile has noticed it first, so that the cache learns nothing here.
            self._enqueue_cron_tasks_of(Key(ref.namespace, ref.name))

    def _enqueue_cron_tasks_of(self, agent: Key) -> None:
        """Their conditions say whether their AgentRun is there."""
        for ref, task in self._shared.cache.of(CRONTASKS).items():
            if agent_of(task) == agent:
                self._shared.cron_tasks.add(Key(ref.namespace, ref.name))

    def _note_cron_tasks(self, served: bool) -> None:
        """The AgentRuns that have schedules say it."""
        self._shared.cache.served(CRONTASKS, yes=served)
        for ref in self._shared.cache.of(AGENTRUNS):
            self._shared.runs.add(Key(ref.namespace, ref.name))

    def _measure(self) -> None:
        QUEUE_LENGTH.labels("agentruns").set(len(self._shared.runs))
        QUEUE_LENGTH.labels("crontasks").set(len(self._shared.cron_tasks))

    async def _elect(self) -> None:
        await self._resync.done.wait()
        self._relist_after = time.monotonic() + FIRST_LISTS_SECONDS
        self._elects = True
        await self._elector.run(self._lead)

    async def _lead(self) -> None:
        settings, shared = self._settings, self._shared
        work = self._build(shared)
        supervisor = self._leading = Supervisor()
        try:
            for queue in (shared.runs, shared.cron_tasks):
                queue.open()
            self._enqueue_all()
            Reconciler("agentruns", shared.runs, work.reconcile_run, seconds=settings.reconcile_seconds).start(
                supervisor, workers=settings.workers
            )
            Reconciler("crontasks", shared.cron_tasks, work.reconcile_cron_task, seconds=settings.reconcile_seconds).start(
                supervisor, workers=CRON_WORKERS
            )
            work.start(supervisor)
            await asyncio.Event().wait()
        finally:
            self._leading = None
            await supervisor.stop()
            self._rest()
            await work.aclose()

    def _rest(self) -> None:
        """Nobody takes keys now. Who begins to work looks at everything."""
        for queue in (self._shared.runs, self._shared.cron_tasks):
            queue.close()

    def _enqueue_all(self) -> None:
        """The former leader may have left anything half-way."""
        for key in self._shared.cache.agent_runs():
            self._shared.runs.add(key)
        for ref in self._shared.cache.of(CRONTASKS):
            self._shared.cron_tasks.add(Key(ref.namespace, ref.name))


def _queue() -> WorkQueue[Key]:
    return WorkQueue(group=lambda key: key.namespace)


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, AgentrunError):
            await task
