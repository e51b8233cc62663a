"""Everything on one machine: stores from wheels, gateway and scheduler in this process, workers as child processes.

The same manifests and the same code as in a cluster; `control.scaling` decides how many workers there are.
Ctrl-C ends it in order, a second one at once. Killed, it leaves nothing behind: the stores' keeper and the workers end with it, and the
next start finds the data and finishes what was unfinished.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrun.dev import conversation, schedules
from agentrun.dev.binaries import StoresError
from agentrun.dev.client import Client
from agentrun.dev.conversation import Conversation, Screen
from agentrun.dev.key import dev_key
from agentrun.dev.options import Options, model_server, port_of, settings_of, state_folder, with_model, worker_environment
from agentrun.dev.scaling import scaled
from agentrun.dev.stopping import Stopping
from agentrun.dev.stores import Stores, StoreUrls
from agentrun.dev.workers import Workers
from agentrun.domain.errors import AgentrunError, ConfigurationError, ManifestError, SchemaMismatch
from agentrun.gateway import process as gateway_process
from agentrun.manifests import AgentRun, CronTask
from agentrun.scheduler import process as scheduler_process
from agentrun.settings import Settings
from agentrun.store import migrations
from agentrun.telemetry import set_up_logs

RECOVERY_MARGIN_SECONDS = 30.0
GRACE_MARGIN_SECONDS = 15.0
WATCH_SECONDS = 0.2
MOST_FAILED_STARTS = 3
GREETING = "Hello! What are you, and what happens to my message here?"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run: the AgentRun with its settings, without the stores' URLs as long as they are not known."""

    agent_run: AgentRun
    cron_tasks: Sequence[CronTask]
    options: Options
    state: Path
    settings: Settings


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs. `ready` is set once a worker takes work; `parts` are tasks of this process, none of which ends by itself."""

    client: Client
    key: str
    url: str
    server: str | None
    stores: Stores
    workers: Workers
    ready: asyncio.Event
    parts: tuple[asyncio.Task[None], ...]

    async def failure(self) -> AgentrunError:
        """Waits until something has ended that must not, and says why. Raises what a part raised."""
        while True:
            if why := self.stores.ended():
                return StoresError(f"the stores have ended: {why}")
            if self.workers.refused.is_set():
                return ManifestError(self.workers.last_words())
            if not self.ready.is_set() and self.workers.failed_starts >= MOST_FAILED_STARTS:
                return AgentrunError(f"no worker gets started: {self.workers.last_words()}; see {self.workers.log}")
            for part in self.parts:
                if part.done():
                    part.result()
                    return AgentrunError(f"the {part.get_name()} has ended; see agentrun.log in the state folder")
            await asyncio.sleep(WATCH_SECONDS)


def main(agent_run: AgentRun, options: Options, settings: Settings, *, cron_tasks: Sequence[CronTask] = ()) -> int:
    """Runs the stack with the settings of the environment; returns the exit code: 0, 1 if the message's run did not succeed, 130 if it
    was ended at once. Raises AgentrunError.
    """
    if agent_run.spec.suspend:
        raise ManifestError(f"{options.manifest}: spec.suspend: is true, so no message would be taken; set it to false")
    if options.serve and options.message is not None:
        raise ConfigurationError("--serve: sends no message, but --message gives one; leave one of them out")
    state, port = state_folder(options, agent_run), port_of(options)
    with _log_file(state, settings.log_level):
        manifest = options.manifest.resolve()
        if options.model is not None:
            agent_run, manifest = with_model(agent_run, options.model, state)
        settings = settings_of(settings, agent_run, manifest=manifest, state=state, port=port)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(_run(Plan(agent_run, cron_tasks, options, state, settings)))
    return 130


@contextlib.contextmanager
def _log_file(state: Path, level: str) -> Iterator[None]:
    """Logs of this process go to a file of the state folder: the terminal is for the conversation."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        out = (state / "agentrun.log").open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--state: {state}: {error.strerror}; name a folder that can be written to") from None
    with out:
        set_up_logs(level=level, form="json", out=out, process="dev")
        yield


async def _run(plan: Plan) -> int:
    stopping, screen = Stopping(), Screen()
    stopping.listen()
    code = 0
    async with _stack(plan, screen, stopping) as stack:
        if stack is not None:
            code = await _until_the_end(plan, stack, screen, stopping)
    return 130 if stopping.at_once.is_set() else code


