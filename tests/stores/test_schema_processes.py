"""Migrations, and what waits for them, as processes: many migrators, killed ones, and pods on a schema that is behind or ahead."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import asyncpg
import pytest
from processes import Product, ProductProcess, ProductProcesses, clean_environment
from product_launch import FORKS
from redis.asyncio import Redis
from run_factory import claimed, event, ledger_row, submission, submitted
from store_servers import Databases
from waiting import eventually, holds

from agentrun.bus.connection import connect
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.events import Kind
from agentrun.domain.keys import RANDOM_BYTES, generate, record_line
from agentrun.domain.states import RunStatus
from agentrun.store import migrations, transitions
from agentrun.store.migrations import LATEST, LOCK_KEY, LOCK_TIMEOUT_MS
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish, Flush, Reason, TakeOver

KEYS = Keys("default", "agent")
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {model: "demo:chat"}
  workers: {leaseSeconds: 2}
  reaper: {idleSeconds: 2, intervalSeconds: 1}
  streaming: {flushEvents: 1}
"""
Migrator = Callable[..., ProductProcess]
T = TypeVar("T")


@pytest.fixture
def product(tmp_path: Path, database_url: str, redis_url: str) -> Product:
    manifest = tmp_path / "agentrun.yaml"
    manifest.write_text(MANIFEST)
    _, record = generate(os.urandom(RANDOM_BYTES), user="alice", scopes=[], created=datetime.now(UTC))
    (tmp_path / "keys").write_text(record_line(record) + "\n")
    return Product(manifest, database_url, redis_url, api_keys=tmp_path / "keys")


@pytest.fixture
def migrator(tmp_path: Path, product_processes: ProductProcesses) -> Migrator:
    """Starts `agentrun migrate`."""

    def start(url: str, *options: str, failpoints: str = "") -> ProductProcess:
        number = len(product_processes.started)
        forked = FORKS and not options
        command = ["agentrun", "migrate"] if forked else [sys.executable, "-m", "agentrun", "migrate", *options]
        environment = {**clean_environment(), "DATABASE_URL": url, "AGENTRUN_NAMESPACE": "default", "AGENTRUN_NAME": "agent"}
        environment |= {"AGENTRUN_FAILPOINTS": failpoints} if failpoints else {}
        process = ProductProcess(f"migrate-{number}", command, environment, 0, tmp_path / f"migrate-{number}.log")
        product_processes.started.append(process)
        return process

    return start


