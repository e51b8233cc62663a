"""Fixtures of all tiers: stores that the session starts itself, and the product's processes.

database_url          a fresh database with all migrations applied, dropped afterwards
empty_database_url    a fresh database with nothing in it
redis_url             the session's Redis, emptied before the test
database_proxy        a FaultProxy in front of database_url (its .url goes through it)
redis_proxy           a FaultProxy in front of redis_url
private_redis         a Redis of this test alone: .url, await .stop() .start() .restart() .kill() .pause() .resume()
private_postgres      a Postgres of this test alone, the same (its database `postgres` is empty)
product_processes     starts `agentrun gateway|worker|scheduler`; their logs are shown when the test fails
store_urls            the session's servers themselves
proof                 takes a line with what a test has measured, for the end of the whole run
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from fault_proxy import FaultProxy, fault_proxy
from hypothesis import settings
from processes import ProductProcesses
from proofs import proof, pytest_terminal_summary
from store_servers import (
    POSTGRES_SETTINGS,
    REDIS_SETTINGS,
    Databases,
    PrivateServer,
    choose_programs,
    private_server,
    short_folder,
    why_not,
)

from agentrun.dev.servers import Postgres, Redis
from agentrun.dev.stores import StoreSettings, StoreUrls, stores

__all__ = ["proof", "pytest_terminal_summary"]

settings.register_profile("agentrun", deadline=None)  # an example may take as long as a busy machine makes it
settings.load_profile("agentrun")

LONG = "AGENTRUN_TEST_LONG"
PROCESSES = pytest.StashKey[ProductProcesses]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get(LONG):
            item.add_marker(pytest.mark.skip(reason=f"{LONG} is not set: takes many minutes; make test-long"))
        if "product_processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def store_programs() -> Iterator[None]:
    """The environment names the programs that the session was asked to use; skips what cannot run here."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = dict(os.environ)
    choose_programs()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def store_urls(store_programs: None) -> Iterator[StoreUrls]:
    with short_folder() as folder, stores(folder / "s", StoreSettings(POSTGRES_SETTINGS, REDIS_SETTINGS)) as urls:
        yield urls


@pytest.fixture(scope="session")
def databases(store_urls: StoreUrls) -> Databases:
    return Databases(store_urls.database_url)


@pytest.fixture
async def database_url(databases: Databases) -> AsyncIterator[str]:
    async with databases.migrated() as url:
        yield url


@pytest.fixture
async def empty_database_url(databases: Databases) -> AsyncIterator[str]:
    async with databases.empty() as url:
        yield url


@pytest.fixture
def redis_url(store_urls: StoreUrls) -> str:
    with redis.Redis.from_url(store_urls.redis_url) as client:
        client.flushall()
        client.config_resetstat()
    return store_urls.redis_url


@pytest.fixture
async def database_proxy(database_url: str) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def redis_proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def private_redis(store_programs: None) -> AsyncIterator[PrivateServer]:
    async with private_server(Redis) as server:
        yield server


@pytest.fixture
async def private_postgres(store_programs: None) -> AsyncIterator[PrivateServer]:
    async with private_server(Postgres) as server:
        yield server


@pytest.fixture
def product_processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProductProcesses]:
    processes = ProductProcesses(tmp_path / "processes")
    request.node.stash[PROCESSES] = processes
    yield processes
    processes.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    processes = item.stash.get(PROCESSES, None)
    if processes is not None and report.failed:
        for process in processes.started:
            report.sections.append((f"log of {process.name} (exit code {process.returncode})", process.log_tail()))
    return report
