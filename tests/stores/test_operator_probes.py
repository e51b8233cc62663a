"""What the operator finds out about stores, and that stores that hang keep nobody waiting."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from redis.asyncio import Redis
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.store import migrations
from agentrun_operator.facts import QueueFact, SchemaFact, StoreProblem
from agentrun_operator.probes import StoreProbes
from agentrun_operator.resources import Key

KEY = Key("shop", "support")


class Told(list[Key]):
    """The AgentRuns whose stores changed."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def probes(told: Told) -> AsyncIterator[StoreProbes]:
    made = StoreProbes(told.append, seconds=2.0, retry_seconds=0.2)
    yield made
    await made.aclose()


async def schema(probes: StoreProbes, url: str, key: Key = KEY) -> SchemaFact:
    return await eventually(lambda: probes.schema(key, url), within=10, what="the database is known")


async def queue(probes: StoreProbes, url: str, key: Key = KEY) -> QueueFact:
    return await eventually(lambda: probes.queue(key, url), within=10, what="the Redis is known")


async def test_a_migrated_database_and_its_owner(probes: StoreProbes, empty_database_url: str) -> None:
    assert await schema(probes, empty_database_url) == SchemaFact(migrations.LATEST)
    await migrations.migrate(empty_database_url, owner="shop/support", say=lambda _: None)
    probes.invalidate_database(empty_database_url)

    async def is_ready() -> bool:
        found = await probes.schema(KEY, empty_database_url)
        return found == SchemaFact(migrations.LATEST, migrations.LATEST, 1, "shop/support")

    await eventually(is_ready, within=5, what="the migration is seen")
    database = probes.known_database(empty_database_url)
    assert database is not None and (database.dead_lettered, database.schedules) == (0, 0)


async def test_whoever_asked_is_told_when_the_answer_changes(probes: StoreProbes, told: Told, empty_database_url: str) -> None:
    other = Key("shop", "other")
    await schema(probes, empty_database_url)
    await schema(probes, empty_database_url, other)
    told.clear()
    await migrations.migrate(empty_database_url, say=lambda _: None)
    await eventually(lambda: {KEY, other} <= {*told}, within=10, what="both are told, without asking again")


async def test_a_database_of_another_application(probes: StoreProbes, empty_database_url: str) -> None:
    conn = await asyncpg.connect(empty_database_url)
    await conn.execute("CREATE TABLE invoices (id integer)")
    await conn.close()
    assert (await schema(probes, empty_database_url)).problem is StoreProblem.OTHER_APPLICATION


async def test_what_is_no_database(probes: StoreProbes, database_url: str, tmp_path: Path) -> None:
    wrong = {
        "": StoreProblem.BAD_URL,
        "hello": StoreProblem.BAD_URL,
        "redis://localhost": StoreProblem.BAD_URL,
        "postgresql://u@h:notaport/d": StoreProblem.BAD_URL,
        f"postgresql://u@/d?host={tmp_path}": StoreProblem.UNREACHABLE,
        "postgresql://u@does-not-exist.invalid/d": StoreProblem.UNREACHABLE,
    }
    for url, problem in wrong.items():
        assert (await schema(probes, url)).problem is problem, url
    absent = urlunsplit(urlsplit(database_url)._replace(path="/no_such_database"))
    assert (await schema(probes, absent)).problem is StoreProblem.REFUSED


async def test_a_good_redis(probes: StoreProbes, redis_url: str) -> None:
    assert await queue(probes, redis_url) == QueueFact()


