"""One connection that follows any number of channels and comes back by itself.

Messages sent while it was away are lost; whoever needs them compares with Postgres when `on_reconnect` is called.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import structlog
from redis.asyncio import ConnectionPool

from agentrun.bus.connection import CONNECT_SECONDS, answering, new_connection

T = TypeVar("T")
Callback = Callable[[T], None]

ACK_SECONDS = 1.0
SILENCE_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
CHANNELS_PER_COMMAND = 500
MESSAGES_PER_TURN = 50

_log = structlog.get_logger(__name__)


class _Link:
    """What one connection has asked for and what the server has confirmed. A new connection begins with a new one."""

    def __init__(self, connection: Any, channels: set[str]) -> None:
        self.connection = connection
        self.dirty = channels  # to be compared with what is wanted
        self.changed = asyncio.Event()
        self.given_up = False
        self.sent: set[str] = set()
        self.unconfirmed: dict[str, int] = {}  # subscriptions on their way; two if one was ended in between
        self.missing = set(channels)  # of those wanted at the start; empty: all is as before the loss
        self.changed.set()

    def touch(self, channel: str) -> None:
        self.dirty.add(channel)
        self.changed.set()

    def live(self, channel: str) -> bool:
        return channel in self.sent and channel not in self.unconfirmed


class Subscriptions(Generic[T]):
    """Callbacks by channel. Belongs to one event loop; its task starts with the first subscription."""

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        decode: Callable[[bytes], T],
        on_reconnect: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._decode = decode
        self.on_reconnect = on_reconnect
        self._callbacks: dict[str, list[Callback[T]]] = {}
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        self._link: _Link | None = None
        self._away = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self._link is not None

    async def subscribe(self, channel: str, callback: Callback[T]) -> bool:
        """Calls `callback` with each message of the channel from now on.

        True once the server has confirmed it: everything published afterwards arrives. False if Redis is away or does not
        confirm in time: the subscription stands nevertheless, and `on_reconnect` tells when it works.
        """
        self._callbacks.setdefault(channel, []).append(callback)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="subscriptions")
        if self._link is not None:
            if self._link.live(channel):
                return True
            self._link.touch(channel)
        elif self._away:
            return False
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(channel, []).append(confirmed)
        try:
            async with asyncio.timeout(ACK_SECONDS):
                return await confirmed
        except TimeoutError:
            self._late(channel)
            return False
        except asyncio.CancelledError:
            self.unsubscribe(channel, callback)
            raise

    def unsubscribe(self, channel: str, callback: Callback[T]) -> None:
        """Ends one subscription; the channel is left when its last one ends. Does nothing if it has ended before."""
        callbacks = self._callbacks.get(channel, [])
        if callback in callbacks:
            callbacks.remove(callback)
        if not callbacks and self._callbacks.pop(channel, None) is not None and self._link is not None:
            self._link.touch(channel)

    def reconnect(self) -> None:
        """Gives up the connection and makes another one: this one leads to a server that is not the right one any more."""
        if self._link is not None:
            self._link.given_up = True
            self._link.changed.set()

    async def aclose(self) -> None:
        """Ends all subscriptions and the connection."""
        self._callbacks.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._confirm_all(live=False)

    async def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._serve(await self._connect())
            except Exception as error:  # whatever it was: readers depend on this task, so it never ends by itself
                self._lost(error)
            if time.monotonic() - began > LONGEST_PAUSE_SECONDS:  # it stood for a while
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _connect(self) -> Any:
        async with answering(self._pool, CONNECT_SECONDS):
            connection = new_connection(self._pool)
            await connection.connect()
        return connection

    async def _serve(self, connection: Any) -> None:
        link = _Link(connection, set(self._callbacks))
        self._link = link
        try:
            if not link.missing:
                self._complete()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._write(link))
                both.create_task(self._read(link))
        finally:
            self._link = None
            await connection.disconnect(nowait=True)

    def _lost(self, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if not self._away:
            _log.warning("subscriptions are cut off from Redis", error=str(error) or repr(error))
        self._away = True
        self._confirm_all(live=False)

    def _late(self, channel: str) -> None:
        """A subscriber was told that it does not work yet: it will want to know when it does."""
        if self._link is not None and not self._link.live(channel):
            self._away = True
            self._link.missing.add(channel)

    def _confirm_all(self, *, live: bool) -> None:
        for channel in list(self._waiting):
            self._confirm(channel, live=live)

    def _confirm(self, channel: str, *, live: bool) -> None:
        for confirmed in self._waiting.pop(channel, ()):
            if not confirmed.done():
                confirmed.set_result(live)

    def _complete(self) -> None:
        """All that was wanted when this connection began is confirmed."""
        if not self._away:
            return
        self._away = False
        _log.info("subscriptions are back")
        if self.on_reconnect is not None:
            self._guarded(self.on_reconnect)

    async def _write(self, link: _Link) -> None:
        """Makes the server's subscriptions what is wanted; whatever changed meanwhile goes into one command."""
        while True:
            await link.changed.wait()
            if link.given_up:
                raise ConnectionError("the connection was given up")
            link.changed.clear()
            changed, link.dirty = link.dirty, set()
            wanted = self._callbacks.keys() & changed
            for channel in changed - wanted:
                self._missing_no_more(link, channel)
            join, leave = sorted(wanted - link.sent), sorted((changed - wanted) & link.sent)
            link.sent.difference_update(leave)
            link.sent.update(join)
            for channel in join:
                link.unconfirmed[channel] = link.unconfirmed.get(channel, 0) + 1
            await self._send(link, "UNSUBSCRIBE", leave)
            await self._send(link, "SUBSCRIBE", join)

    async def _send(self, link: _Link, verb: str, channels: list[str]) -> None:
        for start in range(0, len(channels), CHANNELS_PER_COMMAND):
            await self._command(link, verb, *channels[start : start + CHANNELS_PER_COMMAND])

    async def _command(self, link: _Link, *command: str) -> None:
        if not link.connection.is_connected:  # sending would connect it anew, without the subscriptions
            raise ConnectionError("the connection is closed")
        await link.connection.send_command(*command, check_health=False)

    async def _read(self, link: _Link) -> None:
        asked = False
        count = 0
        while True:
            message = await link.connection.read_response(timeout=SILENCE_SECONDS)
            if message is not None:
                asked = False
                self._take(link, message)
            elif asked:
                raise ConnectionError(f"no answer to a ping within {SILENCE_SECONDS:g} s")
            else:
                asked = True
                await self._command(link, "PING")
            count += 1
            if count % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)  # what is buffered is read without waiting: others get their turn

    def _take(self, link: _Link, message: Any) -> None:
        if isinstance(message, Exception):
            raise message
        if not isinstance(message, list) or len(message) != 3:
            return
        kind, name, content = message
        channel = name.decode() if isinstance(name, bytes) else ""
        if kind == b"message":
            self._deliver(channel, content)
        elif kind == b"subscribe":
            left = link.unconfirmed.pop(channel, 1) - 1
            if left:
                link.unconfirmed[channel] = left
            elif channel in link.sent:
                self._confirm(channel, live=True)
                self._missing_no_more(link, channel)

    def _missing_no_more(self, link: _Link, channel: str) -> None:
        if link.missing:
            link.missing.discard(channel)
            if not link.missing:
                self._complete()

    def _deliver(self, channel: str, content: bytes) -> None:
        callbacks = self._callbacks.get(channel)
        if not callbacks:
            return
        try:
            message = self._decode(content)
        except Exception as error:  # anybody can publish anything
            _log.warning("a message cannot be read", channel=channel, error=str(error))
            return
        for callback in tuple(callbacks):
            self._guarded(callback, message)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """One subscriber's fault is not the others'."""
        try:
            function(*arguments)
        except Exception:
            _log.exception("a subscriber failed")


async def follow(pool: ConnectionPool, channel: str, decode: Callable[[bytes], T], callback: Callback[T]) -> None:
    """Calls `callback` with each message of one channel, until it is cancelled."""
    forever: Awaitable[None] = asyncio.get_running_loop().create_future()
    async with Subscriptions(pool, decode=decode) as subscriptions:
        await subscriptions.subscribe(channel, callback)
        await forever
