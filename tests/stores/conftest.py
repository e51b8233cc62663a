"""The whole tier is skipped, with the reason, on a machine that has no Postgres or no Redis.

room     a gateway in this event loop, ready, with nothing in its stores; it is the module's (`shared`), as starting one takes longer than
         most tests. A module of such tests sets `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gateway_bench import Room, shared_gateway
from store_servers import Databases, why_not

from agentrun.dev.stores import StoreUrls

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Databases, store_urls: StoreUrls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Room]:
    async with shared_gateway(databases, store_urls, tmp_path_factory.mktemp("gateway")) as room:
        yield room


@pytest_asyncio.fixture(loop_scope="module")
async def room(shared: Room) -> Room:
    return await shared.empty()
