"""Connections to Redis, how long they wait, and what their errors mean.

redis-py sends a command again by itself when its answer is late, which adds an entry twice; its retries are off here. Its
socket limits are off too: `answering` limits a whole operation instead. (Up to Python 3.11 the library's limit on sending can
swallow a cancellation, and a limit per socket read does not cover waiting for a connection.)
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from agentrun.certificates import wrong_file
from agentrun.domain.errors import AgentrunError, BusMisconfigured, BusUnavailable, ConfigurationError

ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 5.0
POOL_SIZE = 16
OLDEST_REDIS = (7, 0)

# Codes with which Redis refuses for now: loading its data, out of memory, busy with a script…
_FOR_NOW = frozenset({"LOADING", "MASTERDOWN", "OOM", "MISCONF", "NOREPLICAS", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED"})


class GroupMissing(BusUnavailable):
    """The work stream or its group is gone: Redis was emptied, or lost what it had not saved."""


class ReadOnly(BusUnavailable):
    """This is a replica: after a failover, connections that were made before it still lead there."""


class LoginRefused(BusUnavailable):
    """The user or the password is wrong, or not yet known to this server."""


class CertificateUnreadable(ConfigurationError):
    """A file of certificates that the URL names cannot be used."""


class CertificateRefused(BusUnavailable):
    """The server's certificate is not signed by an authority that is known here, is for another host, or has expired."""


class TooOld(BusMisconfigured):
    """This Redis is below the oldest version that has what is needed."""


class MayEvict(BusMisconfigured):
    """maxmemory-policy lets this Redis drop keys."""


class Pool(ConnectionPool):
    """At most `size` connections are in use; who comes later waits. Cancellation at any point loses no place."""

    def __init__(self, size: int = POOL_SIZE, **options: Any) -> None:
        super().__init__(max_connections=size, **options)
        self._places = asyncio.Semaphore(size)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """A connection that is ready for a command."""
        await self._places.acquire()
        # When it fails it releases the connection, and with it the place.
        return await super().get_connection()  # type: ignore[no-untyped-call]

    async def release(self, connection: Any) -> None:
        """Takes it back."""
        try:
            await super().release(connection)
        finally:
            self._places.release()


class DedicatedConnection:
    """One connection outside the pool, for a command that blocks: it makes nobody wait for a connection.

    After an error or a cancellation the connection is closed, so an answer that comes late reaches nobody.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._connection = new_connection(pool)
        self._turn = asyncio.Lock()

    async def call(self, *command: str | int | bytes) -> Any:
        """Sends a command and returns its plain answer. Callers take turns."""
        async with self._turn:
            try:
                await self._connection.connect()
                await self._connection.send_command(*command)
                return await self._connection.read_response()
            except BaseException:
                await self._connection.disconnect(nowait=True)
                raise

    async def aclose(self) -> None:
        """Closes the connection; the next call opens it again."""
        await self._connection.disconnect(nowait=True)


def pool(url: str, *, size: int = POOL_SIZE) -> Pool:
    """A pool with the settings of this module. Raises ConfigurationError if it is not a Redis URL, or names a file that cannot be used."""
    try:
        _check_files(url)
        return Pool.from_url(
            url,
            size=size,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=CONNECT_SECONDS,
            protocol=2,
            client_name="agentrun",
            driver_info=None,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"REDIS_URL: scheme {urlsplit(url).scheme!r}: {error}; use redis://host:port/0, rediss://host:port/0 or unix:///path"
        ) from error


def _check_files(url: str) -> None:
    query = dict(parse_qsl(urlsplit(url).query))
    named: dict[str, str] = {name: query[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in query}
    if wrong := wrong_file(named, authorities=frozenset({"ssl_ca_certs"})):
        raise CertificateUnreadable(f"REDIS_URL: {wrong}; correct it")


async def connect(url: str, *, size: int = POOL_SIZE) -> Redis:
    """A client for commands that do not block. Does no I/O yet, so a process may start while Redis is away."""
    return Redis.from_pool(pool(url, size=size))


def new_connection(pool: ConnectionPool) -> Any:
    """A connection with the pool's settings that does not belong to it, not connected yet."""
    return pool.make_connection()  # type: ignore[no-untyped-call]


