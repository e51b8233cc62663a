"""Everything on one machine: stores from wheels, gateway and scheduler in this process, workers as child processes.

The same manifests and the same code as in a cluster; `control.scaling` decides how many workers there are.
Ctrl-C ends it in order. Killed, it leaves nothing behind: the stores' keeper and the workers end with it, and the next start finds
the data and finishes what was unfinished.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import yaml

from agentrun.bus import connection, lag
from agentrun.bus.keys import Keys
from agentrun.control.scaling import Bounds, Memory, desired_workers
from agentrun.dev import conversation
from agentrun.dev.client import Client
from agentrun.dev.conversation import Screen
from agentrun.dev.stores import Stores, StoreUrls
from agentrun.dev.workers import Workers
from agentrun.domain.errors import AgentrunError, ManifestError
from agentrun.domain.keys import RANDOM_BYTES, Scope, generate, record_line
from agentrun.gateway import process as gateway_process
from agentrun.maintenance.supervise import Supervisor
from agentrun.manifests import AgentRun, parse
from agentrun.scheduler import process as scheduler_process
from agentrun.settings import Settings, environment_of
from agentrun.store import migrations
from agentrun.telemetry import set_up_logs

USUAL_PORT = 8080
SCALE_SECONDS = 0.25
RECOVERY_MARGIN_SECONDS = 30.0
GRACE_MARGIN_SECONDS = 15.0
GREETING = "Hello! What are you, and what happens to my message here?"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """How `agentrun dev` was called.

    Without a `port`: the usual one, or any. `model` replaces the manifest's, `base_url` is an OpenAI-compatible server for it.
    """

    manifest: Path
    state: Path
    port: int | None = None
    message: str | None = None
    model: str | None = None
    base_url: str | None = None

    @property
    def interactive(self) -> bool:
        """Whether to stay as a prompt."""
        return self.message is None and sys.stdin.isatty()


def main(agent_run: AgentRun, options: Options) -> int:
    """Runs the stack; returns the exit code: 0, or 1 if the message's run did not succeed. Raises AgentrunError."""
    options = replace(options, manifest=options.manifest.resolve(), state=options.state.resolve())
    with _log_file(options.state):
        code_folder = options.manifest.parent
        if options.model is not None:
            agent_run, path = with_model(agent_run, options.model, options.state)
            options = replace(options, manifest=path)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(_run(agent_run, options, _worker_environment(options, code_folder)))
    return 130


def with_model(agent_run: AgentRun, model: str, state: Path) -> tuple[AgentRun, Path]:
    """The same AgentRun with another model, and the file that says so. Raises ManifestError if it is not provider:name."""
    document = agent_run.as_document()
    agent = document["spec"]["agent"]
    agent.pop("entrypoint", None)
    agent.pop("modelSettings", None)
    agent["model"] = model
    text = yaml.safe_dump(document, sort_keys=False)
    (changed,) = parse(text, source="--model")
    path = state / "agentrun.yaml"
    path.write_text(text, encoding="utf-8")
    return changed, path


@contextlib.contextmanager
def _log_file(state: Path) -> Iterator[None]:
    """Logs of this process go to a file of the state folder: the terminal is for the conversation."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        out = (state / "agentrun.log").open("a", encoding="utf-8")
    except OSError as error:
        raise AgentrunError(f"{state}: {error.strerror}; name a state folder that can be written to") from None
    with out:
        set_up_logs(level=os.environ.get("AGENTRUN_LOG_LEVEL", "info"), form="json", out=out, process="dev")
        yield


async def _run(agent_run: AgentRun, options: Options, environment: dict[str, str]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    screen = Screen()
    async with _stack(agent_run, options, environment, screen) as (client, url, workers):
        talking = asyncio.create_task(_talk(agent_run, options, screen, client, url))
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(workers.refused.wait())]
        await asyncio.wait([talking, *waits], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if talking.done():
            return 0 if await talking else 1
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        screen.line()
        if workers.refused.is_set():
            raise ManifestError(workers.last_words())
        screen.step("stopping", "letting workers finish or hand back")
        return 0


async def _talk(agent_run: AgentRun, options: Options, screen: Screen, client: Client, url: str) -> bool:
    """The conversation; whether the first message's run succeeded."""
    earlier = await client.unfinished()
    if earlier:
        screen.step("recovering", f"{len(earlier)} run(s) of an earlier start are unfinished")
    recovery = asyncio.create_task(conversation.finish_earlier(client, screen, earlier))
    try:
        session = f"dev-{secrets.token_hex(4)}"
        if options.interactive:
            await conversation.ask(client, screen, session=session, text=GREETING, url=url)
            await conversation.prompt(client, screen, session=session, url=url)
            return True
        succeeded = await conversation.ask(client, screen, session=session, text=options.message or GREETING, url=url)
        async with asyncio.timeout(agent_run.spec.workers.max_run_seconds + RECOVERY_MARGIN_SECONDS):
            await recovery
        return succeeded
    finally:
        recovery.cancel()
        await asyncio.gather(recovery, return_exceptions=True)


