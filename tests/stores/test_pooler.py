"""Behind a PgBouncer in transaction mode, set up as docs/operations.md says, nothing of the data plane misses its session."""

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from processes import ProductProcesses
from run_factory import claimed, event, ledger_row, submission
from store_servers import short_folder
from waiting import eventually
from whole_path import system

from agentrun.domain.events import Kind
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import follow_ups, messages, runs, transitions
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish, Flush, Reason, TakeOver

SERVER_CONNECTIONS, CLIENTS, CALLS = 4, 20, 2_000
OLDEST = (1, 21)
PGBOUNCER = shutil.which(os.environ.get("AGENTRUN_TEST_PGBOUNCER", "pgbouncer"), path=f"{os.environ.get('PATH', '')}:/usr/sbin")

CONFIG = """
[databases]
* = host={sockets} port={port} user={user}
[pgbouncer]
unix_socket_dir = {folder}
listen_addr =
listen_port = 6432
auth_type = any
pool_mode = transaction
max_prepared_statements = 200
default_pool_size = {size}
max_client_conn = 300
{more}
"""


def why_not() -> str | None:
    if PGBOUNCER is None:
        return "no pgbouncer here; AGENTRUN_TEST_PGBOUNCER may name one"
    told = subprocess.run([PGBOUNCER, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"PgBouncer (\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        return f"{PGBOUNCER} is older than 1.21, which knows no prepared statements: {told.partition(chr(10))[0]}"
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class Pooler:
    """`url` leads through it."""

    def __init__(self, folder: Path, database_url: str) -> None:
        parts = urlsplit(database_url)
        self._log = folder / "log"
        self.url = parts._replace(query=f"host={folder}&port=6432").geturl()

    def errors(self) -> list[str]:
        """What it or Postgres has refused."""
        return [line for line in self._log.read_text().splitlines() if " ERROR " in line or "WARNING" in line]


@contextlib.asynccontextmanager
async def pgbouncer(database_url: str, more: str = "") -> AsyncIterator[Pooler]:
    assert PGBOUNCER is not None
    parts = urlsplit(database_url)
    where = parse_qs(parts.query)
    with short_folder() as folder:
        text = CONFIG.format(
            folder=folder,
            sockets=where["host"][0],
            port=where.get("port", ["5432"])[0],
            user=parts.username or "postgres",
            size=SERVER_CONNECTIONS,
            more=more,
        )
        (folder / "ini").write_text(text)
        folder.chmod(0o777)
        owner = Path(where["host"][0]).stat().st_uid  # whoever may enter the folder of Postgres' socket; never root
        user = pwd.getpwuid(owner).pw_name if os.geteuid() == 0 else None
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([PGBOUNCER, str(folder / "ini")], stdout=log, stderr=log, user=user)
        pooler = Pooler(folder, database_url)
        try:

            async def answers() -> bool:
                connection = await asyncpg.connect(pooler.url)
                await connection.close()
                return True

            await eventually(answers, within=10, what="PgBouncer answers")
            yield pooler
        finally:
            process.kill()
            process.wait()


async def mixed_calls(pool: Pool, client: int) -> int:
    """A run from its submission to its end, over and over; how many calls that were."""
    calls = 0
    for number in range(CALLS // CLIENTS // 10):
        item = submission(session=f"{client}-{number}", client_key=f"{client}-{number}")
        first, again = [(await follow_ups.submit(pool, [item], Policy.MERGE, None))[0] for _ in range(2)]
        assert isinstance(first, transitions.Submitted) and isinstance(again, transitions.Submitted)
        run = first.run_id
        assert again.run_id == run
        claim = await claimed(pool, run)  # two calls: it looks first
        assert await transitions.flush(pool, [Flush(run, claim.epoch, 200, [event(0), event(1)], [ledger_row()])])
        assert (await messages.tops(pool, [run]))[run].top == 1
        assert len(await messages.page(pool, run, after=-1, limit=10, most_bytes=10_000)) == 2
        if number % 2:
            (done,) = await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
        else:
            ends = Finish(run, claim.epoch, RunStatus.SUCCEEDED, result="{}", events=[event(2, Kind.COMPLETED, output="x")])
            (done,) = await transitions.finish(pool, [ends])
        assert done.ok
        assert len(await messages.after(pool, run, after=-1)) >= 3
        assert await runs.due_heads(pool) is not None
        calls += 10
    return calls


async def test_pg_01_two_thousand_mixed_calls_of_twenty_clients_share_four_connections(database_url: str) -> None:
    async with pgbouncer(database_url) as pooler, contextlib.AsyncExitStack() as stack:
        pools = [await create_pool(pooler.url, 1) for _ in range(CLIENTS)]
        for pool in pools:
            stack.push_async_callback(pool.close)
        direct = await asyncpg.connect(database_url)
        stack.push_async_callback(direct.close)
        done = await asyncio.gather(*(mixed_calls(pool, client) for client, pool in enumerate(pools)))
        assert sum(done) == CALLS
        assert pooler.errors() == []
        open_ones = await direct.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert 1 <= open_ones <= SERVER_CONNECTIONS
        left = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert await direct.fetchval(left) == 0, "what holds a lock for its session would hold it for somebody else's"
        assert await direct.fetchval("SELECT count(*) FROM runs WHERE status IN ('succeeded', 'cancelled')") == CALLS // 10


async def test_pg_01_the_whole_data_plane_works_behind_it(
    database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    """Gateways, workers with their leases, and the scheduler, through which a killed worker's run goes on."""
    async with pgbouncer(database_url) as pooler, system(pooler.url, redis_url, product_processes, tmp_path) as whole:
        _, _, workers, _ = await asyncio.gather(
            whole.gateway(), whole.gateway(), asyncio.gather(whole.worker(), whole.worker()), whole.scheduler()
        )
        long = await whole.submit("[[slow ms=30]] [[deltas n=100]]", session="long")
        following = asyncio.create_task(whole.follow(long))

        async def under_way() -> bool:
            return await whole.stored(long, kinds=("text_delta",)) > 2

        await eventually(under_way, within=20, what="the long run is under way")
        (await whole.worker_of(long, list(workers))).kill()
        many = [await whole.submit(f"m{number}", session=f"s{number}") for number in range(40)]

        async def all_done() -> bool:
            return {await whole.status(one) for one in (*many, long)} == {"succeeded"}

        await eventually(all_done, within=60, what="all runs are done")
        seen = await following
        assert seen.transcript.text == await whole.log_text(long)
        assert await whole.outcomes(long) == ["lost", "finished"]
        assert whole.provider.counts["calls"] == 42
        assert pooler.errors() == []
        assert not [process.name for process in product_processes.started if "prepared statement" in process.log.read_text()]


async def test_pg_01_without_prepared_statements_it_is_said(database_url: str) -> None:
    """What the page warns of: so that it says when the setting is not needed any more."""
    async with pgbouncer(database_url, "max_prepared_statements = 0") as pooler:
        pools = [await create_pool(pooler.url, 1) for _ in range(CLIENTS)]
        found = await asyncio.gather(*(mixed_calls(pool, client) for client, pool in enumerate(pools)), return_exceptions=True)
        for pool in pools:
            pool.terminate()
        assert any("prepared statement" in str(one) for one in found)
