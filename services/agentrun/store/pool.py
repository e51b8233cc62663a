"""Connections to Postgres, and what of its errors means "try again later".

Ids come as `uuid.UUID`; json and jsonb come and go as text, since most of it is passed through unread.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from agentrun.domain.errors import StoreUnavailable

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
    Executor: TypeAlias = Pool | Connection
else:
    Pool = asyncpg.Pool
    Connection = asyncpg.Connection
    Executor = asyncpg.Pool | asyncpg.Connection

COMMAND_TIMEOUT_SECONDS = 30.0
CONNECT_TIMEOUT_SECONDS = 5.0

_PASSING = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)


@contextlib.contextmanager
def unavailable() -> Iterator[None]:
    """Turns the errors that pass by themselves into StoreUnavailable. Whether the last statement took effect is not known then."""
    try:
        yield
    except _PASSING as error:
        if isinstance(error, asyncpg.InterfaceError) and isinstance(error, asyncpg.DataError | ValueError):
            raise  # a value that does not fit its parameter: the caller's bug, not the server's state
        raise StoreUnavailable(f"Postgres does not answer ({type(error).__name__}: {error}); try again later") from error


async def create_pool(dsn: str, size: int, *, name: str = "agentrun") -> Pool:
    """A pool of at most `size` connections, none opened yet, so that a process can start while Postgres is away."""
    return await asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=size,
        command_timeout=COMMAND_TIMEOUT_SECONDS,
        timeout=CONNECT_TIMEOUT_SECONDS,
        max_inactive_connection_lifetime=120.0,
        server_settings={"application_name": name},
    )


async def connect(dsn: str, *, name: str = "agentrun", command_timeout: float | None = COMMAND_TIMEOUT_SECONDS) -> Connection:
    """One connection of its own. Raises StoreUnavailable."""
    with unavailable():
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=command_timeout,
            server_settings={"application_name": name},
        )
