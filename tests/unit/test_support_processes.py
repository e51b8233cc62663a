"""Waiting and process handling of the tests themselves."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from processes import ProductProcess, ProductProcesses, clean_environment, free_port, parse_metrics
from waiting import eventually

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'# TYPE runs counter\\nruns_total{status="failed"} 2\\nruns_total{status="ok"} 3\\n')
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ProductProcesses]:
    made = ProductProcesses(tmp_path)
    yield made
    made.close()


def started(processes: ProductProcesses, folder: Path, code: str) -> ProductProcess:
    port = free_port()
    command = [sys.executable, "-c", code, str(port)]
    process = ProductProcess("process", command, clean_environment(), port, folder / "process.log")
    processes.started.append(process)
    return process


async def test_a_process_is_ready_answers_stops_and_ends(processes: ProductProcesses, tmp_path: Path) -> None:
    process = started(processes, tmp_path, SERVER)
    await process.ready()
    metrics = await process.metrics()
    assert metrics['runs_total{status="failed"}'] == 2
    assert (metrics.total("runs_total"), metrics.total("runs_total", status="ok")) == (5, 3)
    process.stop()
    with pytest.raises(httpx2.TimeoutException):
        await process.get("/metrics", timeout=0.2)
    process.cont()
    await process.metrics()
    assert await process.terminate() == -signal.SIGTERM
    assert "listening" in process.log_tail()


async def test_a_process_that_ends_is_not_waited_for(processes: ProductProcesses, tmp_path: Path) -> None:
    process = started(processes, tmp_path, "raise SystemExit('wrong setting')")
    with pytest.raises(AssertionError, match=r"ended with 1:\nwrong setting"):
        await process.ready(within=20)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux only")
async def test_a_process_dies_with_its_parent() -> None:
    code = (
        "import subprocess, sys\n"
        "from agentrun.dev import launch\n"
        "child = subprocess.Popen(launch.command([sys.executable, '-c', 'import time; time.sleep(99)'], last_signal=9))\n"
        "print(child.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()

    def gone() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rsplit(") ", 1)[1][0] == "Z"
        except OSError:
            return True

    await eventually(gone, within=10, what="the child ends")


def test_metrics_are_read_with_labels_in_alphabetical_order() -> None:
    assert parse_metrics('# TYPE a gauge\na{z="1",b="2"} 4\n') == {'a{b="2",z="1"}': 4.0}


def test_the_environment_of_processes_holds_nothing_that_steers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTRUN_X", "PGHOST", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(name, "x")
    assert not {"AGENTRUN_X", "PGHOST", "DATABASE_URL", "REDIS_URL"} & set(clean_environment())
    assert clean_environment()["PATH"] == os.environ["PATH"]


async def test_waiting_returns_the_first_true_value() -> None:
    values = iter([0, None, 7])
    assert await eventually(lambda: next(values), within=5, what="seven") == 7


async def test_waiting_takes_coroutines_and_forgives_exceptions() -> None:
    answers = iter([KeyError("not yet"), None])

    async def condition() -> str:
        error = next(answers)
        if error:
            raise error
        return "there"

    assert await eventually(condition, within=5, what="it") == "there"


@pytest.mark.parametrize(
    ("condition", "told"),
    [(lambda: 0, "last value: 0"), (lambda: 1 / 0, "ZeroDivisionError"), (lambda: asyncio.sleep(99), "no answer")],
)
async def test_waiting_fails_with_what_and_the_last_answer(condition: Callable[[], object], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"not within 0\.1 s: the thing; .*{told}"):
        await eventually(condition, within=0.1, what="the thing")
