"""What a connection may cost: unfinished, oversized and malformed requests, and how many there may be."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_bench import Room

from agentrun.gateway import bodies, connections

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Wire:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self, *, within: float = 5) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        async with asyncio.timeout(within):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(lines[0].split()[1]), headers, body

    async def problem(self, *, within: float = 5) -> tuple[int, str]:
        """Status and code of the next answer, which is a problem document and the last one on this connection."""
        status, headers, body = await self.answer(within=within)
        document = json.loads(body)
        assert headers["content-type"] == "application/problem+json"
        assert headers["connection"] == "close"
        assert document["status"] == status
        assert document["detail"]
        await self.closed(within=within)
        return status, document["code"]

    async def closed(self, *, within: float = 5) -> None:
        async with asyncio.timeout(within):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read(1) == b""


@contextlib.asynccontextmanager
async def wire(room: Room) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(room.base_url.rpartition(":")[2]))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def head(room: Room, line: str, *fields: str) -> bytes:
    return "\r\n".join((f"{line} HTTP/1.1", "Host: x", *room.authorization_lines(), *fields, "", "")).encode()


@pytest.mark.parametrize(
    ("length", "status"), [("0" * 5000 + "13", 400), ("9" * 18, 413), ("9" * 30, 400), ("0" * 10 + "13", 202), ("-1", 400)]
)
async def test_a_content_length_is_a_number_that_can_be_used(room: Room, length: str, status: int) -> None:
    async with wire(room) as client:
        await client.send(head(room, "POST /v1/runs", "Content-Type: application/json", f"Content-Length: {length}"))
        await client.send(b'{"input":"x"}')
        assert (await client.answer())[0] == status
    assert await room.count("runs") == (status == 202)


@pytest.mark.parametrize(
    "filling",
    [b"x: y\r\n" * 20_000, b"X: " + b"y" * 200_000, b"y" * 200_000, b"x: y\r\n" * 110],
    ids=["many headers", "a long value", "a long name", "more headers than anybody needs"],
)
async def test_a_request_s_head_is_bounded(room: Room, filling: bytes) -> None:
    async with wire(room) as client:
        await client.send(b"GET /v1/runs HTTP/1.1\r\n" + filling)
        assert await client.problem() == (431, "headers_too_large")


async def test_the_bound_of_a_head_holds_for_its_address_and_for_later_requests(room: Room) -> None:
    async with wire(room) as client:
        await client.send(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
        assert await client.problem() == (431, "headers_too_large")
    async with wire(room) as client:
        for _ in range(3):
            await client.send(head(room, "GET /healthz", *["X: " + "y" * 600] * 60))
            assert (await client.answer())[0] == 200
        await client.send(b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
        assert await client.problem() == (431, "headers_too_large")


async def test_a_large_body_after_a_small_head_is_not_taken_for_a_head(room: Room) -> None:
    body = b'{"input":"' + b"x" * 65_000 + b'"}'
    async with wire(room) as client:
        for _ in range(3):
            request = head(room, "POST /v1/runs", "Content-Type: application/json", f"Content-Length: {len(body)}") + body
            await client.send(request + head(room, "GET /healthz"))
            assert (await client.answer())[0] == 202
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /healthz", b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"],
    ids=["nothing", "half a line", "half a head", "empty lines"],
)
async def test_a_head_that_is_not_finished_in_time_is_given_up(
    room: Room, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
    async with wire(room) as client:
        await client.send(sent)
        if sent.strip():
            assert await client.problem(within=3) == (408, "request_timeout")
        else:
            await client.closed(within=3)
    async with wire(room) as client:  # the same on a connection that has served a request; each byte is no new patience
        await client.send(head(room, "GET /healthz"))
        assert (await client.answer())[0] == 200
        await client.send(b"GET /healthz HTTP/1.1\r\nX: ")
        for _ in range(9):
            await client.send(b"y")
            await asyncio.sleep(0.05)
        assert await client.problem(within=3) == (408, "request_timeout")
        with contextlib.suppress(ConnectionError):  # the gateway listens on for a moment only
            for _ in range(30):  # for longer than a head may take
                await client.send(b"y")
                await asyncio.sleep(0.02)
    assert "Exception in callback" not in caplog.text, "what came after the answer has started no clock"


async def test_a_kept_connection_may_be_idle_for_longer_than_a_head_may_take(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with wire(room) as client:
        for _ in range(2):
            await client.send(head(room, "GET /healthz"))
            assert (await client.answer())[0] == 200
            await asyncio.sleep(0.5)


async def test_a_line_break_too_many_does_not_cost_the_answer(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    worker = await room.work_on(await room.new_run())
    async with wire(room) as client:
        await client.send(head(room, f"GET /v1/runs/{worker.run_id}/events"))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.send(b"\r\n")
        await asyncio.sleep(0.6)
        await worker.finish()
        async with asyncio.timeout(5):
            assert (await client.reader.readuntil(b"\r\n0\r\n\r\n")).count(b"id: ") == 1


async def test_a_body_that_is_not_finished_in_time_is_given_up(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.8)
    async with wire(room) as client:
        await client.send(head(room, "POST /v1/runs", "Content-Type: application/json", "Content-Length: 100") + b'{"inp')
        assert await client.problem(within=3) == (408, "request_timeout")
    async with wire(room) as client:  # a body that nobody reads
        await client.send(head(room, "GET /v1/runs", "Content-Length: 1000"))
        assert (await client.answer())[0] == 200
        for _ in range(30):
            await client.send(b"y")
            await asyncio.sleep(0.05)
        await client.closed(within=1)
    assert await room.count("runs") == 0


MALFORMED: dict[str, bytes] = {
    "raw UTF-8 in the path": "GET /v1/runs/é HTTP/1.1\r\n\r\n".encode(),
    "a space in the path": b"GET /v1/runs/a b HTTP/1.1\r\n\r\n",
    "an unknown method": b"FETCH /v1/runs HTTP/1.1\r\n\r\n",
    "a length and chunks": b"POST /v1/runs HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": b"POST /v1/runs HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    "a negative length": b"POST /v1/runs HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
    "a control character in a header": b"GET /v1/runs HTTP/1.1\r\nX: a\x01b\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("what", list(MALFORMED))
async def test_what_is_no_http_is_refused_with_a_problem(room: Room, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with wire(room) as client:
            await client.send(MALFORMED[what])
            assert await client.problem() == (400, "malformed_request")
    # Anybody can send this: it must not fill the log.
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_bad_chunk_is_refused_with_a_problem_and_nothing_is_stored(room: Room) -> None:
    async with wire(room) as client:
        fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
        await client.send(head(room, "POST /v1/runs", *fields) + b'd\r\n{"input":"x"}\r\nzz\r\n')
        assert await client.problem() == (400, "malformed_request")
    assert await room.count("runs") == 0


async def test_nonsense_after_a_request_does_not_cost_its_answer(room: Room) -> None:
    async with wire(room) as client:
        await client.send(head(room, "GET /v1/runs") + b"\x00nonsense\r\n\r\n")
        status, _, body = await client.answer()
        assert (status, json.loads(body)) == (200, {"runs": [], "next": None})
        await client.closed()


async def test_there_may_be_only_so_many_connections(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(wire(room))
        await first.send(head(room, "GET /healthz"))
        assert (await first.answer())[0] == 200
        monkeypatch.setattr(connections, "most_connections", lambda: 0)
        await (await stack.enter_async_context(wire(room))).closed()
        monkeypatch.undo()
        await first.send(head(room, "GET /healthz"))
        assert (await first.answer())[0] == 200


async def test_an_upgrade_that_is_not_offered_is_ignored(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with wire(room) as client:
            for protocol in ("websocket", "h2c"):
                await client.send(head(room, "GET /healthz", "Connection: upgrade", f"Upgrade: {protocol}"))
                answer: Any = await client.answer()
                assert answer[0] == 200
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
