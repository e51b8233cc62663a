"""Watching: kopf with event handlers that hand every event on, and do nothing else. No other module knows kopf.

kopf runs in a thread of its own with its own event loop, for three reasons: when it ends it cancels every task of its loop that is
younger than itself; it takes over the process' signals if it is in the main thread; and its work on a flood of events does not
delay ours. It writes nothing to the cluster: no finalizer, no annotation, no Event.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import kopf
from kopf._cogs.configs.configuration import WatchingSettings  # kopf has it as the type of a public attribute only

from agentrun.domain.errors import AgentrunError, ConfigurationError
from agentrun_operator.kube_config import Connection
from agentrun_operator.pauses import Pauses
from agentrun_operator.resources import CHILDREN, CHILDREN_SELECTOR, Resource
from agentrun_operator.settings import OperatorSettings

Body = dict[str, Any]
Sink = Callable[[Resource, str | None, Body], None]
"""Called in the loop that runs the Watcher, with ADDED, MODIFIED or DELETED, or None for an object of a first list."""
Login = Callable[[], Awaitable[Connection]]

STOP_SECONDS = 5.0
INSIST_SECONDS = 1.0
QUIET_SECONDS = 30.0
RELIST_FIRST_SECONDS = 1.0
RELIST_SECONDS = 60.0
"""Pauses before a new list where the former one's version has expired."""
ANSWER_SECONDS = 1.0
_TLS_SECONDS = 0.25
"""What connections over TLS need to close after their session was closed."""


class WatchEnded(AgentrunError):
    """kopf gave up, for instance because a watched kind was removed. Its watches have to begin from the start.

    The cause is one of several errors: when kopf stops, its other watches fail at the session that it has closed.
    """


class Endless:
    """Back-offs without an end: kopf gives up only on a sequence that has a length."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield random.uniform(0.5, 2.0)


class _NoEssence(kopf.DiffBaseStorage):
    """kopf copies each object, and the copy once more, to find out what changed since it last handled it: nobody here asks that."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class Watcher:
    """Watches some kinds until it is cancelled. Each of them must be served when it begins: kopf would never notice it later."""

    def __init__(self, settings: OperatorSettings, resources: Sequence[Resource], login: Login, sink: Sink) -> None:
        self._settings = settings
        self._resources = resources
        self._login = login
        self._sink = sink
        self._loop: asyncio.AbstractEventLoop | None = None
        self._operator: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Never returns. Raises WatchEnded if kopf does; it may be run again then."""
        error = await self._in_thread()
        raise WatchEnded(f"the watches ended: {type(error).__name__}: {error}") from error

    async def answers(self) -> None:
        """Returns when the loop of the watches has had its turn, which is a sign of life, or when there is no such loop any more.

        It waits for one that hangs: to go on, or to fail, would count as progress.
        """
        ours, loop = asyncio.get_running_loop(), self._loop
        if loop is None:
            return
        turn = asyncio.Event()
        _call(loop, _call, ours, turn.set)
        while not turn.is_set() and loop.is_running():  # a loop that has ended forgets what it was asked
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await turn.wait()

    async def _in_thread(self) -> BaseException | None:
        """Runs kopf to its end; what it raised."""
        ours = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = ours.create_future()

        def end(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def body() -> None:
            error: BaseException | None = None
            try:
                asyncio.run(self._watch(ours))
            except BaseException as raised:
                error = raised
            _call(ours, end, error)

        thread = threading.Thread(target=body, name="watches", daemon=True)
        thread.start()
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if self._loop is not None and self._operator is not None:
                _call(self._loop, self._operator.cancel)
            await asyncio.wait([ended], timeout=STOP_SECONDS)
            raise

    async def _watch(self, ours: asyncio.AbstractEventLoop) -> None:
        namespaces = self._settings.namespaces
        running = kopf.operator(
            registry=_registry(
                self._resources, self._login, lambda resource, kind, body: _call(ours, self._sink, resource, kind, body)
            ),
            settings=_kopf_settings(self._settings),
            identity=self._settings.pod_name,  # type: ignore[arg-type]  # else it asks for the user's name, which a container's user lacks
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
        self._loop, self._operator = asyncio.get_running_loop(), asyncio.create_task(running)
        self._loop.set_exception_handler(_note_left_over)
        insisting = asyncio.create_task(_insist())
        try:
            await self._operator
        finally:
            insisting.cancel()
            await _clear_up()


async def _clear_up() -> None:
    """Ends what kopf has left, so that its connections are closed while the loop still runs."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1.0)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.sleep(_TLS_SECONDS)


