"""The process that holds the embedded stores: `python -m agentrun.dev.keeper STATE SETTINGS`, settings as JSON.

It lives exactly as long as the pipe on its standard input is open, so a SIGKILLed parent leaves nothing behind and
Postgres still gets its fast shutdown. It tells one line of JSON on its standard output: the URLs, or an error.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from agentrun.dev import binaries
from agentrun.dev.binaries import StoresError
from agentrun.dev.servers import Postgres, Redis, Server

_LONGEST_SOCKET = 103  # macOS takes 104 bytes with the NUL, Linux 108


def socket_folder(state: Path) -> Path:
    """A short private folder for the sockets of one state folder, the same at each start."""
    account = binaries.unprivileged_account()
    tag = hashlib.sha256(str(state).encode()).hexdigest()[:8]
    for base in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), "/tmp")):
        folder = Path(base) / f"agentrun-{os.getuid()}-{tag}"
        fits = len(str(folder / ".s.PGSQL.5432.lock")) <= _LONGEST_SOCKET
        if fits and os.access(base, os.W_OK) and binaries.reachable(Path(base), account):
            return binaries.own_folder(folder, mode=0o700, account=account)
    raise StoresError("no short writable folder for sockets: set XDG_RUNTIME_DIR")


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """One owner per state folder. Raises StoresError if there is another."""
    descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock.read().strip() or "unknown"
            raise StoresError(f"{state} is in use (process {owner}): stop the other one, or name another state folder") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _abandoned(parent: int) -> bool:
    """The parent closed the pipe or is gone (a fork of it may still hold the pipe)."""
    return bool(select.select([0], [], [], 0)[0]) or os.getppid() != parent


def _keep(state: Path, settings: dict[str, dict[str, str]], parent: int) -> int:
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(state))
        sockets = socket_folder(state)
        stack.callback(_remove, sockets)
        servers: dict[str, Server] = {}
        if not os.environ.get("DATABASE_URL"):
            servers["database_url"] = Postgres(state, sockets, settings["postgres"])
        if not os.environ.get("REDIS_URL"):
            servers["redis_url"] = Redis(state, sockets, settings["redis"])
        for server in servers.values():
            stack.callback(server.wait_stopped)
        for server in servers.values():
            stack.callback(server.request_stop)
            server.spawn()
        for server in servers.values():
            server.wait_ready(given_up=lambda: _abandoned(parent))
        _tell({name: server.url for name, server in servers.items()})
        while not select.select([0], [], [], 1.0)[0] and os.getppid() == parent:
            for server in servers.values():
                server.is_ready()  # raises once it has ended
    return 0


def _remove(sockets: Path) -> None:
    for left in sockets.iterdir():
        left.unlink()
    sockets.rmdir()


def _tell(what: dict[str, str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(what).encode() + b"\n")


def _main() -> int:
    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    parent = os.getppid()
    try:
        return _keep(Path(sys.argv[1]), json.loads(sys.argv[2]), parent)
    except (StoresError, OSError) as error:
        _tell({"error": " ".join(str(error).split())})
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_main())
