"""A proxy that makes network faults on demand, in front of Postgres, Redis or any TCP server.

    async with fault_proxy(database_url) as proxy:
        pool = await asyncpg.create_pool(proxy.url)
        fault = proxy.lose_reply("INSERT INTO runs")
        ...                                   # the server commits it, the client sees its connection cut
        await fault.seen(within=5)

Texts are looked for where something is *executed* (Postgres: a simple query, or the binding of a prepared statement, not
its preparation), case and white space as sent. For other servers they are looked for in the bytes of a request.
"""

import asyncio
import contextlib
import enum
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from waiting import eventually
from wire_parsers import PlainWire, PostgresWire, Wire


class FaultKind(enum.Enum):
    LOSE_REQUEST = enum.auto()
    LOSE_REPLY = enum.auto()
    HOLD_REQUEST = enum.auto()


class Fault:
    """A fault that was asked for. `count` says how often it has happened."""

    def __init__(self, kind: FaultKind, text: str, times: int) -> None:
        self.kind = kind
        self.text = text
        self.left = times
        self.count = 0
        self.answers = 0
        self._released = asyncio.Event()

    async def seen(self, *, within: float, times: int = 1) -> None:
        """Waits until it has happened: request lost or held, or reply lost, so that the server has done its work."""
        await eventually(lambda: self.count >= times, within=within, what=f"{self.kind.name} of {self.text!r}")

    def release(self) -> None:
        """Lets a held request go on, also if its client has gone meanwhile. Later ones are not held."""
        self.left = 0
        self._released.set()

    async def answered(self, *, within: float) -> None:
        """Waits until the server has answered a request that was held and released."""
        await eventually(lambda: self.answers > 0, within=within, what=f"an answer to {self.text!r}")

    def cancel(self) -> None:
        """It does not happen any more."""
        self.left = 0

    def matches(self, text: str) -> bool:
        return self.left > 0 and self.text in text


