"""One Postgres and one Valkey/Redis as children of this process, on Unix sockets only.

Owns their data folders, command lines, readiness and end. Whoever uses it holds the lock of the state folder, so
whatever already runs on a data folder is left over from a dead owner and is stopped first.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from agentrun.dev import binaries, launch
from agentrun.dev.binaries import StoresError

READY_SECONDS = 60.0
STOP_SECONDS = 10.0


class Server(ABC):
    """A server process and its data folder. `spawn` returns at once; poll `is_ready` or call `wait_ready`."""

    stop_signal = signal.SIGTERM

    def __init__(self, name: str, data: Path, log: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.data = data
        self.log = log
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect to."""

    @abstractmethod
    def spawn(self) -> None:
        """Starts the process, after clearing what a dead owner left."""

    @abstractmethod
    def _answers(self, process: subprocess.Popen[bytes]) -> bool: ...

    def is_ready(self) -> bool:
        """Raises StoresError if the process has ended."""
        if self.process is None:
            return False
        if self.process.poll() is not None:
            raise StoresError(f"{self.name} ended with {self.process.returncode} on {self.data}: {self._last_words()}")
        return self._answers(self.process)

    def wait_ready(self, seconds: float = READY_SECONDS, given_up: Callable[[], bool] = lambda: False) -> None:
        """Recovery after a crash may take long; given_up ends the wait early. Raises StoresError."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if given_up():
                raise StoresError(f"{self.name} is no longer wanted")
            if time.monotonic() > deadline:
                raise StoresError(f"{self.name} is not ready after {seconds:.0f} s: see {self.log}")
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """The process and all its living children."""
        if self.process is None or self.process.poll() is not None:
            return []
        return [self.process.pid, *_children(self.process.pid)]

    def request_stop(self) -> None:
        for pid in self.pids():
            _send(pid, signal.SIGCONT)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.stop_signal)

    def wait_stopped(self) -> None:
        """Escalates: Postgres was seen to hang in its fast shutdown when it was still recovering."""
        if self.process is None:
            return
        for harder in (signal.SIGQUIT, signal.SIGKILL):
            try:
                self.process.wait(STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                self.process.send_signal(harder)
        self.process.wait()

    def _run(self, program: list[str], account: launch.Account | None) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")} | {"LC_ALL": "C"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                launch.command(program, last_signal=self.stop_signal, account=account),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.data,
                start_new_session=True,
            )

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "FATAL" in line or "atal error" in line] or lines or ["it said nothing"]
        return f"{told[-1][-300:]} (see {self.log})"


class Postgres(Server):
    """`trust` for everybody who can reach the socket: its folder is closed to all but the owner."""

    stop_signal = signal.SIGINT  # fast shutdown

    def __init__(self, state: Path, sockets: Path, settings: Mapping[str, str]) -> None:
        self.account = binaries.unprivileged_account()
        self.programs = binaries.within_reach(binaries.find_postgres(), self.account)
        self.sockets = sockets
        self._state = state
        super().__init__("Postgres", state / f"pg{self.programs.major}", state / "postgres.log", settings)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.sockets))}"

    def spawn(self) -> None:
        self._refuse_another_major()
        if self.account:
            os.chown(self.sockets, self.account.uid, self.account.gid)
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        self.data = self.data.resolve()
        _clear_orphans(self.data, self.data / "postmaster.pid", self.stop_signal)
        # Both name a process, and Postgres takes a zombie, or an unrelated process of that number, for a living server.
        for stale in (self.data / "postmaster.pid", *self.sockets.glob(".s.PGSQL.*")):
            stale.unlink(missing_ok=True)
        options = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        where = ["-D", str(self.data), "-k", str(self.sockets), "-h", "", "-p", "5432"]
        self._run([str(self.programs.folder / "postgres"), *where, *options], self.account)

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        with contextlib.suppress(OSError, IndexError, ValueError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return int(lines[0]) == process.pid and lines[7].strip() == "ready"
        return False

    def _refuse_another_major(self) -> None:
        for other in self._state.glob("pg[0-9]*"):
            if other.name != self.data.name and (other / "PG_VERSION").exists():
                old = other.name.removeprefix("pg")
                raise StoresError(
                    f"{other} is of Postgres {old}, found was {self.programs.major} in {self.programs.folder}: "
                    f"dump it with Postgres {old} (pg_dumpall) and restore it into a new state folder, "
                    f"or set {binaries.POSTGRES_VARIABLE} to a Postgres {old}"
                )

    def _initialise(self) -> None:
        """Under another name first: a half-made data folder must never look like a whole one."""
        home = self._state
        if not binaries.reachable(home, self.account):
            home = binaries.LASTING / self.sockets.name
            binaries.own_folder(home, mode=0o711, account=None)
        draft, final = home / f".{self.data.name}.new", home / self.data.name
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        if self.account:
            os.chown(draft, self.account.uid, self.account.gid)
        program = [str(self.programs.folder / "initdb"), "-D", str(draft), "-U", "postgres", "--auth=trust"]
        made = subprocess.run(
            launch.command(
                [*program, "--encoding=UTF8", "--locale=C", "--no-sync"],
                last_signal=signal.SIGKILL,
                account=self.account,
            ),
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            raise StoresError(f"initdb failed in {home}: {' '.join(made.stderr.split())[-400:]}")
        draft.rename(final)
        if home != self._state:
            self.data.unlink(missing_ok=True)
            self.data.symlink_to(final)


class Redis(Server):
    """Valkey or Redis: everything in the append-only file, nothing evicted."""

    def __init__(self, state: Path, sockets: Path, settings: Mapping[str, str]) -> None:
        self.program = binaries.find_redis()
        self.socket = sockets / "redis.sock"
        super().__init__(self.program.name, state / "redis", state / "redis.log", settings)

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    def spawn(self) -> None:
        self.data.mkdir(mode=0o700, exist_ok=True)
        self.data = self.data.resolve()
        _clear_orphans(self.data, self.data / "pid", self.stop_signal)
        self.socket.unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "pidfile": str(self.data / "pid"),
            "set-proc-title": "no",  # an orphan is recognised by its command line
            **self.settings,
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._run([str(self.program), *options], None)

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")  # -LOADING while the append-only file is read
        return False

    def _last_words(self) -> str:
        return f"{super()._last_words()}; {self.data} may be deleted: Postgres holds the truth"


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def _clear_orphans(data: Path, pidfile: Path, gently: signal.Signals) -> None:
    """Stops what a dead owner left running on a data folder."""
    for how in (gently, signal.SIGQUIT, signal.SIGKILL):
        left = _servers_on(data, pidfile)
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGCONT)
            _send(pid, how)
        deadline = time.monotonic() + STOP_SECONDS / 2
        while _servers_on(data, pidfile) and time.monotonic() < deadline:
            time.sleep(0.02)
    if _servers_on(data, pidfile):
        raise StoresError(f"processes {_servers_on(data, pidfile)} on {data} cannot be stopped: stop them yourself")


def _servers_on(data: Path, pidfile: Path) -> list[int]:
    if not Path("/proc/self/cwd").exists():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(pidfile.read_text().splitlines()[0])
            shown = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
            return [pid] if str(data) in shown.stdout else []
        return []
    # All servers work in their data folder (so may a shell). Postgres' children outlive a killed postmaster for a while.
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (process / "comm").read_text()
            if ("postgres" in name or "redis" in name or "valkey" in name) and (process / "cwd").readlink() == data:
                found.append(int(process.name))
    return found


def _children(pid: int) -> list[int]:
    shown = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        return [int(child) for child in shown.read_text().split()]
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    rows = (line.split() for line in listing.splitlines())
    return [int(child) for child, parent in rows if int(parent) == pid]
