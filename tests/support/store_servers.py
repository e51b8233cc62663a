"""Postgres and Redis servers for tests: one pair for the session, private ones for outages and restarts.

AGENTRUN_TEST_STORES=system takes Debian's Postgres 15 and Redis instead of the wheels; only their programs are used,
never the services that the packages start.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from waiting import eventually

from agentrun.dev.binaries import POSTGRES_VARIABLE, REDIS_VARIABLE, ProgramMissingError, find_postgres, find_redis
from agentrun.dev.servers import Postgres, Redis, Server

VARIABLE = "AGENTRUN_TEST_STORES"
SYSTEM_POSTGRES = Path("/usr/lib/postgresql/15/bin")
SYSTEM_REDIS = Path("/usr/bin/redis-server")

# Processes are killed in tests, machines are not: without fsync nothing is lost. Commits still wait for their write.
POSTGRES_SETTINGS = {"max_connections": "300", "fsync": "off", "full_page_writes": "off"}
REDIS_SETTINGS = {"appendonly": "no"}


def why_not() -> str | None:
    """The reason why this machine cannot run the stores that were asked for; None if it can."""
    asked = os.environ.get(VARIABLE, "wheels")
    if asked not in ("wheels", "system"):
        return f"{VARIABLE}={asked}: it must be wheels or system"
    if asked == "system":
        missing = [str(path) for path in (SYSTEM_POSTGRES / "postgres", SYSTEM_REDIS) if not path.exists()]
        return f"{VARIABLE}=system: not installed: {', '.join(missing)}" if missing else None
    try:
        find_postgres()
        find_redis()
    except ProgramMissingError as error:
        return str(error)
    return None


def choose_programs() -> None:
    """Sets this process' environment so that the asked-for programs are found and no given store is used."""
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
    if os.environ.get(VARIABLE) == "system":
        os.environ[POSTGRES_VARIABLE] = str(SYSTEM_POSTGRES)
        os.environ[REDIS_VARIABLE] = str(SYSTEM_REDIS)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets and which Postgres can enter when root runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="agentrun-test-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PrivateServer:
    """A server of one test. Its URL and its data stay the same over stops, kills and starts."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.process.pid if self._server.process else None

    async def start(self) -> None:
        """Returns when it answers."""
        self._server.spawn()
        await eventually(self._server.is_ready, within=30, what=f"{self._server.name} is ready")

    async def stop(self) -> None:
        """An orderly end."""
        self._server.request_stop()
        await self._ended()

    async def kill(self) -> None:
        """SIGKILL to the server and all its processes, like a lost machine. Data that was written stays."""
        for pid in self._server.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._ended()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def pause(self) -> None:
        """SIGSTOP to all its processes: connections stay, nothing answers."""
        for pid in self._server.pids():
            os.kill(pid, signal.SIGSTOP)

    async def resume(self) -> None:
        for pid in reversed(self._server.pids()):
            os.kill(pid, signal.SIGCONT)

    def discard(self) -> None:
        """The end without waiting for an event loop."""
        self._server.request_stop()
        self._server.wait_stopped()

    async def _ended(self) -> None:
        process = self._server.process
        await eventually(lambda: process is None or process.poll() is not None, within=20, what=f"{self._server.name} ends")


@contextlib.asynccontextmanager
async def private_server(
    kind: type[Redis] | type[Postgres], settings: Mapping[str, str] | None = None
) -> AsyncIterator[PrivateServer]:
    """A started server with its own data: Redis with its append-only file, Postgres with an empty cluster."""
    with short_folder() as folder:
        sockets = folder / "s"
        sockets.mkdir(mode=0o700)
        server = PrivateServer(kind(folder, sockets, {**(POSTGRES_SETTINGS if kind is Postgres else {}), **(settings or {})}))
        try:
            await server.start()
            yield server
        finally:
            server.discard()


class Databases:
    """Makes and drops databases on one Postgres server; the migrated template is made once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._template: str | None = None

    @contextlib.asynccontextmanager
    async def empty(self) -> AsyncIterator[str]:
        """A database without anything in it."""
        name = await self._create("template0")
        try:
            yield database_url(self.url, name)
        finally:
            await self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    @contextlib.asynccontextmanager
    async def migrated(self) -> AsyncIterator[str]:
        """A database with all migrations applied."""
        name = await self._create(await self._migrated_template())
        try:
            yield database_url(self.url, name)
        finally:
            await self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    async def execute(self, sql: str) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    async def _create(self, template: str) -> str:
        name = f"t_{uuid.uuid4().hex[:12]}"
        await self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name

    async def _migrated_template(self) -> str:
        if self._template is None:
            from agentrun.store.migrations import migrate

            name = await self._create("template0")
            await migrate(database_url(self.url, name))
            self._template = name
        return self._template


def database_url(server_url: str, database: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{database}"))