class FaultProxy:
    """Made by `fault_proxy`. `url` is the server's URL through the proxy."""

    def __init__(self, upstream: str, listen: Path | None) -> None:
        self._server_address = _address(upstream)
        self._scheme = urlsplit(upstream).scheme
        self._upstream = upstream
        self._path = listen
        self._port = 0
        self._listener: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._moving = asyncio.Event()
        self._moving.set()
        self._seconds = 0.0
        self._faults: list[Fault] = []

    @property
    def url(self) -> str:
        return self.url_for(self._upstream)

    @property
    def port(self) -> int:
        """The TCP port of 127.0.0.1, 0 for a proxy on a Unix socket."""
        return self._port

    @property
    def connections(self) -> int:
        return len(self._links)

    def url_for(self, url: str) -> str:
        """A URL of the same server (another database, say), through this proxy."""
        parts = urlsplit(url)
        if self._path is None:
            user = f"{parts.username}@" if parts.username else ""
            query = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key not in ("host", "port")])
            scheme = "redis" if parts.scheme == "unix" else parts.scheme
            path = "" if parts.scheme == "unix" else parts.path
            return urlunsplit(parts._replace(scheme=scheme, netloc=f"{user}127.0.0.1:{self._port}", path=path, query=query))
        if _is_postgres(parts.scheme):
            user = f"{parts.username}@" if parts.username else ""
            kept = {key: value for key, value in parse_qsl(parts.query) if key not in ("host", "port")}
            query = urlencode({**kept, "host": str(self._path.parent)}, quote_via=quote, safe="/")
            return urlunsplit(parts._replace(netloc=user, path=parts.path, query=query))
        return f"unix://{quote(str(self._path))}" + (f"?{parts.query}" if parts.query else "")

    async def cut(self) -> None:
        """Resets all connections. A held request stays in flight."""
        for link in list(self._links.values()):
            link.cut()
        await asyncio.sleep(0)

    async def refuse(self) -> None:
        """New connections are refused; those that exist stay (see `cut`)."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    async def accept(self) -> None:
        """Listens (again), at the same place."""
        if self._listener is None:
            if self._path is not None:
                self._listener = await asyncio.start_unix_server(self._serve, self._path)
            else:
                self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
                self._port = self._listener.sockets[0].getsockname()[1]

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """Nobody is connected and nobody gets in, for the time of the block."""
        await self.refuse()
        await self.cut()
        try:
            yield
        finally:
            await self.accept()

    def freeze(self) -> None:
        """No byte moves; connections stay, and new ones are taken without an answer."""
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    def delay(self, seconds: float) -> None:
        """Holds back what comes from either side so long; 0 ends it."""
        self._seconds = seconds

    def lose_reply(self, text: str, *, times: int = 1) -> Fault:
        """The server answers a matching request to the end (it has committed); the answer is dropped, the connection cut."""
        return self._add(Fault(FaultKind.LOSE_REPLY, text, times))

    def lose_request(self, text: str, *, times: int = 1) -> Fault:
        """A matching request never reaches the server; the connection is cut."""
        return self._add(Fault(FaultKind.LOSE_REQUEST, text, times))

    def hold_request(self, text: str, *, times: int = 1) -> Fault:
        """A matching request waits for `release`, then reaches the server, however late, with or without its client."""
        return self._add(Fault(FaultKind.HOLD_REQUEST, text, times))

    def _add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def take_fault(self, text: str) -> Fault | None:
        for fault in self._faults:
            if fault.matches(text):
                fault.left -= 1
                return fault
        return None

    async def pass_gate(self) -> None:
        await self._moving.wait()
        if self._seconds:
            await asyncio.sleep(self._seconds)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        wire = PostgresWire() if _is_postgres(self._scheme) else PlainWire()
        link = _Link(self, wire, reader, writer)
        self._links[task] = link
        try:
            await link.run(self._server_address)
        except asyncio.CancelledError:
            pass  # `close`
        finally:
            del self._links[task]

    async def close(self) -> None:
        await self.refuse()
        tasks = list(self._links)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Link:
    """One client's connection and its own connection to the server."""

    def __init__(self, proxy: FaultProxy, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._wire = wire
        self._from_client = reader
        self._to_client = writer
        self._to_server: asyncio.StreamWriter | None = None
        self._sent = self._answered = 0
        self._lost: dict[int, Fault] = {}
        self._late: dict[int, Fault] = {}
        self._late_answered = asyncio.Event()
        self._holding = False

    async def run(self, server: Path | tuple[str, int]) -> None:
        pumps: list[asyncio.Task[None]] = []
        try:
            from_server, self._to_server = await _connect(server)
            pumps = [
                asyncio.create_task(self._pump_requests(self._to_server)),
                asyncio.create_task(self._pump_replies(from_server)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server is not there: the client is cut
        finally:
            writers = [writer for writer in (self._to_client, self._to_server) if writer is not None]
            for writer in writers:  # before anything that can be cancelled
                writer.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def cut(self) -> None:
        _reset(self._to_client)
        if self._to_server is not None and not self._holding and not self._late:
            _reset(self._to_server)

    async def _pump_requests(self, to_server: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await self._from_client.read(65536):
                await self._proxy.pass_gate()
                for piece in self._wire.requests(data):
                    number = self._wire.number(self._sent, self._answered)
                    fault = self._proxy.take_fault(piece.text) if piece.text is not None else None
                    if fault is not None and not await self._meets(fault, number):
                        return
                    to_server.write(piece.raw)
                    self._sent += piece.ends
                await to_server.drain()
        if self._late:  # the client has gone, its held request has not been answered
            await self._late_answered.wait()

    async def _meets(self, fault: Fault, number: int) -> bool:
        """Whether the request goes on."""
        if fault.kind is FaultKind.LOSE_REPLY:
            self._lost[number] = fault
        elif fault.kind is FaultKind.LOSE_REQUEST:
            fault.count += 1
            _reset(self._to_client)
            return False
        else:
            fault.count += 1
            self._holding = True
            await fault._released.wait()
            self._late[number] = fault
            self._holding = False
        return True

    async def _pump_replies(self, from_server: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await from_server.read(65536):
                await self._proxy.pass_gate()
                for piece in self._wire.replies(data):
                    number = self._answered + 1
                    self._answered += piece.ends
                    lost = self._lost.get(number)
                    if lost is None:
                        self._to_client.write(piece.raw)
                    elif piece.ends:
                        lost.count += 1
                        _reset(self._to_client)
                        return
                    if piece.ends and number in self._late:
                        self._late.pop(number).answers += 1
                        self._late_answered.set()
                with contextlib.suppress(OSError):  # a client that has gone is no reason to stop a late request
                    await self._to_client.drain()


def database_url_through(proxy: FaultProxy, database_url: str) -> str:
    return proxy.url_for(database_url)


@contextlib.asynccontextmanager
async def fault_proxy(url: str, *, over_tcp: bool = False) -> AsyncIterator[FaultProxy]:
    """A proxy in front of the server of url: postgresql:// or unix:// on a Unix socket (or TCP), anything else on TCP."""
    parts = urlsplit(url)
    folder = Path(tempfile.mkdtemp(prefix="agentrun-proxy-", dir="/tmp"))
    name = ".s.PGSQL.5432" if _is_postgres(parts.scheme) else "redis.sock"
    on_unix = not over_tcp and (_is_postgres(parts.scheme) or parts.scheme == "unix")
    proxy = FaultProxy(url, folder / name if on_unix else None)
    try:
        await proxy.accept()
        yield proxy
    finally:
        await proxy.close()
        shutil.rmtree(folder, ignore_errors=True)


def _is_postgres(scheme: str) -> bool:
    return scheme in ("postgresql", "postgres")


def _address(url: str) -> Path | tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Path(unquote(parts.path))
    if _is_postgres(parts.scheme):
        query = dict(parse_qsl(parts.query))
        host, port = query.get("host", parts.hostname or "127.0.0.1"), int(query.get("port", parts.port or 5432))
        return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)
    return parts.hostname or "127.0.0.1", parts.port or {"redis": 6379}.get(parts.scheme, 80)


async def _connect(server: Path | tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(server, Path):
        return await asyncio.open_unix_connection(server)
    return await asyncio.open_connection(*server)


def _reset(writer: asyncio.StreamWriter) -> None:
    peer: socket.socket | None = writer.get_extra_info("socket")
    if peer is not None and peer.family != socket.AF_UNIX and not writer.is_closing():
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