async def test_a_redis_that_may_evict_is_refused_until_it_may_not(probes: StoreProbes, private_redis: PrivateServer) -> None:
    client: Redis = await connect(private_redis.url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    assert (await queue(probes, private_redis.url)).problem is StoreProblem.EVICTS
    await client.config_set("maxmemory-policy", "noeviction")

    async def is_good() -> bool:
        return await probes.queue(KEY, private_redis.url) == QueueFact()

    await eventually(is_good, within=5, what="the change is seen")
    await client.aclose()


async def test_what_is_no_redis(probes: StoreProbes, private_redis: PrivateServer, tmp_path: Path) -> None:
    client: Redis = await connect(private_redis.url)
    await client.config_set("requirepass", "secret")
    await client.aclose()
    wrong = {
        "": StoreProblem.BAD_URL,
        "postgresql://localhost": StoreProblem.BAD_URL,
        f"unix://{tmp_path}/nobody.sock": StoreProblem.UNREACHABLE,
    }
    for url, problem in wrong.items():
        assert (await queue(probes, url)).problem is problem, url
    assert (await queue(probes, private_redis.url)).problem is StoreProblem.REFUSED


async def test_a_redis_below_7_is_too_old(probes: StoreProbes, tmp_path: Path) -> None:
    """A stand-in that says so: no such server is at hand."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        facts = b"redis_version:6.2.14\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n"
        while line := await reader.readline():
            if line.strip().upper() == b"INFO":
                writer.write(b"$%d\r\n%s\r\n" % (len(facts), facts))
            elif line.strip().upper() == b"CLIENT":
                writer.write(b"+OK\r\n")
        writer.close()

    path = tmp_path / "old.sock"
    async with await asyncio.start_unix_server(answer, str(path)):
        assert (await queue(probes, f"unix://{path}")).problem is StoreProblem.TOO_OLD


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[str]:
    """The path of a socket that takes connections and never says a word; named as Postgres looks for it."""
    path = tmp_path / ".s.PGSQL.5432"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(100)
        yield str(path)


async def test_ko_10_stores_that_hang_keep_nobody_waiting(told: Told, hanging: str, database_url: str, redis_url: str) -> None:
    """One loop asks about sixty stores that hang and then about two that work; nothing blocks the loop meanwhile."""
    probes = StoreProbes(told.append, connections=4, seconds=2.0, retry_seconds=0.1)
    folder = str(Path(hanging).parent)
    stalls = 0

    async def watch_the_loop() -> None:
        nonlocal stalls
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            stalls += time.monotonic() - begun > 0.4

    watching = asyncio.create_task(watch_the_loop())
    for number in range(30):
        key = Key("shop", f"bad{number}")
        async with asyncio.timeout(10):  # far less than all stores together have
            await probes.schema(key, f"postgresql://u{number}@/d?host={folder}")
            await probes.queue(key, f"unix://{hanging}?db={number}")
    async with asyncio.timeout(10):
        found = await schema(probes, database_url)
        works = await queue(probes, redis_url)
    watching.cancel()
    await probes.aclose()
    assert found.problem is None and works == QueueFact()
    assert stalls < 20, "a busy machine stalls the loop now and then, a probe that blocks it would sixty times"


async def test_stores_that_hang_have_places_of_their_own_from_the_second_time_on(
    told: Told, hanging: str, database_url: str
) -> None:
    probes = StoreProbes(told.append, connections=2, seconds=2.0, retry_seconds=0.05)
    folder = str(Path(hanging).parent)
    for number in range(4):
        key = Key("shop", f"bad{number}")
        assert (await schema(probes, f"postgresql://u{number}@/d?host={folder}", key)).problem is StoreProblem.UNREACHABLE
    begun = time.monotonic()
    assert (await schema(probes, database_url)).problem is None
    assert time.monotonic() - begun < 1.6
    await probes.aclose()


async def test_ko_10_a_crowd_of_stores_that_hang_on_one_server_holds_up_no_other_server(
    told: Told, hanging: str, database_url: str, redis_url: str
) -> None:
    """Each of them has its first look still before it: two places and two seconds each would be forty seconds."""
    probes = StoreProbes(told.append, connections=2, seconds=2.0)
    folder = str(Path(hanging).parent)

    async def bad(number: int) -> None:
        key = Key("shop", f"bad{number}")
        asked = (
            probes.schema(key, f"postgresql://u:p@/d{number}?host={folder}"),
            probes.queue(key, f"unix://{hanging}?db={number}"),
        )
        assert await asyncio.gather(*asked) == [None, None]

    await asyncio.gather(*map(bad, range(40)))
    assert (await schema(probes, database_url)).problem is None
    assert await queue(probes, redis_url) == QueueFact()
    await probes.aclose()


async def test_many_agentruns_of_one_redis_are_one_question(probes: StoreProbes, redis_url: str) -> None:
    client: Redis = await connect(redis_url)
    await client.config_resetstat()
    for number in range(50):
        await queue(probes, redis_url, Key("shop", f"a{number}"))
    stats = await client.info("commandstats")
    await client.aclose()
    assert stats["cmdstat_info"]["calls"] <= 2


async def test_what_nobody_asks_about_any_more_is_dropped(probes: StoreProbes, redis_url: str, database_url: str) -> None:
    await queue(probes, redis_url)
    await schema(probes, database_url)
    probes.forget(KEY)
    assert probes.known_database(database_url) is None
