"""Which servers are accepted, and how long one that hangs is waited for."""

import asyncio
from dataclasses import fields
from inspect import signature
from pathlib import Path
from uuid import uuid4

import pytest
from redis.crc import key_slot
from store_servers import PrivateServer, short_folder

from agentrun.bus import connection
from agentrun.bus.connection import Pool, answering, check, connect
from agentrun.bus.keys import Keys
from agentrun.dev.servers import Redis as RedisServer
from agentrun.domain.errors import BusMisconfigured, BusUnavailable, ConfigurationError

KEYS = Keys("tests", "agent")


async def test_a_sound_server_passes(redis_url: str) -> None:
    redis = await connect(redis_url)
    await check(redis)
    await redis.aclose()


async def test_connecting_needs_no_server_and_checking_says_that_there_is_none(tmp_path: Path) -> None:
    redis = await connect(f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(BusUnavailable):
        await check(redis)
    await redis.aclose()


async def test_an_url_of_another_kind_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ConfigurationError, match="REDIS_URL") as refused:
        await connect("postgres://user:secret@host/0")
    assert "secret" not in str(refused.value)


async def test_a_server_that_is_too_old_is_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redis = await connect(redis_url)
    monkeypatch.setattr(connection, "OLDEST_REDIS", (99, 0))
    with pytest.raises(BusMisconfigured, match="version"):
        await check(redis)
    await redis.aclose()


async def test_rs_20_cluster_mode_is_refused(store_programs: None) -> None:
    with short_folder() as folder:
        sockets = folder / "s"
        sockets.mkdir(mode=0o700)
        server = PrivateServer(RedisServer(folder, sockets, {"cluster-enabled": "yes"}))
        try:
            await server.start()
            redis = await connect(server.url)
            with pytest.raises(BusMisconfigured, match="cluster mode"):
                await check(redis)
            await redis.aclose()
        finally:
            server.discard()


def test_rs_20_all_names_of_an_agentrun_are_in_one_slot() -> None:
    run = uuid4()
    names = [KEYS.runs, KEYS.entries, KEYS.wake, KEYS.run(run), KEYS.live(run), KEYS.control("worker-1")]
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len(set(names)) == 6
    assert not set(names) & {Keys("tests", "agent2").runs, Keys("tests2", "agent").runs}
    assert [field.name for field in fields(Keys)] == list(signature(Keys).parameters) == ["namespace", "name"]


async def test_a_server_that_hangs_is_given_up_and_used_again_later(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url, size=2)
    await check(redis)
    await private_redis.pause()
    try:
        for _ in range(3):
            with pytest.raises(BusUnavailable, match="did not answer"):
                async with answering(redis.connection_pool, 0.1):
                    await redis.get("a")
    finally:
        await private_redis.resume()
    async with asyncio.timeout(5):
        await asyncio.gather(*(check(redis) for _ in range(4)))
    await redis.aclose()


async def test_a_pool_never_opens_more_connections_than_its_size(redis_url: str) -> None:
    redis = await connect(redis_url, size=3)
    await asyncio.gather(*(redis.get("a") for _ in range(50)))
    mine = [one for one in await redis.client_list() if one["name"] == "agentrun"]
    assert len(mine) <= 3
    assert isinstance(redis.connection_pool, Pool)
    await redis.aclose()


async def test_a_command_that_the_server_does_not_permit_is_a_misconfiguration(private_redis: PrivateServer) -> None:
    redis = await connect(private_redis.url)
    await redis.acl_setuser("default", enabled=True, commands=["-get"])
    with pytest.raises(BusMisconfigured, match=r"(?i)get"):
        async with answering(redis.connection_pool):
            await redis.get("a")
    await redis.aclose()