async def _until_the_end(plan: Plan, stack: Stack, screen: Screen, stopping: Stopping) -> int:
    """Talks until the conversation ends, a stop is asked for, or a part fails; the exit code. Raises AgentrunError."""
    talking = asyncio.create_task(_talk(plan, stack, screen))
    failing = asyncio.create_task(stack.failure())
    asked = asyncio.create_task(stopping.asked.wait())
    tasks: list[asyncio.Task[Any]] = [talking, failing, asked]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            screen.line()
            error = failing.result()
            if isinstance(error, StoresError):
                stopping.at_once.set()  # nothing can be finished or handed back
            raise error
        if talking.done():
            return 0 if talking.result() else 1
        screen.line()
        seconds = plan.agent_run.spec.workers.drain_seconds
        screen.step("stopping", f"up to {seconds} s for workers to finish or hand back; Ctrl-C again to stop at once")
        return 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _talk(plan: Plan, stack: Stack, screen: Screen) -> bool:
    """The conversation; whether the first message's run succeeded. Nothing is submitted before a worker could load the agent."""
    await stack.ready.wait()
    earlier = await stack.client.unfinished()
    if earlier:
        screen.step("recovering", f"{len(earlier)} run(s) of an earlier start are unfinished")
    recovery = asyncio.create_task(conversation.finish_earlier(stack.client, screen, earlier))
    options = plan.options
    try:
        if options.serve:
            screen.line(f"\nServing until Ctrl-C. For another terminal:\n\n    URL={stack.url} KEY={stack.key}\n")
            await asyncio.gather(recovery, return_exceptions=True)
            await asyncio.Event().wait()
        talk = Conversation(stack.client, screen, f"dev-{secrets.token_hex(4)}", stack.url, stack.server)
        if options.interactive:
            await talk.ask(GREETING)
            await talk.prompt()
            return True
        succeeded = await talk.ask(options.message or GREETING)
        try:
            await asyncio.wait_for(recovery, plan.agent_run.spec.workers.max_run_seconds + RECOVERY_MARGIN_SECONDS)
        except TimeoutError:
            screen.step("recovering", "not finished in time; the next start goes on")
        return succeeded
    finally:
        recovery.cancel()
        await asyncio.gather(recovery, return_exceptions=True)


@contextlib.asynccontextmanager
async def _stack(plan: Plan, screen: Screen, stopping: Stopping) -> AsyncIterator[Stack | None]:
    """Starts the parts in their order, with a line for each, and ends them in the opposite one. None: a stop was asked for meanwhile."""
    stores = Stores(plan.state)
    urls = await _started(stores, stopping)
    if urls is None:
        yield None
        return
    try:
        screen.step("stores", _describe(urls))
        settings = plan.settings.model_copy(update={"database_url": urls.database_url, "redis_url": urls.redis_url})
        applied = await _migrate(settings, plan.state, own=urls.keeper_pid is not None)
        screen.step("schema", f"version {migrations.LATEST}" + (f", {applied} migration(s) applied" if applied else ""))
        await schedules.write(settings.database_url, plan.cron_tasks)
        for task in plan.cron_tasks:
            screen.step("schedule", schedules.describe(task))
        key = dev_key(plan.state)
        environment = worker_environment(settings, plan.options)
        grace = plan.agent_run.spec.workers.drain_seconds + GRACE_MARGIN_SECONDS
        workers = Workers(environment, plan.state / "workers.log", grace_seconds=grace)
        async with (
            _processes(settings, plan.agent_run, screen) as (url, parts),
            contextlib.aclosing(Client(url, key)) as client,
            scaled(workers, settings, plan.agent_run, screen, at_once=stopping.at_once) as ready,
        ):
            screen.step("key", f"Authorization: Bearer {key}")
            yield Stack(client, key, url, model_server(plan.agent_run, environment), stores, workers, ready, parts)
    finally:
        await asyncio.to_thread(stores.stop)
        screen.step("stopped", f"data stays in {plan.state}")


async def _started(stores: Stores, stopping: Stopping) -> StoreUrls | None:
    """Starts the stores, which may take long after a crash; None if a stop was asked for meanwhile."""
    starting = asyncio.create_task(asyncio.to_thread(stores.start))
    asked = asyncio.create_task(stopping.asked.wait())
    await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not starting.done():
        stores.give_up()
    try:
        return await starting
    except StoresError:
        if stopping.asked.is_set():
            return None
        raise


async def _migrate(settings: Settings, state: Path, *, own: bool) -> int:
    try:
        return await migrations.migrate(settings.database_url, owner=settings.agent, say=lambda _: None)
    except SchemaMismatch as error:
        if own:
            raise SchemaMismatch(f"{state}: {error}, which is another folder named with --state") from error
        raise


@contextlib.asynccontextmanager
async def _processes(
    settings: Settings, agent_run: AgentRun, screen: Screen
) -> AsyncIterator[tuple[str, tuple[asyncio.Task[None], ...]]]:
    """Gateway and scheduler; yields the gateway's URL and the two tasks."""
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
        screen.step("scheduler", "schedules, reaper and sweep")
        yield url, (gateway, scheduler)
    finally:
        stop.set()
        await asyncio.gather(gateway, scheduler, return_exceptions=True)


def _describe(urls: StoreUrls) -> str:
    return (
        "DATABASE_URL and REDIS_URL of the environment"
        if urls.keeper_pid is None
        else "Postgres and Valkey, on this machine only"
    )
