"""The migration runner on a real Postgres."""

import asyncio

import asyncpg
import pytest
from waiting import eventually

from agentrun.domain.errors import MigrationRefused, SchemaMismatch, StoreUnavailable
from agentrun.store import migrations
from agentrun.store.migrations import LATEST, LOCK_KEY, check, migrate
from agentrun.store.pool import connect
from agentrun.store.statements import statements


def quiet(_: str) -> None:
    """Says nothing."""


async def test_mg_01_ten_migrators_at_once_apply_each_step_once(empty_database_url: str) -> None:
    applied = await asyncio.gather(*(migrate(empty_database_url, owner="ns/a", say=quiet) for _ in range(10)))
    assert sorted(applied) == [0] * 9 + [len(migrations.MIGRATIONS)]
    conn = await connect(empty_database_url)
    try:
        state = await check(conn)
    finally:
        await conn.close()
    assert (state.present, state.required, state.owner) == (LATEST, LATEST, "ns/a")


async def test_mg_02_a_migrator_killed_in_mid_step_leaves_the_lock_free_and_no_half_step(empty_database_url: str) -> None:
    holder = await asyncpg.connect(empty_database_url)
    await holder.execute("SELECT pg_advisory_lock($1)", LOCK_KEY)
    await holder.execute("BEGIN; CREATE TABLE half (x int)")
    waiting = asyncio.ensure_future(migrate(empty_database_url, say=quiet))
    admin = await asyncpg.connect(empty_database_url)
    await eventually(
        lambda: admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agentrun-migrate'"),
        within=5,
        what="waits",
    )
    await admin.execute("SELECT pg_terminate_backend($1)", holder.get_server_pid())
    assert await waiting == len(migrations.MIGRATIONS)
    assert await admin.fetchval("SELECT to_regclass('half')") is None
    await admin.close()
    holder.terminate()


async def test_mg_02_a_waiter_gives_up_after_its_limit(empty_database_url: str) -> None:
    holder = await asyncpg.connect(empty_database_url)
    await holder.execute("SELECT pg_advisory_lock($1)", LOCK_KEY)
    with pytest.raises(StoreUnavailable, match="another migration"):
        await migrate(empty_database_url, wait_seconds=0.3, say=quiet)
    await holder.close()


async def test_a_database_of_another_application_is_refused_untouched(empty_database_url: str) -> None:
    conn = await asyncpg.connect(empty_database_url)
    await conn.execute("CREATE TABLE orders (id int)")
    with pytest.raises(SchemaMismatch, match=r"another application.*orders"):
        await migrate(empty_database_url, say=quiet)
    assert await conn.fetchval("SELECT count(*) FROM pg_class WHERE relname IN ('runs', 'schema_versions')") == 0
    await conn.close()


async def test_a_database_of_another_agentrun_is_refused(database_url: str) -> None:
    await migrate(database_url, owner="ns/a", say=quiet)
    with pytest.raises(SchemaMismatch, match="belongs to the AgentRun ns/a"):
        await migrate(database_url, owner="ns/b", say=quiet)


