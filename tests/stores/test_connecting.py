"""What is said of a Postgres that cannot be used as it is named: one line, to the one command that a person calls."""

import subprocess
import sys
from urllib.parse import urlsplit, urlunsplit

import pytest
from processes import clean_environment
from store_servers import Databases, database_url

from agentrun.domain.errors import ConfigurationError, StoreUnavailable
from agentrun.store.pool import connect, create_pool, unavailable


def another_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc="nobody-here@" + parts.netloc.rpartition("@")[2]))


@pytest.mark.parametrize(
    ("missing", "told"),
    [("database", 'database "nothing_here" does not exist'), ("role", 'role "nobody-here" does not exist')],
)
async def test_a_missing_database_or_role_is_named(databases: Databases, missing: str, told: str) -> None:
    url = database_url(databases.url, "nothing_here") if missing == "database" else another_user(databases.url)
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
