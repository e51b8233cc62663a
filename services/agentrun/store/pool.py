"""Connections to Postgres, and what of its errors means "try again later".

Ids come as `uuid.UUID`; json and jsonb come and go as text, since most of it is passed through unread.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from agentrun.certificates import wrong_file
from agentrun.domain.errors import ConfigurationError, StoreUnavailable

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

# What of a URL names a file, and the variable that does so too (https://www.postgresql.org/docs/current/libpq-connect.html).
_FILES = {"sslrootcert": "PGSSLROOTCERT", "sslcert": "PGSSLCERT", "sslkey": "PGSSLKEY", "sslcrl": "PGSSLCRL"}

# Errors that are about the values of this very statement: another try, or another server, would refuse them too.
# Classes 22 data exception, 23 integrity constraint violation, 54 program limit exceeded of PostgreSQL's appendix A.
_VALUES = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
# Any other error of the server or of the way to it is its state: shut down, read-only, a database that takes no connections, a password
# that is being rotated, a schema that is not there yet. It passes, or somebody mends it.
_STATE = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# Classes 28 and 3D: Postgres is there and knows no such role, password or database. It may come to know them, so it is a state too.
_UNKNOWN_NAMES = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)


class CertificateUnreadable(ConfigurationError):
    """A file of certificates that the URL names, or that its sslmode needs, cannot be used."""


class CertificateRefused(StoreUnavailable):
    """The server's certificate is not signed by the authority that was named, is for another host, or has expired."""


class NoTls(StoreUnavailable):
    """The URL asks for TLS, and the server speaks none."""


@contextlib.contextmanager
def unavailable() -> Iterator[None]:
    """Turns every error that is not about the statement's values into StoreUnavailable; whether the last statement took effect is not
    known then. Errors about values (PostgresError of classes 22, 23, 54, and values that do not fit their parameter) pass through.
    """
    try:
        yield
    except _VALUES:
        raise
    except _UNKNOWN_NAMES as error:
        raise StoreUnavailable(
            f"Postgres refuses the connection: {error}; create what is missing, or correct DATABASE_URL"
        ) from error
    except _STATE as error:
        if isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError):
            raise  # asyncpg's own DataError: a value that does not fit its parameter
        raise StoreUnavailable(f"Postgres does not answer ({type(error).__name__}: {error}); try again later") from error


@contextlib.contextmanager
def connection_lost() -> Iterator[None]:
    """Turns only the loss of the connection into StoreUnavailable, for statements whose own errors must be seen, such as migrations."""
    try:
        yield
    except (
        OSError,
        TimeoutError,
        asyncpg.PostgresConnectionError,
        asyncpg.OperatorInterventionError,
        asyncpg.InterfaceError,
    ) as error:
        raise StoreUnavailable(f"the connection to Postgres was lost ({type(error).__name__}: {error}); try again") from error


async def create_pool(dsn: str, size: int, *, name: str = "agentrun") -> Pool:
    """A pool of at most `size` connections, none opened yet, so that a process can start while Postgres is away."""
    return await asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=size,
        connect=_connect,
        command_timeout=COMMAND_TIMEOUT_SECONDS,
        timeout=CONNECT_TIMEOUT_SECONDS,
        max_inactive_connection_lifetime=120.0,
        server_settings={"application_name": name},
    )


async def connect(dsn: str, *, name: str = "agentrun", command_timeout: float | None = COMMAND_TIMEOUT_SECONDS) -> Connection:
    """One connection of its own. Raises StoreUnavailable, and ConfigurationError for a DSN that means nothing.

    Both have subclasses in this module for what is wrong about TLS.
    """
    with unavailable():
        return await _connect(
            dsn,
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=command_timeout,
            server_settings={"application_name": name},
        )


async def _connect(*arguments: Any, **options: Any) -> "asyncpg.Connection[asyncpg.Record]":
    try:
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(*arguments, **options)
        return connection
    except ssl.SSLCertVerificationError as error:  # a ValueError, too
        raise CertificateRefused(
            f"the certificate of Postgres is not accepted: {error.verify_message}; check sslrootcert in DATABASE_URL, and the host's name"
        ) from error
    except ValueError as error:  # asyncpg.ClientConfigurationError is one
        said = str(error).partition("\n")[0]
        if said.startswith("root certificate file"):
            raise CertificateUnreadable(
                f"DATABASE_URL, or a PG variable of the environment: {said}; name the file of the authority as sslrootcert"
            ) from None
        raise ConfigurationError(f"DATABASE_URL, or a PG variable of the environment: {said}; correct it") from None
    except OSError as error:
        if wrong := wrong_file(_files(arguments[0]), authorities=frozenset({"sslrootcert"})):
            raise CertificateUnreadable(f"DATABASE_URL, or a PG variable of the environment: {wrong}; correct it") from None
        if "rejected SSL upgrade" in str(error):
            raise NoTls("Postgres speaks no TLS, which sslmode in DATABASE_URL asks for; switch it on there") from error
        raise


def _files(dsn: str) -> dict[str, str]:
    """The files that are asked for, by parameter."""
    query = dict(parse_qsl(urlsplit(dsn).query))
    found = {name: query.get(name) or os.environ.get(variable, "") for name, variable in _FILES.items()}
    return {name: path for name, path in found.items() if path}
