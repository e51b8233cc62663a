"""The schema's history (forward-only SQL files) and the runner that applies it.

Each file runs in one transaction under a session advisory lock, so that any number of migrators may start at once: one works, the
others wait up to a limit. A file that was applied must not change (checksums). `transitions.sql`, `submissions.sql`, `effects.sql` and
`money.sql` are applied as one, whenever their text has changed, in the transaction of the last file; a change comes with a migration of
its own, so that the schema version says which functions are there.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import asyncpg

from agentrun import failpoints
from agentrun.domain.errors import MigrationRefused, SchemaMismatch, StoreUnavailable
from agentrun.store.pool import Executor, connect, connection_lost, unavailable
from agentrun.store.statements import shown, statements

LOCK_KEY = 0x6167_656E_7472_756E  # "agentrun"
WAIT_SECONDS = 120.0
LOCK_TIMEOUT_MS = 5_000
HOLD_SECONDS = 0.8  # below Postgres' deadlock_timeout (1 s): the migrator gives way before the traffic looks for deadlocks
GIVE_WAY_SECONDS = 60.0
DEATH_CHECK_MS = 1_000


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: its number, file name, text and hex SHA-256 of the text."""

    version: int
    name: str
    sql: str
    checksum: str


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The schema versions that matter: what the database has (0: nothing), what this code needs, and the oldest code it accepts."""

    present: int
    required: int
    oldest_accepted: int
    owner: str | None


def _load() -> list[Migration]:
    texts = {
        entry.name: entry.read_text() for entry in files("agentrun.store.migrations").iterdir() if entry.name.endswith(".sql")
    }
    return [
        Migration(int(name.split("_")[0]), name, sql, hashlib.sha256(sql.encode()).hexdigest())
        for name, sql in sorted(texts.items())
    ]


MIGRATIONS = _load()
LATEST = MIGRATIONS[-1].version
FUNCTIONS = ("transitions.sql", "submissions.sql", "effects.sql", "money.sql", "dead_letters.sql", "retention.sql")
TABLES: dict[int, tuple[tuple[str, str], ...]] = {  # what a step locks of the tables that are there, and how strongly
    2: (("cron_tasks", "ACCESS EXCLUSIVE"), ("slots", "ACCESS EXCLUSIVE"), ("runs", "SHARE")),
    3: (("effects", "ACCESS EXCLUSIVE"),),
    4: (("ledger", "ACCESS EXCLUSIVE"),),
    5: (
        ("ledger", "SHARE"),
        ("sessions", "SHARE"),
        ("runs", "SHARE"),
        ("effects", "SHARE"),
        ("messages", "SHARE UPDATE EXCLUSIVE"),
        ("dead_letters", "ACCESS EXCLUSIVE"),
    ),
}
TRANSITIONS = "\n".join(files("agentrun.store").joinpath(name).read_text() for name in FUNCTIONS)

_VERSIONS = """
CREATE TABLE IF NOT EXISTS schema_versions (
    version integer PRIMARY KEY,                   -- 0 holds the checksum of transitions.sql
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)"""


async def migrate(
    dsn: str, *, owner: str | None = None, wait_seconds: float = WAIT_SECONDS, say: Callable[[str], None] = print
) -> int:
    """Brings the database to this code's schema; returns the number of steps applied. Connect to Postgres itself, not to a pooler in
    transaction mode: the lock belongs to the session.

    Raises SchemaMismatch for a changed file, a newer schema, another AgentRun's or another application's database, MigrationRefused for
    a statement that Postgres refuses, and StoreUnavailable when it does not answer or the lock is held for longer than `wait_seconds`.
    """
    conn = await connect(dsn, name="agentrun-migrate", command_timeout=None)
    try:
        with connection_lost():
            await _without_limits(conn)
            await _end_with_its_client(conn)
            await _lock(conn, wait_seconds)
            return await _apply(conn, owner, say)
    finally:
        await conn.close()


async def _without_limits(conn: Executor) -> None:
    """What a role or a database sets for the traffic is not meant for a step, which takes as long as its tables are large. The limit of
    an idle transaction stays: a migrator is idle only when it hangs.
    """
    await conn.execute("SET statement_timeout = 0")
    with contextlib.suppress(asyncpg.UndefinedObjectError):  # before Postgres 17
        await conn.execute("SET transaction_timeout = 0")


async def _end_with_its_client(conn: Executor) -> None:
    """Has Postgres end a statement whose migrator is gone (killed, machine lost), which frees the lock; else it would go on to its end
    first. Where Postgres runs on a system that cannot tell, it does.
    """
    with contextlib.suppress(asyncpg.InvalidParameterValueError):
        await conn.execute(f"SET client_connection_check_interval = {DEATH_CHECK_MS}")


async def _lock(conn: Executor, wait_seconds: float) -> None:
    """Polls, since a waiting lock would hold a snapshot that delays CREATE INDEX CONCURRENTLY of the one that works."""
    until = time.monotonic() + wait_seconds
    while not await conn.fetchval("SELECT pg_try_advisory_lock($1)", LOCK_KEY):
        if time.monotonic() > until:
            raise StoreUnavailable(
                f"another migration has been running for {wait_seconds:.0f} s; look at pg_locks, then try again"
            )
        await asyncio.sleep(0.2)


async def _apply(conn: Executor, owner: str | None, say: Callable[[str], None]) -> int:
    applied = await _applied(conn)
    for migration in MIGRATIONS:
        known = applied.get(migration.version)
        if known is not None and known != migration.checksum:
            raise SchemaMismatch(
                f"migration {migration.name} was applied with another text (checksum {known[:12]}…, now {migration.checksum[:12]}…);"
                " a migration must not change once applied: restore the file"
            )
    newest = max(applied, default=0)
    await _own(conn, owner, fresh=not applied)
    if newest > LATEST:
        return 0  # a newer version has been here: nothing to do, and nothing to take back
    steps = [migration for migration in MIGRATIONS if migration.version not in applied]
    functions = Migration(0, "transitions.sql", TRANSITIONS, hashlib.sha256(TRANSITIONS.encode()).hexdigest())
    changed = [functions] if applied.get(0) != functions.checksum else []
    for migration in steps[:-1]:
        await _step(conn, [migration])
        say(f"applied {migration.name}")
    if last := [*steps[-1:], *changed]:
        await _step(conn, last)
    for migration in steps[-1:]:
        say(f"applied {migration.name}")
    await _own(conn, owner, fresh=False)
    return len(steps)


async def _applied(conn: Executor) -> dict[int, str]:
    if await conn.fetchval("SELECT to_regclass('schema_versions') IS NULL"):
        foreign = await conn.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') LIMIT 3"
        )
        if foreign:
            names = ", ".join(row["relname"] for row in foreign)
            raise SchemaMismatch(
                f"this database belongs to another application (it has the tables {names}); give the AgentRun a database of its own"
            )
        await _statement(conn, "of the first table", _VERSIONS)
    rows = await conn.fetch("SELECT version, checksum FROM schema_versions")
    return {row["version"]: row["checksum"] for row in rows}


async def _own(conn: Executor, owner: str | None, *, fresh: bool) -> None:
    """Writes the owner once; a database that has another is refused before anything is changed."""
    if owner is None or fresh:
        return
    if await conn.fetchval("SELECT to_regclass('meta') IS NULL"):
        return
    await conn.execute("UPDATE meta SET owner = $1 WHERE owner IS NULL", owner)
    present = await conn.fetchval("SELECT owner FROM meta")
    if present != owner:
        raise SchemaMismatch(f"this database belongs to the AgentRun {present}; give {owner} a database of its own")


async def _step(conn: Executor, parts: Sequence[Migration]) -> None:
    """One transaction; gives way to traffic instead of queueing behind it, and tries again for a minute."""
    until = time.monotonic() + GIVE_WAY_SECONDS
    while True:
        try:
            await conn.execute("BEGIN")
            for part in parts:
                await _hold(conn, part)
                for statement in (*statements(part.sql), _record(part)):
                    await _statement(conn, part.name, statement)
                await failpoints.hit("migrate.part.done")
            await conn.execute("COMMIT")
            await failpoints.hit("migrate.step.committed")
        except MigrationRefused as error:
            await conn.execute("ROLLBACK")
            passes = isinstance(error.__cause__, (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError))
            if not passes or time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def _hold(conn: Executor, part: Migration) -> None:
    """Locks all tables of a step before it changes anything. The traffic takes tables in several orders, so none is free of deadlocks; but
    a transaction that waits for one of these tables looks for a deadlock only after a second, and by then this has all or has given way.
    """
    tables = TABLES.get(part.version, ())
    await conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
    if tables:  # waits for VACUUM, cancels an automatic one, and lets the traffic pass meanwhile
        names = ", ".join(table for table, _ in tables)
        await _statement(conn, part.name, f"LOCK TABLE {names} IN SHARE UPDATE EXCLUSIVE MODE")
    until = time.monotonic() + HOLD_SECONDS
    for table, mode in tables:
        left = max(int((until - time.monotonic()) * 1000), 1)
        await conn.execute(f"SET LOCAL lock_timeout = {left}")
        await _statement(conn, part.name, f"LOCK TABLE {table} IN {mode} MODE")
    await conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")


def _record(part: Migration) -> str:
    return (
        f"INSERT INTO schema_versions (version, name, checksum) VALUES ({part.version}, '{part.name}', '{part.checksum}') "
        "ON CONFLICT (version) DO UPDATE SET checksum = excluded.checksum, applied_at = now()"
    )


async def _statement(conn: Executor, name: str, statement: str) -> None:
    try:
        await conn.execute(statement)
    except asyncpg.PostgresError as error:
        lost = isinstance(error, (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError))
        if lost and not isinstance(error, asyncpg.QueryCanceledError):  # somebody's cancel leaves the connection as it is
            raise
        raise MigrationRefused(
            f"migration {name}: {error.args[0]}; the statement is: {shown(statement)}; mend what it says, and run it again"
        ) from error


async def check(conn: Executor) -> SchemaState:
    """Reads the schema's state. Raises StoreUnavailable."""
    with unavailable():
        if await conn.fetchval("SELECT to_regclass('schema_versions') IS NULL OR to_regclass('meta') IS NULL"):
            return SchemaState(0, LATEST, 0, None)
        row = await conn.fetchrow(
            "SELECT (SELECT max(version) FROM schema_versions) AS present, oldest_accepted, owner FROM meta"
        )
    assert row is not None
    return SchemaState(row["present"], LATEST, row["oldest_accepted"], row["owner"])
