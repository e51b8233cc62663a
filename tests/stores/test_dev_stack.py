"""`agentrun dev` as a person uses it: it answers, leaves nothing behind, and a killed one is continued by the next start."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from processes import clean_environment
from store_servers import choose_programs, short_folder
from waiting import eventually

LEASE_SECONDS = 2
MARK = "AGENTRUN_TEST_MARK"
MANIFEST = f"""
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {{name: demo}}
spec:
  agent:
    model: MODEL
    modelSettings: SETTINGS
  workers: {{leaseSeconds: {LEASE_SECONDS}, drainSeconds: 1}}
  reaper: {{idleSeconds: {LEASE_SECONDS}}}
"""


class Dev:
    """Starts of `agentrun dev` on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.starts: list[subprocess.Popen[bytes]] = []

    def start(
        self, *, model: str = "demo:chat", settings: str = "{}", arguments: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        manifest = self.folder / "agentrun.yaml"
        manifest.write_text(MANIFEST.replace("MODEL", model).replace("SETTINGS", settings))
        command = [
            sys.executable,
            "-m",
            "agentrun",
            "dev",
            "-f",
            str(manifest),
            "--state",
            str(self.folder / "state"),
            *arguments,
        ]
        stores = {name: value for name, value in os.environ.items() if name in ("AGENTRUN_POSTGRES_BIN", "AGENTRUN_REDIS_SERVER")}
        environment = {**clean_environment(), **stores, MARK: self.mark}
        with (self.folder / f"out-{len(self.starts)}").open("wb") as out:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.starts.append(started)
        return started

    def output(self, start: int = -1) -> str:
        number = start % len(self.starts)
        return (self.folder / f"out-{number}").read_text(errors="replace")

    def left(self) -> list[int]:
        """Living processes that this test started, directly or not."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                zombie = (entry / "stat").read_text().rsplit(") ", 1)[1][0] == "Z"
            except (OSError, IndexError):
                continue
            if marked and not zombie:
                found.append(int(entry.name))
        return found

    async def ended(self, within: float = 60) -> int:
        process = self.starts[-1]
        await eventually(lambda: process.poll() is not None, within=within, what=f"agentrun dev ends; so far:\n{self.output()}")
        assert process.returncode is not None
        return process.returncode


@pytest.fixture
def dev(store_programs: None) -> Iterator[Dev]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc to see which processes are left")
    choose_programs()
    with short_folder() as folder:
        made = Dev(folder)
        yield made
        for pid in made.left():
            os.kill(pid, signal.SIGKILL)
        for process in made.starts:
            process.wait()


async def test_it_answers_says_what_it_cost_and_leaves_nothing_behind(dev: Dev) -> None:
    dev.start(arguments=("--port", "0", "--message", "Hello there"))
    assert await dev.ended() == 0, dev.output()
    output = dev.output()
    assert 'You said: "Hello there"' in output
    assert re.search(r"tokens +\d+ in, \d+ out, 1 model call", output)
    assert re.search(r"cost +\$0\.\d+ \(a pretend price", output)
    assert re.search(r"run +[0-9a-f-]{36}", output)
    assert re.search(r"events +http://127\.0\.0\.1:\d+/v1/runs/", output)
    assert dev.left() == []

    dev.start(arguments=("--port", "0"))
    assert await dev.ended() == 0, dev.output()
    assert "You said" in dev.output()
    assert dev.left() == []


async def test_after_a_kill_of_everything_in_mid_answer_the_next_start_finishes_the_run(dev: Dev) -> None:
    dev.start(model="demo:slow", settings="{words: 60, delay_ms: 60}", arguments=("--port", "0", "--message", "go on"))
    await eventually(lambda: len(answer(dev)) > 60, within=60, what="the answer is under way")
    for pid in dev.left():
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: dev.left() == [], within=10, what="everything is dead")
    first = answer(dev)

    dev.start(model="demo:slow", settings="{words: 60, delay_ms: 10}", arguments=("--port", "0", "--message", "and this"))
    await eventually(lambda: "workers" in dev.output(), within=30, what="the stack is up again")
    what = f"the run of the first start is finished\n{dev.output()}"
    line = await eventually(
        lambda: re.search(r"run [0-9a-f-]+ of an earlier start: (\w+)", dev.output()), within=LEASE_SECONDS + 10, what=what
    )
    assert line[1] == "completed"
    assert await dev.ended() == 0
    assert first and dev.left() == []


async def test_a_kill_of_the_parent_alone_leaves_nothing_behind(dev: Dev) -> None:
    started = dev.start(model="demo:slow", settings="{words: 200, delay_ms: 60}", arguments=("--port", "0", "--message", "go on"))
    await eventually(lambda: len(answer(dev)) > 60, within=60, what="the answer is under way")
    started.kill()
    await eventually(lambda: dev.left() == [], within=20, what="stores and workers have ended too")


async def test_sigterm_in_mid_answer_ends_in_order(dev: Dev) -> None:
    started = dev.start(model="demo:slow", settings="{words: 200, delay_ms: 60}", arguments=("--port", "0", "--message", "go on"))
    await eventually(lambda: len(answer(dev)) > 60, within=60, what="the answer is under way")
    started.terminate()
    assert await dev.ended() == 0
    assert "data stays in" in dev.output()
    assert dev.left() == []


async def test_an_agent_that_cannot_be_loaded_is_told_in_one_line_and_nothing_waits_for_it(dev: Dev) -> None:
    dev.start(model="demo:nothing-like-it", arguments=("--port", "0"))
    code = await dev.ended()
    output = dev.output()
    assert code == 2, output
    assert re.fullmatch(
        r"agentrun: .*agentrun\.yaml: spec\.agent\.model: there is no demo:nothing-like-it; .+", output.splitlines()[-1]
    )
    assert dev.left() == []


async def test_a_wrong_manifest_is_one_line_and_starts_nothing(dev: Dev) -> None:
    dev.start(settings="{}\n  workerz: {}", arguments=("--port", "0"))
    assert await dev.ended() == 2
    output = dev.output()
    assert output.count("\n") == 1 and "agentrun.yaml: spec.workerz: unknown field; did you mean workers?" in output
    assert not (dev.folder / "state").exists()


def answer(dev: Dev) -> str:
    """What the agent has said so far."""
    return dev.output().partition("agent  ")[2]
