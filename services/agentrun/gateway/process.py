"""The gateway process: starts while the stores are away, serves, and ends on SIGTERM in under five seconds, open streams or not."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog
import uvicorn
from redis.asyncio import Redis

from agentrun.bus import connection
from agentrun.bus.control import Control, ControlAction, ControlMessage
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.bus.live import LiveFeed
from agentrun.bus.runs import WorkStream
from agentrun.costs.rules import budget_of
from agentrun.domain.errors import BusUnavailable, ConfigurationError
from agentrun.domain.events import Event
from agentrun.domain.follow_ups import Policy
from agentrun.gateway.app import create_app
from agentrun.gateway.auth import Authenticator
from agentrun.gateway.connections import HttpProtocol
from agentrun.gateway.context import Gateway
from agentrun.gateway.feeds import HEARTBEAT_SECONDS, MOST_BYTES, MOST_VIEWERS, POLL_SECONDS, Feeds
from agentrun.gateway.log import EventLog
from agentrun.gateway.publisher import Publisher
from agentrun.gateway.submissions import FollowUpRules, Submissions
from agentrun.maintenance.schema import SchemaWatch
from agentrun.maintenance.supervise import Supervisor
from agentrun.manifests import AgentRun
from agentrun.settings import Settings
from agentrun.store.pool import Pool, create_pool

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than the idle limit of usual load balancers, so that they close first
GRACE_SECONDS = 2
CLOSE_SECONDS = 1.0
BUS_CHECK_SECONDS = 30.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """How streams keep up; tests shorten it. Seconds, the bytes that may wait for one client, and how many clients there may be."""

    heartbeat_seconds: float = HEARTBEAT_SECONDS
    poll_seconds: float = POLL_SECONDS
    most_bytes: int = MOST_BYTES
    most_viewers: int = MOST_VIEWERS


async def run(
    settings: Settings,
    manifest: AgentRun,
    *,
    stop: asyncio.Event | None = None,
    on_listening: Callable[[int], None] | None = None,
    timing: Timing | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, or until `stop` is set by whoever runs it as a part of a larger process.

    `on_listening` gets the port. Raises ConfigurationError if the port is taken or the file of keys cannot be used.
    """
    if settings.api_keys is None:
        raise ConfigurationError(
            "AGENTRUN_API_KEYS is not set; name a file of keys, made with `agentrun keys create --user NAME --file FILE`"
        )
    stop = _stopped_by_signals() if stop is None else stop
    authenticator = Authenticator(settings.api_keys)
    with _listen(settings.host, settings.port) as listener:
        async with _parts(settings, manifest, authenticator, timing or Timing()) as gateway:
            port = int(listener.getsockname()[1])
            _log.info("gateway listens", host=settings.host, port=port)
            if on_listening is not None:
                on_listening(port)
            await _serve(gateway, listener, stop)
    _log.info("gateway stopped")


@contextlib.asynccontextmanager
async def _parts(settings: Settings, manifest: AgentRun, authenticator: Authenticator, timing: Timing) -> AsyncIterator[Gateway]:
    pool = await create_pool(settings.database_url, manifest.spec.database.pool_size, name="agentrun-gateway")
    redis = await connection.connect(settings.redis_url)
    keys = Keys(settings.namespace, settings.name)
    work, events = WorkStream(redis, keys), EventStream(redis, keys)

    def compare_soon() -> None:
        feeds.compare_soon()

    live = LiveFeed(settings.redis_url, keys, on_reconnect=compare_soon)
    feeds = _feeds(pool, live, events, timing, replay_limit=manifest.spec.streaming.replay_limit)
    publisher = _publisher(work, events, Control(redis, keys))
    submissions = _submissions(pool, publisher, settings.agent, manifest)
    schema = SchemaWatch(pool, agent=settings.agent)
    supervisor = _watching(schema, redis)
    feeds.start()
    try:
        yield Gateway(
            agent=settings.agent,
            max_body_bytes=manifest.spec.gateway.max_body_bytes,
            suspended=manifest.spec.suspend,
            pool=pool,
            authenticator=authenticator,
            submissions=submissions,
            publisher=publisher,
            feeds=feeds,
            budget=budget_of(manifest.spec),
            ready=schema.wrong,
        )
    finally:
        await feeds.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(submissions.close(), CLOSE_SECONDS)
        await publisher.close()
        await supervisor.stop()
        await live.aclose()
        await work.aclose()
        await redis.aclose()
        await _close(pool)


def _submissions(pool: Pool, publisher: Publisher, agent: str, manifest: AgentRun) -> Submissions:
    spec = manifest.spec
    rules = FollowUpRules(
        policy=Policy(spec.follow_ups.policy),
        window_seconds=spec.follow_ups.window_seconds,
        at_once=max(1, spec.database.pool_size // 2),
    )
    return Submissions(
        pool, publisher, agent=agent, dedupe_seconds=spec.submission.dedupe_seconds, rules=rules, budget=budget_of(spec)
    )


def _feeds(pool: Pool, live: LiveFeed, events: EventStream, timing: Timing, *, replay_limit: int) -> Feeds:
    return Feeds(
        pool,
        live,
        EventLog(pool, lambda run_id, after, limit: events.read(run_id, after=after, limit=limit), replay_limit=replay_limit),
        heartbeat_seconds=timing.heartbeat_seconds,
        poll_seconds=timing.poll_seconds,
        most_bytes=timing.most_bytes,
        most_viewers=timing.most_viewers,
    )


def _watching(schema: SchemaWatch, redis: Redis) -> Supervisor:
    supervisor = Supervisor()
    supervisor.run("schema", schema.watch, stale_after=120.0)
    supervisor.every("bus-check", BUS_CHECK_SECONDS, lambda: _check(redis))
    return supervisor


def _publisher(work: WorkStream, events: EventStream, control: Control) -> Publisher:
    async def send_events(batch: Sequence[tuple[UUID, Event]]) -> None:
        await events.append(batch)

    async def send_cancel(consumer: str, run_id: UUID, epoch: int) -> None:
        await control.send(consumer, ControlMessage(run_id, epoch, ControlAction.CANCEL))

    return Publisher(heads=work.publish, events=send_events, cancel=send_cancel)


async def _serve(gateway: Gateway, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serves until `stop`, then cuts the streams, answers what is under way and closes every connection."""
    config = uvicorn.Config(
        create_app(gateway),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await gateway.feeds.close()
        await serving


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: they end the process by the signal itself, so it could not exit with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `run`."""
        yield


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"AGENTRUN_PORT: cannot listen on {host}:{port} ({error.strerror or error}); choose a free port"
        ) from None
    with listener:
        yield listener


async def _check(redis: Redis) -> None:
    """A Redis that is away is no fault here; one that may lose keys is logged by the supervisor."""
    with contextlib.suppress(BusUnavailable):
        await connection.check(redis)


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _close(pool: Pool) -> None:
    """Closes the pool; a connection that does not answer any more is cut."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await pool.close()
            return
    pool.terminate()