async def test_a_migration_that_was_changed_after_it_was_applied_is_refused(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    await conn.execute("UPDATE schema_versions SET checksum = 'other' WHERE version = 1")
    with pytest.raises(SchemaMismatch, match=r"0001_tables\.sql was applied with another text"):
        await migrate(database_url, say=quiet)
    await conn.close()


async def test_a_newer_schema_is_left_alone(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    await conn.execute("INSERT INTO schema_versions (version, name, checksum) VALUES ($1, 'future', 'x')", LATEST + 1)
    assert await migrate(database_url, say=quiet) == 0
    assert (await check(conn)).present == LATEST + 1
    await conn.close()


async def test_a_newer_schema_is_reserved_all_the_same_and_no_other_agentrun_gets_it(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    await conn.execute("INSERT INTO schema_versions (version, name, checksum) VALUES ($1, 'future', 'x')", LATEST + 1)
    assert await migrate(database_url, owner="ns/a", say=quiet) == 0
    assert (await check(conn)).owner == "ns/a"
    with pytest.raises(SchemaMismatch, match="belongs to the AgentRun ns/a"):
        await migrate(database_url, owner="ns/b", say=quiet)
    await conn.close()


async def test_an_empty_database_has_schema_0(empty_database_url: str) -> None:
    conn = await connect(empty_database_url)
    assert (await check(conn)).present == 0
    await conn.close()


async def test_a_step_that_fails_leaves_nothing_behind(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = migrations.Migration(1, "0001_broken.sql", "CREATE TABLE half (x int); SELECT nonsense", "c")
    monkeypatch.setattr(migrations, "MIGRATIONS", [broken])
    with pytest.raises(MigrationRefused, match="SELECT nonsense"):
        await migrate(empty_database_url, say=quiet)
    conn = await asyncpg.connect(empty_database_url)
    assert await conn.fetchval("SELECT to_regclass('half')") is None
    assert await conn.fetchval("SELECT count(*) FROM schema_versions") == 0
    await conn.close()


async def test_every_foreign_key_leads_an_index(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    naked = await conn.fetch(
        """SELECT c.conrelid::regclass AS relation, c.conname FROM pg_constraint c WHERE c.contype = 'f' AND NOT EXISTS (
               SELECT 1 FROM pg_index i WHERE i.indrelid = c.conrelid AND i.indkey[0] = c.conkey[1] AND i.indpred IS NULL)"""
    )
    # runs.session_id leads the unique (session_id, session_position)
    assert naked == []
    await conn.close()


async def test_mg_04_a_statement_that_postgres_refuses_is_named_and_nothing_of_its_step_stays(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = """-- comment; with a semicolon
        CREATE TABLE half (note text DEFAULT 'a;b'); /* ; */
        DO $do$ BEGIN PERFORM 1; END $do$;
        ALTER TABLE
            nowhere ADD COLUMN x int;"""
    bad = migrations.Migration(LATEST + 1, "9999_bad.sql", sql, "0" * 64)
    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, bad])
    with pytest.raises(MigrationRefused) as refused:
        await migrate(empty_database_url, say=quiet)
    assert str(refused.value).startswith(
        'migration 9999_bad.sql: relation "nowhere" does not exist; the statement is: ALTER TABLE nowhere ADD COLUMN x int;'
    )
    conn = await connect(empty_database_url)
    try:
        assert (await check(conn)).present == LATEST
        assert await conn.fetchval("SELECT to_regclass('half')") is None
    finally:
        await conn.close()
    assert await migrate_without(monkeypatch, empty_database_url) == 0


async def migrate_without(monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    monkeypatch.undo()
    return await migrate(url, say=quiet)


def test_the_statements_of_all_migrations_are_told_apart() -> None:
    for text in (*(one.sql for one in migrations.MIGRATIONS), migrations.TRANSITIONS):
        found = list(statements(text))
        assert found
        for statement in found:
            assert statement.split()[0] in ("CREATE", "ALTER", "INSERT", "UPDATE", "DROP", "COMMENT", "DELETE", "DO"), statement


async def test_a_step_whose_record_is_locked_out_is_tried_again(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_MS", 200)
    await migrate(empty_database_url, say=quiet)
    holder = await asyncpg.connect(empty_database_url)
    await holder.execute("DELETE FROM schema_versions WHERE version = 0")
    await holder.execute("BEGIN; LOCK TABLE schema_versions IN SHARE MODE")
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'schema_versions'::regclass"
    migrating = asyncio.ensure_future(migrate(empty_database_url, say=quiet))
    tried = asyncio.get_running_loop().time() + 0.5  # longer than a try
    await eventually(lambda: holder.fetchval(waits), within=10, what="its record waits")
    await eventually(
        lambda: asyncio.get_running_loop().time() > tried and holder.fetchval(waits), within=10, what="and is tried again"
    )
    await holder.execute("COMMIT")
    assert await migrating == 0
    assert await holder.fetchval("SELECT count(*) FROM schema_versions WHERE version = 0") == 1
    await holder.close()


async def test_limits_that_a_role_has_for_its_statements_are_not_those_of_a_migration(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await asyncpg.connect(empty_database_url)
    name = await admin.fetchval("SELECT current_database()")
    for limit in ("statement_timeout", *(["transaction_timeout"] if admin.get_server_version().major >= 17 else [])):
        await admin.execute(f"ALTER DATABASE {name} SET {limit} = '300ms'")
    slow = migrations.Migration(1, "0001_slow.sql", "SELECT pg_sleep(1)", "c")
    monkeypatch.setattr(migrations, "MIGRATIONS", [slow])
    monkeypatch.setattr(migrations, "TRANSITIONS", "SELECT pg_sleep(0.5)")
    assert await migrate(empty_database_url, say=quiet) == 1
    assert await admin.fetchval("SELECT count(*) FROM schema_versions") == 2
    await admin.close()


async def test_a_statement_that_an_administrator_cancels_is_named_and_no_lost_connection(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = migrations.Migration(1, "0001_slow.sql", "SELECT pg_sleep(60)", "c")
    monkeypatch.setattr(migrations, "MIGRATIONS", [slow])
    admin = await asyncpg.connect(empty_database_url)
    migrating = asyncio.ensure_future(migrate(empty_database_url, say=quiet))
    cancel = "SELECT bool_or(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%sleep(60)'"
    await eventually(lambda: admin.fetchval(cancel), within=10, what="it sleeps and is cancelled")
    with pytest.raises(MigrationRefused, match=r"0001_slow\.sql: canceling statement .*SELECT pg_sleep\(60\)"):
        await migrating
    assert await admin.fetchval("SELECT count(*) FROM schema_versions") == 0
    await admin.close()


async def test_functions_whose_answers_had_other_names_before_the_first_release_are_replaced(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    for name in ("book_calls", "correct_calls"):
        await conn.execute(f"DROP FUNCTION agentrun_1.{name}(jsonb)")
        await conn.execute(
            f"CREATE FUNCTION agentrun_1.{name}(p_ledger jsonb, OUT runs uuid[], OUT epochs integer[], OUT costs numeric[]) "
            "LANGUAGE sql AS $$ SELECT NULL::uuid[], NULL::integer[], NULL::numeric[] $$"
        )
    await conn.execute("UPDATE schema_versions SET checksum = 'former' WHERE version = 0")
    assert await migrate(database_url, say=quiet) == 0
    answers = "SELECT proargnames[2:] FROM pg_proc WHERE proname IN ('book_calls', 'correct_calls')"
    assert [row[0] for row in await conn.fetch(answers)] == [["b_run", "b_epoch", "b_cost"]] * 2
    await conn.close()
