"""The end of a connection to Postgres, also to one that answers no more. asyncpg waits for the server's part of it without a limit."""

import asyncio

import asyncpg

from agentrun.store.pool import Connection, Pool

CLOSE_SECONDS = 2.0


async def close(what: Connection | Pool) -> None:
    """Closes a connection or a pool in order; what has not ended after two seconds is cut. Raises nothing."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await what.close()
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        what.terminate()
