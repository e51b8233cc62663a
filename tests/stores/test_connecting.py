"""What is said of a Postgres that cannot be used as it is named: one line, to the one command that a person calls. And the pool itself."""

import asyncio
import random
import subprocess
import sys
import time
from urllib.parse import urlsplit, urlunsplit

import pytest
from fault_proxy import fault_proxy
from processes import clean_environment
from store_servers import Databases
from store_servers import database_url as url_of

from agentrun.domain.errors import ConfigurationError, StoreUnavailable
from agentrun.store.pool import NoTls, connect, create_pool, unavailable
from agentrun_operator.facts import StoreProblem
from agentrun_operator.store_looks import ask_database


def another_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc="nobody-here@" + parts.netloc.rpartition("@")[2]))


@pytest.mark.parametrize(
    ("missing", "told"),
    [("database", 'database "nothing_here" does not exist'), ("role", 'role "nobody-here" does not exist')],
)
async def test_a_missing_database_or_role_is_named(databases: Databases, missing: str, told: str) -> None:
    url = url_of(databases.url, "nothing_here") if missing == "database" else another_user(databases.url)
    done = subprocess.run(
        [sys.executable, "-m", "agentrun", "migrate"],
        env={**clean_environment(), "DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    line = f"agentrun: Postgres refuses the connection: {told}; create what is missing, or correct DATABASE_URL\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)

    pool = await create_pool(url, 1)
    with pytest.raises(StoreUnavailable, match=told), unavailable():
        await pool.fetchval("SELECT 1")
    await pool.close()


@pytest.mark.parametrize("url", ["foo", "postgresql://h:abc/d", "postgresql:///d?sslmode=wrong"])
async def test_a_url_that_means_nothing_is_no_outage(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^DATABASE_URL, or a PG variable of the environment: .+; correct it$"):
        await connect(url)

    pool = await create_pool(url, 1)
    with pytest.raises(ConfigurationError), unavailable():
        await pool.fetchval("SELECT 1")
    await pool.close()


async def test_a_pg_variable_that_means_nothing_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "wrong")
    with pytest.raises(ConfigurationError, match="sslmode"):
        await connect("postgresql://127.0.0.1/d")


async def test_pg_02_who_gives_up_waiting_for_a_connection_takes_none_along(database_url: str) -> None:
    """Five hundred that have little patience, or are cancelled, for three connections that others hold for about as long."""
    pool = await create_pool(database_url, 3)
    dice = random.Random(2)
    served = given_up = 0
    begun = time.monotonic()
    for _ in range(20):
        await pool.fetchval("SELECT 1 FROM pg_sleep(0)")
    patience = 0.003 + 2 * (time.monotonic() - begun) / 20

    async def impatient() -> None:
        nonlocal served
        async with asyncio.timeout(patience), pool.acquire() as conn:
            served += await conn.fetchval("SELECT 1 FROM pg_sleep($1)", dice.random() * patience)

    async def interrupted() -> None:
        task = asyncio.create_task(impatient())
        await asyncio.sleep(dice.random() * patience)
        task.cancel()
        await task

    for _ in range(25):
        done = await asyncio.gather(
            *(impatient() if dice.random() < 0.5 else interrupted() for _ in range(20)), return_exceptions=True
        )
        assert all(one is None or isinstance(one, TimeoutError | asyncio.CancelledError) for one in done), done
        given_up += sum(one is not None for one in done)
    assert served and given_up > 100

    async with asyncio.timeout(5):
        held = [await pool.acquire() for _ in range(3)]
        assert await asyncio.gather(*(conn.fetchval("SELECT 7") for conn in held)) == [7, 7, 7]
    for conn in held:
        await pool.release(conn)
    async with asyncio.timeout(5):
        await pool.close()


async def test_a_postgres_that_speaks_no_tls_is_named_as_such(database_url: str) -> None:
    async with fault_proxy(database_url, over_tcp=True) as postgres:
        asking = postgres.url + ("&" if "?" in postgres.url else "?") + "sslmode=require"
        with pytest.raises(NoTls, match="Postgres speaks no TLS, which sslmode in DATABASE_URL asks for"):
            await connect(asking)
        assert (await ask_database(asking))[0].schema.problem is StoreProblem.NO_TLS