def script(redis: Redis, name: str) -> AsyncScript:
    """The Lua script of that name beside this module: sent as its digest, and loaded again when Redis does not know it."""
    return redis.register_script(source(name))


@cache
def source(name: str) -> str:
    """The text of that script."""
    return (files(__package__) / f"{name}.lua").read_text()


@asynccontextmanager
async def answering(pool: ConnectionPool, seconds: float = ANSWER_SECONDS) -> AsyncIterator[None]:
    """Limits what is done inside, and turns every error of Redis into one of ours.

    When it turns out to be a replica, the pool's connections are dropped: new ones lead to the primary.
    """
    try:
        with _translated(seconds):
            async with asyncio.timeout(seconds):
                yield
    except ReadOnly:
        await pool.disconnect(inuse_connections=False)
        raise


@contextmanager
def _translated(seconds: float) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise translate(error) from error
    except TimeoutError as error:
        raise BusUnavailable(f"Redis did not answer within {seconds:g} s: see whether it hangs or is overloaded") from error
    except OSError as error:
        raise BusUnavailable(f"Redis cannot be reached: {error}") from error


def refusal(text: str) -> AgentrunError:
    """What an error reply means."""
    code = text.partition(" ")[0]
    if code == "NOGROUP":
        return GroupMissing(f"the work stream's group is missing: {text}")
    if code == "READONLY":
        return ReadOnly(f"Redis is a read-only replica: {text}; see that REDIS_URL leads to the primary")
    if code in _FOR_NOW:
        return BusUnavailable(f"Redis refuses commands for now: {text}")
    return BusMisconfigured(f"Redis refuses a command: {text}; check the user's permissions and who else uses these keys")


def translate(error: RedisError) -> AgentrunError:
    """The error of ours that says what an error of the library means."""
    # On a Unix socket the library wraps it, and a missing login comes as a lost connection.
    refused = any(isinstance(one, AuthenticationError) for one in (error, error.__cause__))
    if refused or "Authentication required" in str(error):
        return LoginRefused(f"Redis refuses the login: {error}; check the user and password in REDIS_URL")
    if isinstance(error, ResponseError):
        return refusal(_reply(error))
    if isinstance(error, BusyLoadingError):
        return BusUnavailable("Redis is still loading its data")
    cause = error.__context__  # the library says it in its own words, from the error that tells
    if isinstance(cause, ssl.SSLCertVerificationError):
        return CertificateRefused(
            f"the certificate of Redis is not accepted: {cause.verify_message}; check ssl_ca_certs in REDIS_URL, and the host's name"
        )
    return BusUnavailable(f"Redis cannot be reached: {error}")


def _reply(error: ResponseError) -> str:
    """The error reply as Redis sent it: the library cuts the codes that it has a class for."""
    code = getattr(error, "status_code", None)
    text = str(error)
    return text if code is None or text.startswith(code) else f"{code} {text}"


async def check(redis: Redis) -> None:
    """Whether this Redis may be used: call it at each start, and after Redis was away.

    Raises BusMisconfigured if it is older than 7.0, may evict keys (maxmemory-policy), or is a cluster: the keys of an
    AgentRun would all be in one slot, but this client does not follow a slot that moves. Raises BusUnavailable if it does
    not answer, is loading or is a replica.
    """
    async with answering(redis.connection_pool):
        facts = await redis.info()
        if facts.get("role") == "slave":
            raise ReadOnly("Redis is a read-only replica: see that REDIS_URL leads to the primary")
    version = str(facts.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise TooOld(f"Redis is version {version}: use Redis 7.0 or later, or Valkey 8 or later")
    if "cluster" in (facts.get("redis_mode"), facts.get("server_mode")):
        raise BusMisconfigured("Redis runs in cluster mode, which is not supported: use a single primary, with replicas or not")
    policy = facts.get("maxmemory_policy", "not shown")
    if policy != "noeviction":
        raise MayEvict(
            f"Redis' maxmemory-policy is {policy}, so it may drop the work stream under memory pressure: set it to noeviction"
        )
    if facts.get("loading"):
        raise BusUnavailable("Redis is still loading its data")
