"""How long a request waits for the database, and what it does about a reply that was lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from agentrun.domain.errors import StoreUnavailable
from agentrun.gateway.problems import store_unavailable

ANSWER_SECONDS = 10.0
"""A request is answered after this time, with 503 if need be, whatever the database does."""

T = TypeVar("T")


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Limits the time that a request waits for the database, and turns its absence into the answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except (StoreUnavailable, TimeoutError):
        raise store_unavailable() from None


async def read_back(call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call that may be made again: if only the reply was lost after the commit, the second finds what the first did."""
    try:
        return await call()
    except StoreUnavailable:
        return await call()
