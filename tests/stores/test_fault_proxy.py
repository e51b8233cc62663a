"""The fault proxy does what the tests of outages and lost answers believe it does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest
import redis.asyncio
from fault_proxy import FaultProxy, database_url_through, fault_proxy
from store_servers import PrivateServer
from waiting import eventually

GONE = (asyncpg.PostgresConnectionError, ConnectionError, asyncpg.InterfaceError)
INSERT = "INSERT INTO t (x) VALUES ($1)"


@pytest.fixture(params=["unix", "tcp"])
async def proxy(request: pytest.FixtureRequest, empty_database_url: str) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(empty_database_url, over_tcp=request.param == "tcp") as started:
        yield started


@pytest.fixture
async def direct(empty_database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute("CREATE TABLE t (x int)")
    yield connection
    await connection.close()


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(proxy.url, timeout=5)
    try:
        yield connection
    finally:
        connection.terminate()


async def rows(direct: asyncpg.Connection) -> list[int]:
    return [row["x"] for row in await direct.fetch("SELECT x FROM t ORDER BY x")]


async def test_bytes_pass_unchanged(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        await connection.executemany(INSERT, [(n,) for n in range(2000)])
        text = await connection.fetchval("SELECT repeat('x', 3000000)")
    assert len(await rows(direct)) == 2000
    assert len(text) == 3_000_000


async def test_another_database_of_the_server_is_reached_through_the_same_proxy(
    proxy: FaultProxy, empty_database_url: str
) -> None:
    another = urlsplit(empty_database_url)._replace(path="/postgres").geturl()
    connection = await asyncpg.connect(database_url_through(proxy, another))
    try:
        assert await connection.fetchval("SELECT current_database()") == "postgres"
    finally:
        connection.terminate()


async def test_a_lost_reply_means_committed_and_cut(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        await connection.execute(INSERT, 1)
        fault = proxy.lose_reply("INSERT INTO t")
        with pytest.raises(GONE):
            await connection.execute(INSERT, 2)
        await fault.seen(within=5)
    assert await rows(direct) == [1, 2]
    async with connected(proxy) as connection:
        await connection.execute(INSERT, 3)
    assert await rows(direct) == [1, 2, 3]


async def test_a_statement_that_was_prepared_earlier_is_recognised(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        statement = await connection.prepare(INSERT)
        proxy.lose_reply("INSERT INTO t")
        with pytest.raises(GONE):
            await statement.fetch(7)
    assert await rows(direct) == [7]


async def test_the_reply_to_a_commit_can_be_lost(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        proxy.lose_reply("COMMIT")
        with pytest.raises(GONE):
            async with connection.transaction():
                await connection.execute(INSERT, 1)
    assert await rows(direct) == [1]


async def test_a_fault_happens_as_often_as_asked(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    fault = proxy.lose_reply("INSERT INTO t", times=2)
    for number in (1, 2):
        async with connected(proxy) as connection:
            with pytest.raises(GONE):
                await connection.execute(INSERT, number)
    async with connected(proxy) as connection:
        await connection.execute(INSERT, 3)
    assert fault.count == 2
    assert await rows(direct) == [1, 2, 3]


async def test_a_lost_request_changes_nothing(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        fault = proxy.lose_request("INSERT INTO t")
        with pytest.raises(GONE):
            await connection.execute(INSERT, 1)
    await fault.seen(within=5)
    assert await rows(direct) == []


async def test_a_held_request_arrives_when_released(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        fault = proxy.hold_request("INSERT INTO t")
        insert = asyncio.create_task(connection.execute(INSERT, 1))
        await fault.seen(within=5)
        assert await rows(direct) == []
        fault.release()
        await insert
    assert await rows(direct) == [1]


@pytest.mark.parametrize("leaving", ["client closes", "proxy cuts"])
async def test_a_held_request_arrives_although_its_client_has_gone(
    proxy: FaultProxy, direct: asyncpg.Connection, leaving: str
) -> None:
    async with connected(proxy) as connection:
        fault = proxy.hold_request("INSERT INTO t")
        insert = asyncio.create_task(connection.execute(INSERT, 1))
        await fault.seen(within=5)
        if leaving == "proxy cuts":
            await proxy.cut()
        else:
            connection.terminate()
        with pytest.raises(GONE):
            await insert
    assert await rows(direct) == []
    fault.release()
    await fault.answered(within=5)
    assert await rows(direct) == [1]
    await eventually(lambda: proxy.connections == 0, within=5, what="the late connection ends")


async def test_freeze_holds_every_byte_and_no_connection_breaks(proxy: FaultProxy, direct: asyncpg.Connection) -> None:
    async with connected(proxy) as connection:
        proxy.freeze()
        with pytest.raises(TimeoutError):
            await asyncpg.connect(proxy.url, timeout=0.2)
        insert = asyncio.create_task(connection.execute(INSERT, 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(insert), 0.2)
        assert await rows(direct) == []
        proxy.thaw()
        await insert
    assert await rows(direct) == [1]


async def test_cut_resets_and_refuse_keeps_out_until_accept(proxy: FaultProxy) -> None:
    async with connected(proxy) as connection:
        async with proxy.outage():
            with pytest.raises(GONE):
                await connection.fetchval("SELECT 1")
            with pytest.raises(OSError):
                await asyncpg.connect(proxy.url, timeout=2)
        async with connected(proxy) as again:
            assert await again.fetchval("SELECT 1") == 1


async def test_refuse_alone_leaves_connections_in_peace(proxy: FaultProxy) -> None:
    async with connected(proxy) as connection:
        await proxy.refuse()
        assert await connection.fetchval("SELECT 1") == 1


async def test_delay_is_added_to_every_round_trip(proxy: FaultProxy) -> None:
    loop = asyncio.get_running_loop()
    async with connected(proxy) as connection:
        proxy.delay(0.1)
        before = loop.time()
        await connection.execute("SELECT 1")
        slow = loop.time() - before
        proxy.delay(0)
    assert slow >= 0.2


async def test_a_dead_server_ends_its_clients(private_postgres: PrivateServer) -> None:
    async with fault_proxy(private_postgres.url) as proxy, connected(proxy) as connection:
        await private_postgres.kill()
        with pytest.raises(GONE):
            await connection.fetchval("SELECT 1")
        with pytest.raises((OSError, *GONE)):
            await asyncpg.connect(proxy.url, timeout=2)
        await private_postgres.start()
        async with connected(proxy) as again:
            assert await again.fetchval("SELECT 1") == 1


@pytest.mark.parametrize("over_tcp", [False, True])
async def test_redis_replies_can_be_lost_and_its_outages_made(redis_url: str, over_tcp: bool) -> None:
    async with (
        fault_proxy(redis_url, over_tcp=over_tcp) as proxy,
        redis.asyncio.Redis.from_url(proxy.url, retry=None) as through,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        await through.ping()
        fault = proxy.lose_reply("XADD")
        with pytest.raises(redis.ConnectionError):
            await through.xadd("stream", {"a": "1"})
        assert fault.count == 1
        assert await client.xlen("stream") == 1
        async with proxy.outage():
            with pytest.raises(redis.ConnectionError):
                await through.ping()
        assert await through.xlen("stream") == 1
