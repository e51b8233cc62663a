"""CronTasks of `agentrun dev`: their rows over several starts, and a whole start that fires one."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from processes import clean_environment
from waiting import eventually

from agentrun.dev.schedules import load, write
from agentrun.manifests import CronTask
from agentrun.store import cron_tasks, migrations
from agentrun.store.cron_tasks import Stored
from agentrun.store.pool import Pool, create_pool

pytestmark = pytest.mark.processes

RUN = """apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: support}
spec: {agent: {model: "demo:chat"}, workers: {drainSeconds: 1}}
"""
TASK = """apiVersion: agentrun.dev/v1alpha1
kind: CronTask
metadata: {name: often}
spec: {agentRunRef: {name: support}, schedule: "* * * * *", input: "say {{task}}"}
"""


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 2)
    yield made
    await made.close()


def task(folder: Path, text: str = TASK) -> CronTask:
    run, cron = folder / "agentrun.yaml", folder / "crontask.yaml"
    run.write_text(RUN)
    cron.write_text(text)
    return load([run, cron]).cron_tasks[0]


async def row(pool: Pool) -> Stored:
    (found,) = await cron_tasks.all_of(pool)
    return found


async def test_over_several_starts_only_a_change_is_a_new_generation(pool: Pool, database_url: str, tmp_path: Path) -> None:
    await write(database_url, [task(tmp_path)])
    first = await row(pool)
    await write(database_url, [task(tmp_path)])
    assert await row(pool) == first
    await write(database_url, [task(tmp_path, TASK.replace("* * * * *", "0 9 * * *"))])
    edited = await row(pool)
    assert (edited.schedule.uid, edited.schedule.generation) == (first.schedule.uid, 2)
    assert edited.schedule.slots_from > first.schedule.slots_from
    await write(database_url, [])
    assert (await row(pool)).deleted_at is not None
    await write(database_url, [task(tmp_path, TASK.replace("* * * * *", "0 9 * * *"))])
    again = await row(pool)
    assert (again.schedule.generation, again.deleted_at) == (3, None)
    assert again.schedule.slots_from > edited.schedule.slots_from, "what passed while it was gone is not missed"


async def test_a_start_fires_what_is_due_and_a_worker_answers(
    pool: Pool, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    await migrations.migrate(database_url, owner="dev/support", say=lambda _: None)
    await write(database_url, [task(tmp_path)])
    await pool.execute("UPDATE cron_tasks SET slots_from = $1", (await row(pool)).schedule.slots_from - timedelta(minutes=2))
    command = [sys.executable, "-m", "agentrun", "dev", "--serve", "--port", "0", "--state", str(tmp_path / "state")]
    for name in ("agentrun.yaml", "crontask.yaml"):
        command += ["-f", str(tmp_path / name)]
    environment = {**clean_environment(), "DATABASE_URL": database_url, "REDIS_URL": redis_url}
    with (tmp_path / "out").open("wb") as out:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        query = "SELECT result::text FROM runs WHERE status = 'succeeded' AND user_id = 'cron:often' ORDER BY slot LIMIT 1"
        answer = await eventually(lambda: pool.fetchval(query), within=90, what="a scheduled run has succeeded")
        assert "say often" in answer
        assert "often: next 2" in (tmp_path / "out").read_text()
    finally:
        os.killpg(started.pid, signal.SIGINT)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
