"""The command line. Reads settings and manifest, sets up logs, and hands over to one process; each is imported only when it is run."""

import asyncio
import gc
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrun import __version__, settings
from agentrun.commands import costs, cron, dlq, effects, usage
from agentrun.domain.errors import AgentrunError, ConfigurationError, ManifestError
from agentrun.domain.keys import RANDOM_BYTES, Scope, generate, record_line
from agentrun.settings import Settings

if TYPE_CHECKING:
    from agentrun.manifests import AgentRun
    from agentrun_operator.kube import Kube

app = typer.Typer(
    name="agentrun",
    help="Run LLM agents as durable runs on Postgres and Redis Streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys, name="keys")
crds = typer.Typer(help="Print the CustomResourceDefinitions, or bring them into a cluster.")
app.add_typer(crds, name="crds")
app.add_typer(cron.app, name="cron")
app.add_typer(costs.app, name="costs")
app.command("usage")(usage.usage)
app.add_typer(dlq.app, name="dlq")
app.add_typer(effects.app, name="effects")


OBJECTS_TO_COLLECT = 10_000
"""So many new objects start a collection of the youngest. Python's 700 make a tenth of a start, which only makes objects to keep."""


def main() -> None:
    """The command `agentrun`. An error made for people is one line on stderr and exit code 2."""
    try:
        app()
    except AgentrunError as error:
        print(f"agentrun: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""
    gc.set_threshold(OBJECTS_TO_COLLECT)


@app.command()
def gateway() -> None:
    """Serve the HTTP API: takes submissions, streams events."""
    from agentrun.gateway import process

    _run(process.run(*_read("gateway")))


@app.command()
def worker() -> None:
    """Execute runs."""
    from agentrun.worker import process

    _run(process.run(*_read("worker")))


@app.command()
def scheduler() -> None:
    """Fire CronTasks; look after stuck and forgotten work."""
    from agentrun.scheduler import process

    _run(process.run(*_read("scheduler")))


@app.command()
def operator() -> None:
    """Run AgentRuns and CronTasks on Kubernetes. Several replicas may run: one of them works."""
    from agentrun.telemetry import set_up_logs
    from agentrun_operator import main
    from agentrun_operator import settings as operator_settings

    current = operator_settings.read()
    set_up_logs(level=current.log_level, form=current.log_format, process="operator", pod=current.pod_name)
    _run(main.run(current))


@app.command()
def migrate(
    wait_seconds: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for another migration that runs.")
    ] = 120.0,
) -> None:
    """Bring the database's schema up to this version. Safe to repeat, and to run twice at the same time.

    With AGENTRUN_NAME set the database is reserved for that AgentRun. Ends with 0 when the schema is there, and with 2 and one line on
    stderr when it is not: a statement was refused, another migration ran for too long, or Postgres does not answer.
    """
    from agentrun.store import migrations
    from agentrun.telemetry import set_up_logs

    current = settings.read("database_url")
    set_up_logs(level=current.log_level, form=current.log_format, process="migrate")
    named = bool(current.model_fields_set & {"namespace", "name"})
    _run(migrations.migrate(current.database_url, owner=current.agent if named else None, wait_seconds=wait_seconds))
    print(f"the database has schema {migrations.LATEST}")


@app.command()
def dev(
    files: Annotated[
        list[Path],
        typer.Option("--file", "-f", metavar="FILE", help="The manifests: one AgentRun, and its CronTasks. May be repeated."),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for the stores' data, kept between starts; without it .agentrun/NAMESPACE-NAME."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the gateway; without it 8080, or any free one if that is taken.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Send this message, show the answer, and exit.")] = None,
    model: Annotated[str | None, typer.Option(help="Use this model (provider:name) instead of the manifest's.")] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server to ask, for a model of openai.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Send no message: serve HTTP until Ctrl-C or SIGTERM.")] = False,
) -> None:
    """Run everything on this machine: stores, gateway, scheduler and workers."""
    current = settings.read()
    from agentrun.dev import schedules

    given = schedules.load(files)
    from agentrun.dev import stack
    from agentrun.dev.options import Options

    options = Options(given.file, state, port, message or None, model or None, base_url or None, serve)
    raise typer.Exit(stack.main(given.agent_run, options, current, cron_tasks=given.cron_tasks))


@crds.callback(invoke_without_command=True)
def print_crds(context: typer.Context) -> None:
    """Print the CustomResourceDefinitions, for `agentrun crds | kubectl apply --server-side -f -`."""
    from agentrun.manifests.definitions import definitions

    if context.invoked_subcommand is None:
        print(definitions(), end="")


@crds.command("apply")
def apply_crds() -> None:
    """Apply the CustomResourceDefinitions of this version; newer ones are left as they are. Needs KUBECONFIG, or runs in a pod."""
    _run(_in_cluster(_apply_crds))


@crds.command("check")
def check_crds() -> None:
    """Say whether the API server serves AgentRun and CronTask. Needs KUBECONFIG, or runs in a pod."""
    _run(_in_cluster(_check_crds))


@keys.command("create")
def create_key(
    user: Annotated[str, typer.Option(help="The user that the key belongs to.")],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="act-as: may name the end user; admin: sees all users' data. May be repeated."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File of hashed keys to append to; without it the record is printed.")] = None,
) -> None:
    """Make an API key. It is shown once; only its hash is stored."""
    try:
        key, record = generate(
            secrets.token_bytes(RANDOM_BYTES), user=user, scopes=scope or (), created=datetime.now(UTC).replace(microsecond=0)
        )
    except ValueError as error:
        raise ConfigurationError(f"--user: {error}") from None
    if file is None:
        print(
            f"record (append it to the file named by {settings.variable_of('api_keys')}): {record_line(record)}", file=sys.stderr
        )
    else:
        _append(file, record_line(record))
    print(key)


async def _in_cluster(work: "Callable[[Kube], Coroutine[Any, Any, None]]") -> None:
    """Does something with the API server."""
    from agentrun_operator import settings as operator_settings
    from agentrun_operator.kube import Kube

    current = operator_settings.read()
    api = await Kube.connect(current.kubeconfig_paths, seconds=current.request_seconds)
    try:
        await work(api)
    finally:
        await api.aclose()


async def _apply_crds(api: "Kube") -> None:
    from agentrun.manifests import installation
    from agentrun.manifests.definitions import documents
    from agentrun_operator.resources import CRDS, Ref

    class Cluster:
        async def get(self, name: str) -> installation.Definition | None:
            return await api.get(Ref(CRDS, "", name))

        async def apply(self, name: str, definition: installation.Definition) -> installation.Definition:
            return await api.apply(Ref(CRDS, "", name), dict(definition), manager=installation.MANAGER)

    await installation.install(documents(), Cluster(), pause=lambda: asyncio.sleep(0.5), say=print)


async def _check_crds(api: "Kube") -> None:
    from agentrun_operator.resources import OURS

    served = await api.served(OURS[0].group, OURS[0].version)
    if missing := [str(resource) for resource in OURS if resource.plural not in served]:
        raise ConfigurationError(f"the API server does not serve {' and '.join(missing)}; apply them with `agentrun crds apply`")
    print(f"the API server serves {' and '.join(map(str, OURS))}")


def _append(file: Path, line: str) -> None:
    """Adds a line to a file that only its owner can read."""
    try:
        if not file.exists():
            file.touch(mode=0o600)
        text = file.read_text(encoding="utf-8")
        with file.open("a", encoding="utf-8") as out:
            out.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file}: not UTF-8 at byte {error.start}, so no file of keys; name another") from None
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}; name a file that can be written") from None


def _read(process: str) -> "tuple[Settings, AgentRun]":
    """Settings and manifest of a process, with logs set up. Of several AgentRuns in the file it takes its own."""
    from agentrun.manifests import load
    from agentrun.telemetry import set_up_logs

    current = settings.read("database_url", "redis_url", "manifest")
    assert current.manifest is not None
    set_up_logs(level=current.log_level, form=current.log_format, process=process, agent=current.agent)
    found = load(current.manifest)
    if len(found) == 1:
        return current, found[0]
    for agent_run in found:
        if agent_run.metadata.name == current.name:
            return current, agent_run
    raise ManifestError(f"{current.manifest}: holds no AgentRun named {current.name}; set AGENTRUN_NAME to one of its names")


def _run(work: Coroutine[Any, Any, object]) -> None:
    """Runs a process to its end on uvloop where there is one."""
    gc.freeze()  # what was imported stays, so no collection need look at it again
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    def new_loop() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        loop.set_exception_handler(_unless_nobody_waits)
        return loop

    return new_loop


def _unless_nobody_waits(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """uvloop goes on looking up a name after a connect that was given up, and reports the failure of that as an error nobody looked at."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)
