"""Worker processes on this machine: as many as are wanted. What a Deployment is in a cluster."""

import asyncio
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
REFUSED = 2
"""The exit code of a process that cannot run as it is set up."""
STABLE_SECONDS = 10.0
"""A worker that lived for so long was not a failed start: the pause before its successor begins anew."""


class Workers:
    """Starts, stops and replaces worker processes. `environment` is theirs; their output goes to `log`."""

    def __init__(self, environment: Mapping[str, str], log: Path, *, grace_seconds: float) -> None:
        self.name = f"dev-{secrets.token_hex(3)}"
        """What the names of these workers begin with, and no others."""
        self.log = log
        self.failed_starts = 0
        """How many in a row ended soon after their start, by themselves."""
        self._environment = dict(environment)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._grace_seconds = grace_seconds
        self._number = 0
        self._started: dict[subprocess.Popen[bytes], float] = {}
        self._leaving: dict[subprocess.Popen[bytes], float] = {}
        self._pause = 0.0
        self._not_before = 0.0
        self.refused = asyncio.Event()
        """Set when a worker ended because its settings or manifest cannot be used: its log says why, another try would not help."""

    @property
    def running(self) -> int:
        """How many are there and not about to leave."""
        return len(self._started)

    @property
    def pids(self) -> list[int]:
        """All of them, the leaving ones included."""
        return [process.pid for process in (*self._started, *self._leaving)]

    def last_words(self) -> str:
        """The last line that one of these workers wrote."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return lines[-1].removeprefix("agentrun: ") if lines else "a worker ended without a word"

    def scale(self, wanted: int) -> None:
        """One step towards `wanted`: forgets the dead, kills those past their grace period, starts or stops the difference."""
        self._look_after()
        while len(self._started) > wanted:
            process = next(reversed(self._started))  # the youngest, as a cluster does
            del self._started[process]
            process.send_signal(signal.SIGTERM)
            self._leaving[process] = time.monotonic()
        while len(self._started) < wanted and time.monotonic() >= self._not_before:
            self._start()

    async def stop(self, *, at_once: asyncio.Event) -> None:
        """Asks all to end, waits for their grace period or until `at_once` is set, kills the rest."""
        self.scale(0)
        while self._leaving:
            if at_once.is_set():
                self._grace_seconds = 0
                self._look_after()
            await asyncio.sleep(0.05)
            self._look_after()

    def _start(self) -> None:
        self._number += 1
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrun.dev.child", "worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self._environment, "AGENTRUN_POD_NAME": f"{self.name}-{self._number}"},
                start_new_session=True,  # Ctrl-C is for us: we let them drain
            )
        self._started[process] = time.monotonic()

    def _look_after(self) -> None:
        now = time.monotonic()
        for process, since in list(self._started.items()):
            code = process.poll()
            if code is not None:
                del self._started[process]
                self._bury(process)
                stable = now - since > STABLE_SECONDS
                self.failed_starts = 0 if stable else self.failed_starts + 1
                self._pause = (
                    FIRST_PAUSE_SECONDS if stable else min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
                )
                self._not_before = now + self._pause
                if code == REFUSED:
                    self.refused.set()
                _log.warning("a worker ended by itself", exit_code=code, log=str(self.log))
        for process, since in list(self._leaving.items()):
            if process.poll() is not None:
                del self._leaving[process]
                self._bury(process)
            elif now - since > self._grace_seconds:
                process.kill()

    @staticmethod
    def _bury(process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
