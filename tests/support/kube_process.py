"""One server process of a test cluster, with its log."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentrun.dev import launch

STOP_SECONDS = 10.0


class ServerProcess:
    """It dies with the test process (Linux). Its log is `<folder>/<name of the program>.log`, and goes on over restarts."""

    def __init__(self, program: str, folder: Path) -> None:
        self.name = Path(program).name
        self.log = folder / f"{self.name}.log"
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, arguments: Sequence[str]) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command([self._program, *arguments], last_signal=signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    @property
    def stopped(self) -> bool:
        """Whether all of its threads stand still. After a SIGSTOP those on other cores do so only a moment later."""
        states = [_state(thread) for thread in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return bool(states) and all(state == "T" for state in states)

    def send(self, what: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(what)

    def end(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal, waits, and kills what does not end."""
        if self._process is None:
            return
        self.send(what)
        self.send(signal.SIGCONT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


def _state(stat: Path) -> str:
    """The letter for the state of a thread in /proc; nothing if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
