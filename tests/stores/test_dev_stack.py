"""`agentrun dev` as a person uses it: it answers, leaves nothing behind, and a killed one is continued by the next start."""

import asyncio
import csv
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import asyncpg
import httpx2
import pytest
from commands import command
from processes import clean_environment
from store_servers import choose_programs, short_folder
from waiting import eventually

from agentrun.dev.stores import Stores

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
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
  workers: {{leaseSeconds: {LEASE_SECONDS}, drainSeconds: DRAIN}}
  reaper: {{idleSeconds: {LEASE_SECONDS}}}
"""


class Dev:
    """Starts of `agentrun dev` on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.starts: list[subprocess.Popen[bytes]] = []

    def start(
        self, *, model: str = "demo:chat", settings: str = "{}", drain: int = 1, arguments: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """On a manifest of ours."""
        manifest = self.folder / "agentrun.yaml"
        manifest.write_text(MANIFEST.replace("MODEL", model).replace("SETTINGS", settings).replace("DRAIN", str(drain)))
        return self.start_on(manifest, "--state", str(self.folder / "state"), *arguments)

    def start_on(self, manifest: Path, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentrun", "dev", "-f", str(manifest), *arguments]
        stores = {name: value for name, value in os.environ.items() if name in ("AGENTRUN_POSTGRES_BIN", "AGENTRUN_REDIS_SERVER")}
        environment = {**clean_environment(), **stores, MARK: self.mark}
        with (self.folder / f"out-{len(self.starts)}").open("wb") as out:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
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
    assert re.search(r"tokens +\d+ in, \d+ out, 1 model call\n", output)
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
    await eventually(lambda: re.search("worker +ready", dev.output()), within=60, what="the stack is up again")
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
    assert "you  " not in output
    assert await stored_runs(dev) == 0
    assert dev.left() == []


@pytest.mark.slow
async def test_the_examples_run_one_after_the_other_from_one_folder(dev: Dev) -> None:
    said = {"minimal": "You said", "tools": "price_of said tea costs 4.20 euros", "own": "2… 1… lift-off!"}
    for name, answered in said.items():
        dev.start_on(EXAMPLES / name / "agentrun.yaml", "--port", "0", "--message", "2 cups of tea")
        assert await dev.ended() == 0, dev.output()
        assert answered in dev.output()
    names = {"dev-minimal", "dev-shop", "dev-countdown"}
    assert {state.name for state in (dev.folder / ".agentrun").iterdir()} == names

    dev.start_on(EXAMPLES / "own" / "agentrun.yaml", "--port", "0", "--state", str(dev.folder / ".agentrun" / "dev-shop"))
    assert await dev.ended() == 2
    assert re.fullmatch(
        r"agentrun: .*/dev-shop: this database belongs to the AgentRun dev/shop; give dev/countdown a database of its own, "
        r"which is another folder named with --state",
        dev.output().splitlines()[-1],
    )
    assert dev.left() == []


async def test_it_serves_without_a_message_until_it_is_stopped(dev: Dev) -> None:
    started = dev.start(arguments=("--port", "0", "--serve"))
    told = await eventually(lambda: re.search(r"URL=(\S+) KEY=(\S+)", dev.output()), within=60, what="it serves")
    async with httpx2.AsyncClient(base_url=told[1], headers={"Authorization": f"Bearer {told[2]}"}, trust_env=False) as client:
        assert (await client.get("/v1/runs")).json()["runs"] == []
        sent = await client.post("/v1/sessions/s/messages", json={"input": "hi"}, headers={"Idempotency-Key": "1"})
        events = await client.get(f"/v1/runs/{sent.json()['run_id']}/events", timeout=30)
    assert '"completed"' in events.text
    started.terminate()
    assert await dev.ended() == 0, dev.output()
    assert "you  " not in dev.output()
    assert dev.left() == []


async def test_what_the_demo_has_spent_is_the_same_by_command_csv_and_api(dev: Dev) -> None:
    """Of `make demo`, as the README and docs/costs.md have it: its example, its key, a second terminal."""
    started = dev.start_on(EXAMPLES / "minimal" / "agentrun.yaml", "--port", "0", "--serve")
    told = await eventually(lambda: re.search(r"URL=(\S+) KEY=(\S+)", dev.output()), within=60, what="it serves")
    url, key = told[1], (dev.folder / ".agentrun/dev-minimal/dev-key").read_text().strip()
    shown = []
    async with httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client:
        for session, text in enumerate(("hi", "how are you?", "2 cups of tea")):
            sent = await client.post(f"/v1/sessions/s{session}/messages", json={"input": text})
            await client.get(f"/v1/runs/{sent.json()['run_id']}/events", timeout=30)
            shown.append((await client.get(f"/v1/runs/{sent.json()['run_id']}")).json()["usage"])
        report = (await client.get("/v1/usage?group_by=day,model")).json()
    code, table, said = await command(url, key, "usage", "--group-by", "day,model")
    assert code == 0, said
    _, text, _ = await command(url, key, "usage", "--group-by", "day,model", "--csv")
    started.terminate()
    assert await dev.ended() == 0, dev.output()

    assert report["total"]["calls"] == 3 and report["total"]["input_tokens"] == sum(one["input_tokens"] for one in shown)
    assert Decimal(report["total"]["cost_usd"]) == sum(Decimal(one["cost_usd"]) for one in shown) > 0
    columns = (
        "day",
        "model",
        "calls",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "cost_usd",
        "unpriced",
        "unmeasured",
        "lost_usd",
    )
    groups = [[str(one[name]) for name in columns] for one in report["groups"]]
    assert [[row[name] for name in columns] for row in csv.DictReader(io.StringIO(text))] == groups
    assert [line.split() for line in table.splitlines()[1:-1]] == groups
    assert table.splitlines()[-1].split() == ["total", *(str(report["total"][name]) for name in columns[2:])]


async def test_the_end_of_a_store_ends_everything_at_once_and_says_why(dev: Dev) -> None:
    arguments = ("--port", "0", "--message", "go on")
    dev.start(model="demo:slow", settings="{words: 900, delay_ms: 60}", drain=300, arguments=arguments)
    await eventually(lambda: len(answer(dev)) > 60, within=60, what="the answer is under way")
    (pid_file,) = (dev.folder / "state").glob("pg*/postmaster.pid")
    os.kill(int(pid_file.read_text().splitlines()[0]), signal.SIGKILL)
    assert await dev.ended(within=60) == 2, dev.output()
    assert dev.output().splitlines()[-1].startswith("agentrun: the stores have ended: Postgres ended with -9 on ")
    assert dev.left() == []


@pytest.mark.slow
async def test_the_end_of_the_stores_keeper_is_told_too(dev: Dev) -> None:
    arguments = ("--port", "0", "--serve")
    dev.start(arguments=arguments)
    await eventually(lambda: "Serving" in dev.output(), within=60, what="it serves")
    os.kill(int((dev.folder / "state" / "lock").read_text()), signal.SIGKILL)
    assert await dev.ended(within=60) == 2, dev.output()
    assert dev.output().splitlines()[-1] == "agentrun: the stores have ended: their keeper ended with -9 and said nothing"
    await eventually(lambda: dev.left() == [], within=20, what="the stores have ended with their keeper")


@pytest.mark.slow
async def test_a_second_ctrl_c_ends_everything_at_once(dev: Dev) -> None:
    arguments = ("--port", "0", "--message", "go on")
    started = dev.start(model="demo:slow", settings="{words: 900, delay_ms: 60}", drain=300, arguments=arguments)
    await eventually(lambda: len(answer(dev)) > 60, within=60, what="the answer is under way")
    started.send_signal(signal.SIGINT)
    said = "up to 300 s for workers to finish or hand back; Ctrl-C again to stop at once"
    await eventually(lambda: said in dev.output(), within=10, what="it says how to stop at once")
    await asyncio.sleep(0.5)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    assert await dev.ended(within=30) == 130
    assert "data stays in" in dev.output()
    assert dev.left() == []


async def test_a_port_that_is_taken_is_told_before_anything_starts(dev: Dev) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        dev.start(arguments=("--port", str(port)))
        assert await dev.ended() == 2
    assert dev.output().startswith(f"agentrun: --port: cannot listen on 127.0.0.1:{port} ")
    assert not (dev.folder / "state").exists()


async def test_a_wrong_manifest_is_one_line_and_starts_nothing(dev: Dev) -> None:
    dev.start(settings="{}\n  workerz: {}", arguments=("--port", "0"))
    assert await dev.ended() == 2
    output = dev.output()
    assert output.count("\n") == 1 and "agentrun.yaml: spec.workerz: unknown field; did you mean workers?" in output
    assert not (dev.folder / "state").exists()


async def stored_runs(dev: Dev) -> int:
    """How many runs the state folder holds; nothing else may run on it."""
    stores = Stores(dev.folder / "state")
    urls = await asyncio.to_thread(stores.start)
    try:
        connection = await asyncpg.connect(urls.database_url)
        try:
            return int(await connection.fetchval("SELECT count(*) FROM runs"))
        finally:
            await connection.close()
    finally:
        await asyncio.to_thread(stores.stop)


def answer(dev: Dev) -> str:
    """What the agent has said so far."""
    return dev.output().partition("agent  ")[2]