async def one_behind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty database becomes what the version before leaves, with the functions of this one, also those that need its columns."""
    with monkeypatch.context() as before:
        before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:-1])
        before.setattr(migrations, "LATEST", LATEST - 1)
        before.setattr(migrations, "TRANSITIONS", f"SET LOCAL check_function_bodies = off; {migrations.TRANSITIONS}")
        await migrations.migrate(url, say=lambda _: None)


async def versions(url: str) -> list[int]:
    conn = await asyncpg.connect(url)
    try:
        return [row["version"] for row in await conn.fetch("SELECT version FROM schema_versions ORDER BY version")]
    finally:
        await conn.close()


ALL = [0, *(one.version for one in migrations.MIGRATIONS)]
"""0: the functions."""


async def test_mg_01_ten_migrator_processes_on_an_empty_database_all_end_with_0(
    empty_database_url: str, migrator: Migrator
) -> None:
    started = [migrator(empty_database_url) for _ in range(10)]
    codes = [await process.wait(within=60) for process in started]
    assert codes == [0] * 10, "\n".join(process.log_tail() for process in started)
    applied = "".join(process.log_tail() for process in started)
    assert [applied.count(one.name) for one in migrations.MIGRATIONS] == [1] * len(migrations.MIGRATIONS), applied
    assert await versions(empty_database_url) == ALL


async def test_mg_02_a_migrator_process_killed_in_mid_step_leaves_no_lock_and_no_half_step(
    empty_database_url: str, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        before.setattr(migrations, "LATEST", 1)
        before.setattr(migrations, "TRANSITIONS", "CREATE SCHEMA agentrun_1")
        await migrations.migrate(empty_database_url, say=lambda _: None)
    admin = await asyncpg.connect(empty_database_url)
    in_the_way = await asyncpg.connect(empty_database_url)
    await in_the_way.execute("BEGIN; LOCK TABLE schema_versions IN SHARE MODE")  # the second step gets as far as its record

    async def waits_in_mid_step() -> bool:
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'schema_versions'::regclass"
        return bool(await admin.fetchval(waits))

    killed = migrator(empty_database_url)
    await eventually(waits_in_mid_step, within=20, what="the migrator is in the middle of a step")
    killed.kill()

    async def lock_is_free() -> bool:
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND ((classid::bigint << 32) | objid::bigint) = $1"
        return not await admin.fetchval(held, LOCK_KEY)

    # Sooner than the statement itself would have given up: its table is still locked.
    await eventually(lock_is_free, within=LOCK_TIMEOUT_MS / 1000 - 1, what="the lock of the killed one is free at once")
    columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'cron_tasks' AND column_name = 'next_slot'"
    assert await admin.fetchval(columns) == 0, "half of the step is there"

    following = migrator(empty_database_url)
    await eventually(waits_in_mid_step, within=20, what="the next one is at the same place")
    await in_the_way.execute("COMMIT")
    assert await following.wait(within=40) == 0, following.log_tail()
    assert await versions(empty_database_url) == ALL
    await in_the_way.close()
    await admin.close()


async def test_mg_02_a_waiting_migrator_process_gives_up_with_2_and_says_why(empty_database_url: str, migrator: Migrator) -> None:
    holder = await asyncpg.connect(empty_database_url)
    await holder.execute("SELECT pg_advisory_lock($1)", LOCK_KEY)
    waiting = migrator(empty_database_url, "--wait-seconds", "1")
    assert await waiting.wait(within=30) == 2
    assert "another migration has been running for 1 s" in waiting.log_tail()
    assert "Traceback" not in waiting.log_tail()
    await holder.close()


OLD_FUNCTIONS = "CREATE SCHEMA IF NOT EXISTS agentrun_1"


async def functions(url: str) -> tuple[int, int]:
    """The schema version that pods go by, and how many functions there are."""
    conn = await asyncpg.connect(url)
    try:
        count = await conn.fetchval("SELECT count(*) FROM pg_proc WHERE pronamespace = to_regnamespace('agentrun_1')")
        return (await migrations.check(conn)).present, count
    finally:
        await conn.close()


@pytest.mark.parametrize("point", ["migrate.part.done", "migrate.step.committed"])
@pytest.mark.parametrize("behind", [1, LATEST])
async def test_mg_02_a_migrator_process_killed_at_any_step_leaves_no_version_without_its_functions(
    behind: int, point: str, migrator: Migrator, monkeypatch: pytest.MonkeyPatch, databases: Databases
) -> None:
    complete = 0
    for turn in range(1, behind + 3):
        async with databases.empty() as url:
            if behind < LATEST:
                with monkeypatch.context() as before:
                    before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:-behind])
                    before.setattr(migrations, "LATEST", LATEST - behind)
                    before.setattr(migrations, "TRANSITIONS", OLD_FUNCTIONS)
                    await migrations.migrate(url, say=lambda _: None)
            killed = migrator(url, failpoints=f"{point}=kill@{turn}")
            code = await killed.wait(within=40)
            version, found = await functions(url)
            assert version < LATEST or found, f"killed at {point} {turn}: schema {version} has the functions of another"
            following = migrator(url)
            assert await following.wait(within=40) == 0, following.log_tail()
            assert (await versions(url), (await functions(url))[0]) == (ALL, LATEST)
            complete += code == 0
            assert code in (0, -9), killed.log_tail()
    assert 0 < complete < behind + 2, "some were killed, the last were not"


class Writers:
    """Traffic: runs are submitted, lost by a first attempt, tried again and finished, with a call booked by each of the two."""

    def __init__(self, pool: Pool) -> None:
        self.finished: list[UUID] = []
        self.refusals: list[str] = []
        self.over = False
        self._pool = pool

    async def write(self, session: str) -> None:
        while not self.over:
            asked = submission(session=session)
            run = (await self._surely(lambda asked=asked: transitions.submit(self._pool, [asked])))[0].run_id
            first = await self._surely(lambda run=run: claimed(self._pool, run, lease=0.0))
            flush = Flush(run, first.epoch, 9, events=[event(0)], ledger=[ledger_row()])
            assert await self._surely(lambda flush=flush: transitions.flush(self._pool, [flush]))
            lost = TakeOver(run, Reason.LOST, epoch=first.epoch)
            assert (await self._surely(lambda lost=lost: transitions.take_over(self._pool, [lost])))[0].ok
            second = await self._surely(lambda run=run: claimed(self._pool, run, owner="w-2/n"))
            events = [event(second.top + 1, Kind.COMPLETED, epoch=second.epoch)]
            finish = Finish(run, second.epoch, RunStatus.SUCCEEDED, result="{}", events=events, ledger=[ledger_row()])
            assert (await self._surely(lambda finish=finish: transitions.finish(self._pool, [finish])))[0].ok
            self.finished.append(run)

    async def _surely(self, call: Callable[[], Awaitable[T]]) -> T:
        """Asks again as a worker does: each of these may be repeated."""
        while True:
            try:
                return await call()
            except StoreUnavailable as error:
                self.refusals.append(str(error))
                await asyncio.sleep(0.05)


async def test_a_migration_beside_writers_ends_with_0_and_refuses_or_loses_nothing_of_theirs(
    empty_database_url: str, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one_behind(empty_database_url, monkeypatch)
    pool = await create_pool(empty_database_url, 6)
    writers = Writers(pool)
    writing = asyncio.gather(*(writers.write(f"s{number}") for number in range(4)))
    late = await asyncpg.connect(empty_database_url)
    admin = await asyncpg.connect(empty_database_url)

    async def wrote(more: int) -> None:
        enough = len(writers.finished) + more
        await eventually(lambda: writing.done() or len(writers.finished) >= enough, within=60, what="the writers write on")

    async def migrator_waits() -> bool:
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'runs'::regclass AND mode = 'ShareLock'"
        return bool(await admin.fetchval(waits))

    await wrote(10)
    await late.execute("BEGIN; LOCK TABLE runs IN ROW EXCLUSIVE MODE")  # a long transaction, for which it has to give way
    migration = migrator(empty_database_url)
    await eventually(migrator_waits, within=30, what="the migrator waits for the long transaction")
    await wrote(10)
    assert LATEST not in await versions(empty_database_url)
    await late.execute("COMMIT")
    assert await migration.wait(within=90) == 0, migration.log_tail()
    await wrote(10)
    writers.over = True
    await writing

    assert writers.refusals == []
    assert await versions(empty_database_url) == ALL
    ids = writers.finished
    assert await pool.fetchval("SELECT count(*) FROM runs WHERE id = ANY ($1) AND status = 'succeeded'", ids) == len(ids)
    assert await pool.fetchval("SELECT count(*) FROM messages WHERE run_id = ANY ($1) AND kind = 'completed'", ids) == len(ids)
    assert await pool.fetchval("SELECT count(*) FROM ledger WHERE run_id = ANY ($1)", ids) == 2 * len(ids)
    assert await pool.fetchval("SELECT count(*) FROM ledger WHERE run_id = ANY ($1) AND lost", ids) == len(ids)
    assert await pool.fetchval("SELECT count(*) FROM runs") == len(ids)
    for conn in (late, admin, pool):
        await conn.close()


async def says(process: ProductProcess, words: str) -> bool:
    answer = await process.get("/readyz")
    return answer.status_code == 503 and words in answer.text


async def all_three(product: Product, processes: ProductProcesses) -> list[ProductProcess]:
    return [
        await processes.gateway(product, ready=False),
        await processes.worker(product, ready=False),
        await processes.scheduler(product, ready=False),
    ]


async def status_of(url: str) -> list[str]:
    conn = await asyncpg.connect(url)
    try:
        return [row["status"] for row in await conn.fetch("SELECT status FROM runs")]
    finally:
        await conn.close()


async def waiting_run(product: Product) -> Redis:
    """A run that waits in the database and on the bus."""
    pool = await create_pool(product.database_url, 1)
    run = await submitted(pool)
    await pool.close()
    redis = await connect(product.redis_url)
    stream = WorkStream(redis, KEYS)
    await stream.ensure_group()
    await stream.publish([run.run_id])
    return redis


async def test_mg_04_one_version_behind_nobody_is_ready_says_what_is_needed_or_takes_work_and_then_all_do(
    product: Product,
    empty_database_url: str,
    product_processes: ProductProcesses,
    migrator: Migrator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = replace(product, database_url=empty_database_url)
    await one_behind(product.database_url, monkeypatch)
    redis = await waiting_run(product)
    started = await all_three(product, product_processes)

    words = f"the database has schema {LATEST - 1} and this version needs {LATEST}"
    for process in started:
        await eventually(lambda process=process: says(process, words), within=30, what=f"{process.name} says what it needs")
        assert (await process.get("/healthz")).status_code == 200, "a restart would mend nothing"

    async def nothing_moves() -> bool:
        groups = await redis.xinfo_groups(KEYS.runs)
        return await status_of(product.database_url) == ["pending"] and groups[0]["pending"] == 0

    await holds(nothing_moves, until=seconds_pass(3), within=20, what="nobody reads or claims")

    migration = migrator(product.database_url)
    assert await migration.wait(within=30) == 0, migration.log_tail()
    await asyncio.gather(*(process.ready() for process in started))
    await eventually(
        lambda: ran(product.database_url, "succeeded"), within=30, what="the run that waited is done, without a restart"
    )
    await redis.aclose()
    assert [await process.terminate() for process in started] == [0, 0, 0]


def seconds_pass(seconds: float) -> Callable[[], Awaitable[bool]]:
    """Several of the looks that the processes take at the schema, one a second."""
    over = time.monotonic() + seconds

    async def passed() -> bool:
        return time.monotonic() > over

    return passed


async def ran(url: str, status: str) -> bool:
    return await status_of(url) == [status]


async def ahead(url: str, *, oldest_accepted: int) -> None:
    """The database as a newer version has left it."""
    conn = await asyncpg.connect(url)
    await conn.execute("INSERT INTO schema_versions (version, name, checksum) VALUES ($1, 'newer', 'x')", LATEST + 1)
    await conn.execute("UPDATE meta SET oldest_accepted = $1", oldest_accepted)
    await conn.close()


async def test_mg_05_one_additive_version_ahead_the_former_image_starts_and_serves(
    product: Product, product_processes: ProductProcesses
) -> None:
    await (await waiting_run(product)).aclose()
    await ahead(product.database_url, oldest_accepted=LATEST)
    started = await all_three(product, product_processes)
    await asyncio.gather(*(process.ready() for process in started))
    await eventually(lambda: ran(product.database_url, "succeeded"), within=30, what="it works")
    assert [await process.terminate() for process in started] == [0, 0, 0]


async def test_mg_05_a_schema_that_accepts_only_newer_code_is_refused_by_all_with_its_range(
    product: Product, product_processes: ProductProcesses, migrator: Migrator
) -> None:
    await (await waiting_run(product)).aclose()
    await ahead(product.database_url, oldest_accepted=LATEST + 1)
    started = await all_three(product, product_processes)
    words = (
        f"the database has schema {LATEST + 1}, which accepts code for schema {LATEST + 1} or newer; this is for {LATEST}; "
        "run a newer version of agentrun"
    )
    for process in started:
        await eventually(lambda process=process: says(process, words), within=30, what=f"{process.name} names the range")
        assert process.returncode is None, "it must not crash in a loop"
    await holds(lambda: ran(product.database_url, "pending"), until=seconds_pass(2), within=20, what="nobody takes work")
    assert [await process.terminate() for process in started] == [0, 0, 0]


async def test_on_the_database_of_another_agentrun_nobody_is_ready_or_takes_work(
    product: Product, product_processes: ProductProcesses
) -> None:
    await (await waiting_run(product)).aclose()
    conn = await asyncpg.connect(product.database_url)
    await conn.execute("UPDATE meta SET owner = 'team/other'")
    started = await all_three(product, product_processes)
    words = "the database belongs to the AgentRun team/other; give default/agent a database of its own"
    for process in started:
        await eventually(lambda process=process: says(process, words), within=30, what=f"{process.name} says whose it is")
        assert process.returncode is None, "it must not crash in a loop"
    await holds(lambda: ran(product.database_url, "pending"), until=seconds_pass(2), within=20, what="nobody takes work")
    await conn.execute("UPDATE meta SET owner = 'default/agent'")
    await conn.close()
    await asyncio.gather(*(process.ready() for process in started))
    await eventually(lambda: ran(product.database_url, "succeeded"), within=30, what="its own work is done, without a restart")
    assert [await process.terminate() for process in started] == [0, 0, 0]