@contextlib.asynccontextmanager
async def _stack(
    agent_run: AgentRun, options: Options, environment: dict[str, str], screen: Screen
) -> AsyncIterator[tuple[Client, str, Workers]]:
    """Starts the parts in their order, with a line for each, and ends them in the opposite one."""
    stores = Stores(options.state)
    urls = await asyncio.to_thread(stores.start)
    try:
        screen.step("stores", _describe(urls))
        settings = _settings(agent_run, options, urls)
        applied = await migrations.migrate(urls.database_url, owner=settings.agent, say=lambda _: None)
        screen.step("schema", f"version {migrations.LATEST}" + (f", {applied} migration(s) applied" if applied else ""))
        key = _dev_key(options.state)
        workers = Workers(
            environment_of(settings, base=environment),
            options.state / "workers.log",
            grace_seconds=agent_run.spec.workers.drain_seconds + GRACE_MARGIN_SECONDS,
        )
        async with _processes(settings, agent_run, workers, screen) as url:
            client = Client(url, key)
            try:
                screen.step("key", f"Authorization: Bearer {key}")
                yield client, url, workers
            finally:
                await client.aclose()
    finally:
        await asyncio.to_thread(stores.stop)
        screen.step("stopped", f"data stays in {options.state}")


@contextlib.asynccontextmanager
async def _processes(settings: Settings, agent_run: AgentRun, workers: Workers, screen: Screen) -> AsyncIterator[str]:
    """Gateway, scheduler and workers; yields the gateway's URL."""
    stop = asyncio.Event()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(
        gateway_process.run(settings, agent_run, stop=stop, on_listening=listening.set_result), name="gateway"
    )
    scheduler = asyncio.create_task(scheduler_process.run(settings, agent_run, stop=stop), name="scheduler")
    try:
        parts: list[asyncio.Future[Any]] = [gateway, scheduler, listening]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in (gateway, scheduler):
            if part.done():
                part.result()
        url = f"http://{settings.host}:{await listening}"
        screen.step("gateway", url)
        screen.step("scheduler", "reaper and sweep")
        async with _scaled(workers, settings, agent_run, screen):
            yield url
    finally:
        stop.set()
        await asyncio.gather(gateway, scheduler, return_exceptions=True)


@contextlib.asynccontextmanager
async def _scaled(workers: Workers, settings: Settings, agent_run: AgentRun, screen: Screen) -> AsyncIterator[None]:
    """Workers that follow demand, measured as in a cluster."""
    spec = agent_run.spec
    bounds = Bounds(
        spec.workers.min_replicas,
        spec.workers.max_replicas,
        spec.scaling.target_per_worker,
        spec.scaling.scale_down_stabilization_seconds,
        spec.scaling.cooldown_seconds,
    )
    redis = await connection.connect(settings.redis_url)
    keys = Keys(settings.namespace, settings.name)
    memory, told = Memory(), -1

    async def scale() -> None:
        nonlocal memory, told
        demand = await lag.sample(redis, keys, spec.reaper.idle_seconds * 1000)
        decision = desired_workers(
            demand.total if demand else None, current=workers.running, bounds=bounds, now=time.monotonic(), memory=memory
        )
        memory = decision.memory
        workers.scale(decision.workers)
        if workers.running != told:
            told = workers.running
            _log.info("workers", running=told, why=decision.why)

    supervisor = Supervisor()
    supervisor.every("scale", SCALE_SECONDS, scale)
    workers.scale(max(1, bounds.min_replicas))  # one is warm when the first message comes; it leaves after the cooldown
    screen.step("workers", f"{bounds.min_replicas} to {bounds.max_replicas}, as work comes")
    try:
        yield
    finally:
        await supervisor.stop()
        await workers.stop()
        await redis.aclose()


def _settings(agent_run: AgentRun, options: Options, urls: StoreUrls) -> Settings:
    return Settings(
        namespace=agent_run.metadata.namespace,
        name=agent_run.metadata.name,
        manifest=options.manifest,
        database_url=urls.database_url,
        redis_url=urls.redis_url,
        api_keys=options.state / "api-keys",
        host="127.0.0.1",
        port=_free_port() if options.port is None else options.port,
        health_port=None,
    )


def _free_port() -> int:
    """The usual port, or 0 (any) where somebody has it."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", USUAL_PORT)):
        return USUAL_PORT
    return 0


def _describe(urls: StoreUrls) -> str:
    return (
        "DATABASE_URL and REDIS_URL of the environment"
        if urls.keeper_pid is None
        else "Postgres and Valkey, on this machine only"
    )


def _worker_environment(options: Options, code_folder: Path) -> dict[str, str]:
    """Where workers find the manifest's modules, and the server for its model."""
    path = os.pathsep.join(filter(None, [str(code_folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if options.base_url is not None:
        environment["OPENAI_BASE_URL"] = options.base_url
        environment.setdefault("OPENAI_API_KEY", "none")
    return environment


def _dev_key(state: Path) -> str:
    """The key of this state folder, made at the first start; only its owner can read it."""
    plain, hashed = state / "dev-key", state / "api-keys"
    with contextlib.suppress(OSError):
        return plain.read_text(encoding="utf-8").strip()
    key, record = generate(
        secrets.token_bytes(RANDOM_BYTES),
        user="dev",
        scopes=[Scope.ACT_AS, Scope.ADMIN],
        created=datetime.now(UTC).replace(microsecond=0),
    )
    for path, text in ((hashed, record_line(record) + "\n"), (plain, key + "\n")):
        path.touch(mode=0o600, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return key
