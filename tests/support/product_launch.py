"""Two ways to start a process of the product.

Spawned: a new interpreter, as users start it. Forked: from a server process that has imported the product once; importing costs
one to two seconds of a core each time, and the tests start hundreds of processes. It runs the same `agentrun.cli.main`.
AGENTRUN_TEST_FORK=0 spawns all of them.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from agentrun.dev import launch

FORKS = sys.platform == "linux" and os.environ.get("AGENTRUN_TEST_FORK", "1") != "0"

_PRELOADED = [
    "pytest",
    "product_launch",
    "pydantic_ai.models.openai",
    "agentrun.cli",
    "agentrun.gateway.process",
    "agentrun.scheduler.process",
    "agentrun.worker.process",
    "agentrun_operator.main",
]
_PR_SET_PDEATHSIG = 1


class Started(Protocol):
    """A process that was started either way."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, what: signal.Signals, /) -> None: ...


def spawned(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Started:
    """A program of its own."""
    with log.open("ab") as out:
        return subprocess.Popen(
            launch.command(command, last_signal=signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


class _Forked:
    """A child of the fork server, with the interface of a Popen."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, what: signal.Signals, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, what)


def forked(role: str, environment: Mapping[str, str], log: Path) -> Started:
    """`agentrun ROLE`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_become, args=(role, dict(environment), str(log)), daemon=True)
    process.start()
    return _Forked(process)


def _become(role: str, environment: dict[str, str], log: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    from agentrun import failpoints
    from agentrun.cli import main

    failpoints.configure(environment.get(failpoints.VARIABLE, ""))
    sys.argv = ["agentrun", role]
    main()
