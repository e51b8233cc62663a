"""TLS to both stores: the whole system works over it, and what is wrong about certificates is said, by the processes and the operator."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes import ProductProcesses, clean_environment
from tls_servers import PASSWORD, TlsServers, tls_servers, why_no_tls
from whole_path import system

from agentrun.bus import connection
from agentrun.domain.errors import AgentrunError, BusUnavailable, ConfigurationError, StoreUnavailable
from agentrun.store.migrations import migrate
from agentrun.store.pool import connect, create_pool, unavailable
from agentrun_operator.facts import StoreProblem
from agentrun_operator.store_looks import ask_database, ask_redis

pytestmark = pytest.mark.skipif(why_no_tls() is not None, reason=str(why_no_tls()))


@pytest.fixture
async def servers(store_programs: None) -> AsyncIterator[TlsServers]:
    async with tls_servers() as made:
        yield made


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: nothing in the home folder, no variable of Postgres."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)


@pytest.mark.whole_path  # without TLS in the wheels it runs nowhere else
async def test_the_whole_system_works_over_tls(servers: TlsServers, product_processes: ProductProcesses, tmp_path: Path) -> None:
    database_url = f"{servers.database_url}?sslmode=verify-full&sslrootcert={servers.authority}"
    redis_url = f"{servers.redis_url}?ssl_ca_certs={servers.authority}"
    await migrate(database_url, owner="default/agent", say=lambda _: None)
    async with system(database_url, redis_url, product_processes, tmp_path) as whole:
        await asyncio.gather(whole.gateway(), whole.scheduler(), whole.worker())
        run_id = await whole.submit('[[tool add {"a": 2, "b": 3}]] go')
        seen = await whole.follow(run_id)
        assert (seen.transcript.end, await whole.status(run_id)) == ("completed", "succeeded")
        plain = await whole.pool.fetchval(
            "SELECT count(*) FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE client_addr IS NOT NULL AND NOT ssl"
        )
        assert plain == 0
    (database, _), (queue, _) = await ask_database(database_url), await ask_redis(redis_url)
    assert (database.schema.problem, database.schema.owner, queue.problem) == (None, "default/agent", None)


def database_urls(servers: TlsServers) -> dict[str, str]:
    by_address = servers.database_url.replace("localhost", "127.0.0.1")
    return {
        "no authority": f"{servers.database_url}?sslmode=verify-full",
        "libpq's system": f"{servers.database_url}?sslmode=verify-full&sslrootcert=system",
        "no such file": f"{servers.database_url}?sslmode=verify-ca&sslrootcert=/nowhere/ca.crt",
        "no certificate": f"{servers.database_url}?sslmode=verify-full&sslrootcert={__file__}",
        "no client certificate": f"{servers.database_url}?sslmode=require&sslcert=/nowhere/client.crt",
        "another authority": f"{servers.database_url}?sslmode=verify-full&sslrootcert={servers.other_authority}",
        "another name": f"{by_address}?sslmode=verify-full&sslrootcert={servers.authority}",
    }


DATABASE_TROUBLES = {
    "no authority": (ConfigurationError, "root.crt", StoreProblem.BAD_CERTIFICATE),
    "libpq's system": (ConfigurationError, "sslrootcert system: No such file", StoreProblem.BAD_CERTIFICATE),
    "no such file": (ConfigurationError, "sslrootcert /nowhere/ca.crt: No such file or directory", StoreProblem.BAD_CERTIFICATE),
    "no certificate": (ConfigurationError, "sslrootcert .*test_tls.py: no certificate", StoreProblem.BAD_CERTIFICATE),
    "no client certificate": (ConfigurationError, "sslcert /nowhere/client.crt: No such file", StoreProblem.BAD_CERTIFICATE),
    "another authority": (
        StoreUnavailable,
        "certificate of Postgres is not accepted: .*self-signed|issuer",
        StoreProblem.UNTRUSTED,
    ),
    "another name": (
        StoreUnavailable,
        "certificate of Postgres is not accepted: .*IP address mismatch.*127.0.0.1",
        StoreProblem.UNTRUSTED,
    ),
}


async def test_what_is_wrong_about_certificates_of_postgres_is_said(servers: TlsServers, no_home: None) -> None:
    for name, url in database_urls(servers).items():
        kind, told, problem = DATABASE_TROUBLES[name]
        with pytest.raises(AgentrunError, match=told) as refused:
            await connect(url)
        assert isinstance(refused.value, kind), name
        pool = await create_pool(url, 1)
        with pytest.raises(kind, match=told) as refused, unavailable():
            await pool.fetchval("SELECT 1")
        await pool.close()
        assert PASSWORD not in str(refused.value)
        assert (await ask_database(url))[0].schema.problem is problem, name


async def test_migrate_says_it_in_one_line(servers: TlsServers, no_home: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentrun", "migrate"],
        env={**clean_environment(), "DATABASE_URL": database_urls(servers)["another authority"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "certificate" in done.stderr and PASSWORD not in done.stderr


async def test_without_tls_such_a_postgres_lets_nobody_in(servers: TlsServers) -> None:
    with pytest.raises(StoreUnavailable, match="no encryption"):
        await connect(f"{servers.database_url}?sslmode=disable")
    assert (await ask_database(f"{servers.database_url}?sslmode=disable"))[0].schema.problem is StoreProblem.REFUSED


async def look(redis_url: str) -> None:
    client = await connection.connect(redis_url)
    try:
        await connection.check(client)
    finally:
        await client.aclose()


async def test_what_is_wrong_about_certificates_of_redis_is_said(servers: TlsServers) -> None:
    by_address = servers.redis_url.replace("localhost", "127.0.0.1")
    wrong = {
        f"{servers.redis_url}": ("certificate of Redis is not accepted", StoreProblem.UNTRUSTED),
        f"{servers.redis_url}?ssl_ca_certs={servers.other_authority}": (
            "certificate of Redis is not accepted",
            StoreProblem.UNTRUSTED,
        ),
        f"{by_address}?ssl_ca_certs={servers.authority}": ("certificate of Redis is not accepted", StoreProblem.UNTRUSTED),
        f"{servers.redis_url}?ssl_ca_certs=/nowhere/ca.crt": ("ssl_ca_certs /nowhere/ca.crt", StoreProblem.BAD_CERTIFICATE),
        f"{servers.redis_url}?ssl_ca_certs={__file__}": ("ssl_ca_certs .*: no certificate", StoreProblem.BAD_CERTIFICATE),
        f"{servers.redis_url.replace('rediss', 'redis')}": ("Redis cannot be reached", StoreProblem.UNREACHABLE),
    }
    for url, (told, problem) in wrong.items():
        with pytest.raises((BusUnavailable, ConfigurationError), match=told):
            await look(url)
        assert (await ask_redis(url))[0].problem is problem, url