async def _insist() -> None:
    """Cancels again what kopf has cancelled and what goes on all the same: kopf would wait for it for ever."""
    while True:
        await asyncio.sleep(INSIST_SECONDS)
        for task in asyncio.all_tasks():
            if task.cancelling() and task.get_name().startswith("watcher for "):
                task.cancel()


def _note_left_over(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """When kopf stops it leaves tasks behind whose errors nobody asks for. They are long known from its own log by then."""
    logging.getLogger(__name__).debug("left behind by the watches: %s: %r", context.get("message"), context.get("exception"))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        pass  # the loop is closed: the process is ending


def _registry(resources: Sequence[Resource], login: Login, sink: Sink) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        try:
            found = await login()
        except ConfigurationError as error:
            raise kopf.LoginError(str(error)) from None
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=found.insecure,
            token=found.token,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
            proxy_url=found.proxy_url,
        )

    kopf.on.login(registry=registry)(log_in)
    for resource in resources:
        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(_handler(resource, sink))
    return registry


def _handler(resource: Resource, sink: Sink) -> Callable[..., Awaitable[None]]:
    async def hand_on(event: dict[str, Any], **_: Any) -> None:
        sink(resource, event["type"], event["object"])

    hand_on.__name__ = f"hand_on_{resource.plural}"
    return hand_on


def _kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    found.watching = _PatientWatching(Pauses(RELIST_FIRST_SECONDS, RELIST_SECONDS))
    found.process.ultimate_exiting_timeout = None
    """Else it may kill the process after its own end."""
    found.posting.enabled = False
    found.peering.standalone = True
    found.scanning.disabled = True
    """Scanning wants rights on CRDs and namespaces, and where they are refused it watches nothing for a minute."""
    found.persistence.diffbase_storage = _NoEssence()
    found.queueing.idle_timeout = 0.5
    """Each object with news has a task until it was without for so long: at the default of 5 s, many thousands in a flood."""
    found.networking.connect_timeout = 5
    found.networking.request_timeout = 30
    """Its default of 300 s would leave us blind for as long after one hung list."""
    found.networking.error_backoffs = Endless()
    found.watching.inactivity_timeout = settings.silence_seconds
    for resource in CHILDREN:
        name = ".".join(filter(None, (resource.plural, resource.version, resource.group)))
        found.watching.label_selectors[name] = CHILDREN_SELECTOR
    return found


class _PatientWatching(WatchingSettings):
    """kopf asks for its pause before each new list: where versions expire all the time it gets longer ones."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        super().__init__()

    @property
    def reconnect_backoff(self) -> float:
        return self._pauses.next()

    @reconnect_backoff.setter
    def reconnect_backoff(self, _seconds: float) -> None:
        """The default is not wanted."""


class _OncePerMessage(logging.Filter):
    """Lets a message through at most every QUIET_SECONDS: an API server that is away makes the same one for each kind and try."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        sort = text.rpartition(" -> ")[2] if " -> " in text else text
        now = time.monotonic()
        if now - self._last.get(sort, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        if len(self._last) > 100:
            self._last.clear()
        self._last[sort] = now
        return True


def set_up_watch_logs() -> None:
    """Keeps kopf's loggers to what a person can use. Its line for each handled event goes."""
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    logging.getLogger("kopf.activities").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it misses the signals, which are ours
    calls = logging.getLogger("kopf._cogs.clients.watching")
    if not any(isinstance(known, _OncePerMessage) for known in calls.filters):
        calls.addFilter(_OncePerMessage())
