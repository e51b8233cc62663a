"""Migrations beside traffic: the migrator gives way, nothing of the traffic is refused or lost."""

import asyncio

import asyncpg
import pytest
from waiting import eventually

from agentrun import failpoints
from agentrun.store import migrations
from agentrun.store.migrations import LATEST, LOCK_KEY, Migration, migrate


def quiet(_: str) -> None:
    """Says nothing."""


async def at_version(url: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty database becomes what that version leaves, with the functions of this one, also those that need its columns."""
    with monkeypatch.context() as before:
        before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:version])
        before.setattr(migrations, "LATEST", version)
        before.setattr(migrations, "TRANSITIONS", f"SET LOCAL check_function_bodies = off; {migrations.TRANSITIONS}")
        await migrate(url, owner="ns/a", say=quiet)


async def migrator_waits(conn: asyncpg.Connection) -> bool:
    waiting = """SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                 WHERE NOT l.granted AND a.application_name = 'agentrun-migrate' AND a.datname = current_database()"""
    return bool(await conn.fetchval(waiting))


@pytest.mark.parametrize("delay", [0.0, 1.3], ids=["at_once", "after_its_check_for_deadlocks"])
@pytest.mark.parametrize(("first", "then"), [("ledger", "runs"), ("runs", "ledger"), ("effects", "runs")])
async def test_a_transaction_that_takes_tables_in_either_order_is_no_victim_of_a_migration(
    first: str, then: str, delay: float, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await at_version(empty_database_url, 4, monkeypatch)
    traffic = await asyncpg.connect(empty_database_url)
    admin = await asyncpg.connect(empty_database_url)
    await traffic.execute(f"BEGIN; LOCK TABLE {first} IN ROW EXCLUSIVE MODE")
    migrating = asyncio.ensure_future(migrate(empty_database_url, owner="ns/a", say=quiet))
    clock = asyncio.get_running_loop().time
    until = clock() + delay
    await eventually(lambda: migrator_waits(admin), within=10, what="the migrator waits for the transaction")
    await eventually(lambda: clock() >= until and migrator_waits(admin), within=20, what="and still does")
    await asyncio.wait_for(traffic.execute(f"LOCK TABLE {then} IN ROW EXCLUSIVE MODE; COMMIT"), 20)
    assert await asyncio.wait_for(migrating, 60) == LATEST - 4
    await traffic.close()
    await admin.close()


async def test_while_a_vacuum_holds_up_the_migrator_the_traffic_goes_on(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await at_version(empty_database_url, 4, monkeypatch)
    vacuum, traffic = [await asyncpg.connect(empty_database_url) for _ in range(2)]
    await vacuum.execute("BEGIN; LOCK TABLE runs IN SHARE UPDATE EXCLUSIVE MODE")  # as VACUUM does
    migrating = asyncio.ensure_future(migrate(empty_database_url, owner="ns/a", say=quiet))
    await traffic.execute("SET lock_timeout = '1ms'")
    for _ in range(20):
        await eventually(lambda: migrator_waits(traffic), within=10, what="the migrator waits")
        for table in ("ledger", "sessions", "runs", "effects"):
            await traffic.execute(f"BEGIN; LOCK TABLE {table} IN ROW EXCLUSIVE MODE; COMMIT")
    await vacuum.execute("COMMIT")
    assert await asyncio.wait_for(migrating, 60) == LATEST - 4
    await vacuum.close()
    await traffic.close()


HELD = """
SELECT c.relname, l.mode FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.granted AND c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND l.database =
      (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.pid = (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted
               AND ((classid::bigint << 32) | objid::bigint) = $1
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"""


async def test_a_step_locks_all_that_it_needs_before_it_changes_anything(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it never waits for a table while the traffic waits for another that it holds."""
    admin = await asyncpg.connect(empty_database_url)
    beforehand: dict[int, set[tuple[str, str]]] = {}
    afterwards: dict[int, set[tuple[str, str]]] = {}
    version = 0
    hold, hit = migrations._hold, failpoints.hit

    async def held() -> set[tuple[str, str]]:
        return {(row["relname"], row["mode"]) for row in await admin.fetch(HELD, LOCK_KEY)}

    async def seen_hold(conn: asyncpg.Connection, part: Migration) -> None:
        nonlocal version
        version = part.version
        await hold(conn, part)
        beforehand[version] = await held()

    async def seen_hit(name: str) -> None:
        await hit(name)
        if name == "migrate.part.done":
            afterwards[version] = await held()

    monkeypatch.setattr(migrations, "_hold", seen_hold)
    monkeypatch.setattr(failpoints, "hit", seen_hit)
    await migrate(empty_database_url, say=quiet)
    assert afterwards.keys() == {0, *(one.version for one in migrations.MIGRATIONS)}
    for one, locks in afterwards.items():
        free = {"AccessShareLock"} | (
            set() if one else {"RowShareLock", "RowExclusiveLock"}
        )  # to make a function of SQL, no rows
        late = {
            (table, mode)
            for table, mode in locks - beforehand[one] - {("schema_versions", "RowExclusiveLock")}
            if mode not in free and (table, "AccessExclusiveLock") not in beforehand[one]
        }
        assert not late, f"migration {one} locks in the middle of its step; name the tables in TABLES"
    await admin.close()
