"""A database from a dump, as docs/operations.md restores it: history goes on from the dump, and nothing of what was undone is seen."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pytest
from processes import ProductProcesses
from store_servers import Databases
from whole_path import System, attempt_is_under_way, system

from agentrun.dev import binaries
from agentrun.domain.reducer import Transcript

pytestmark = pytest.mark.processes

LONG = "[[slow ms=10]] [[deltas n=500]] go on"
"""More events than an attempt reserves numbers for, so that what is done again meets numbers of the history that was undone."""


@pytest.fixture
async def empty_again(databases: Databases) -> AsyncIterator[str]:
    async with databases.empty() as url:
        yield url


def run_tool(name: str, *arguments: str) -> None:
    programs = binaries.within_reach(binaries.find_postgres(), binaries.unprivileged_account())
    subprocess.run([str(programs.folder / name), *arguments], check=True, capture_output=True, text=True, timeout=120)


def with_number(redis_url: str, number: int) -> str:
    parts = urlsplit(redis_url)
    return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), "db": str(number)})))


async def start(whole: System) -> None:
    await asyncio.gather(whole.gateway(), whole.scheduler(), whole.worker())


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(1, id="another database of Redis"),
        pytest.param(
            0,
            id="the old one",
            marks=pytest.mark.xfail(strict=True, reason="readers get what was undone: hence the step of docs/operations.md"),
        ),
    ],
)
async def test_a_restored_database_goes_on_from_the_dump(
    number: int, database_url: str, empty_again: str, redis_url: str, tmp_path: Path
) -> None:
    dump = tmp_path / "agent.dump"
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    async with system(database_url, redis_url, ProductProcesses(folders[0]), folders[0]) as before:
        await start(before)
        first = await before.submit("remember me", session="first")
        await before.follow(first)
        run = await before.submit(LONG, session="cut")
        await attempt_is_under_way(before, run, events=20)
        run_tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={database_url}")
        assert (await before.follow(run)).transcript.end == "completed"
        undone = await before.submit("never happened", session="first")
        await before.follow(undone)

    run_tool("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={empty_again}", str(dump))

    async with system(empty_again, with_number(redis_url, number), ProductProcesses(folders[1]), folders[1]) as after:
        await start(after)
        seen = await after.follow(run)
        rows = await after.pool.fetch("SELECT seq, kind, data::text AS data FROM messages WHERE run_id = $1 ORDER BY seq", run)
        stored = Transcript()
        for row in rows:
            stored.feed(row["seq"], row["kind"], json.loads(row["data"]))
        assert (seen.seqs, seen.kinds) == ([row["seq"] for row in rows], [row["kind"] for row in rows])
        assert (seen.transcript.end, seen.transcript.text) == ("completed", stored.text)
        assert await after.status(run) == "succeeded"
        assert (await after.get(f"/v1/runs/{undone}")).status_code == 404
        following = await after.submit("who am I?", session="first")
        await after.follow(following)
        said = [message["content"] for message in after.provider.requests[-1]["messages"] if message["role"] == "user"]
        assert said == ["remember me", "who am I?"]
        assert await after.has_no_holes()
