"""The rotation of passwords as docs/operations.md has it: its own statements, with a schema that moves on meanwhile."""

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import pytest
from doc_blocks import blocks
from run_factory import claimed, submitted
from store_servers import PrivateServer

from agentrun.bus import connection
from agentrun.domain.errors import StoreUnavailable
from agentrun.store import migrations
from agentrun.store.migrations import LATEST, check, migrate
from agentrun.store.pool import connect, create_pool

PAGE = "docs/operations.md"


def as_role(server_url: str, role: str) -> str:
    """The database of the page, as this role."""
    parts = urlsplit(server_url)
    return urlunsplit(parts._replace(netloc=f"{role}@", path="/agent"))


async def execute(url: str, statements: str) -> None:
    """One by one, as psql does: CREATE DATABASE stands in no transaction."""
    conn = await asyncpg.connect(url)
    try:
        for statement in statements.split(";"):
            if statement.strip():
                await conn.execute(statement)
    finally:
        await conn.close()


async def test_a_database_login_is_replaced_while_both_work_and_the_schema_moves_on(
    private_postgres: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = private_postgres.url
    prepare, begin, end = blocks(PAGE, "Database password", "sql")
    await execute(admin, prepare)
    first, second = as_role(admin, "agent_1"), as_role(admin, "agent_2")
    with monkeypatch.context() as before:
        before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:-1])
        before.setattr(migrations, "LATEST", LATEST - 1)
        await migrate(first, owner="team/assistant", say=lambda _: None)

    await execute(admin, begin)
    old, new = await create_pool(first, 2), await create_pool(second, 2)
    await migrate(second, owner="team/assistant", say=lambda _: None)
    run = (await submitted(old, "by the old one")).run_id
    await claimed(new, run)
    await old.close()

    await execute(admin, end)
    with pytest.raises(StoreUnavailable, match="agent_1"):
        await connect(first)
    await claimed(new, (await submitted(new, "by the new one", session="s2")).run_id)
    async with new.acquire() as conn:
        assert (await check(conn)).present == LATEST
        owners = await conn.fetch(
            "SELECT DISTINCT pg_get_userbyid(relowner) AS owner FROM pg_class WHERE relkind IN ('r', 'p') "
            "AND relnamespace = 'public'::regnamespace"
        )
        assert [row["owner"] for row in owners] == ["agent"]
    await new.close()


async def test_an_owner_that_logs_in_itself_is_replaced_too(private_postgres: PrivateServer) -> None:
    admin = private_postgres.url
    _, begin, _ = blocks(PAGE, "Database password", "sql")
    await execute(admin, "CREATE ROLE agent LOGIN PASSWORD 'only'; CREATE DATABASE agent OWNER agent")
    await migrate(as_role(admin, "agent"), owner="team/assistant", say=lambda _: None)

    await execute(admin, begin)
    await execute(admin, "ALTER ROLE agent NOLOGIN PASSWORD NULL")

    with pytest.raises(StoreUnavailable, match="not permitted to log in"):
        await connect(as_role(admin, "agent"))
    new = await create_pool(as_role(admin, "agent_2"), 2)
    await claimed(new, (await submitted(new, "by the new one")).run_id)
    await new.execute("CREATE TABLE of_a_later_migration (x int); ALTER TABLE runs ADD COLUMN of_a_later_migration int")
    await new.close()


async def test_a_redis_password_is_replaced_while_both_work(private_redis: PrivateServer) -> None:
    (block,) = blocks(PAGE, "Redis password", "")
    begin, end = block.splitlines()

    def with_password(word: str) -> str:
        parts = urlsplit(private_redis.url)
        return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), "password": word})))

    admin = await connection.connect(private_redis.url)
    await admin.config_set("requirepass", "first")
    await admin.aclose()
    old, new = await connection.connect(with_password("first")), await connection.connect(with_password("second"))
    await old.execute_command(*begin.split())
    await connection.check(old)
    await connection.check(new)

    await new.execute_command(*end.split())

    await connection.check(new)
    await old.aclose()
    late = await connection.connect(with_password("first"))
    with pytest.raises(connection.LoginRefused):
        await connection.check(late)
    await late.aclose()
    await new.aclose()
