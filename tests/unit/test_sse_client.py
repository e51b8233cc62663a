"""The tests' own client of event streams follows the standard and notices what libraries hide."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from sse_client import FrameParser, StreamCutError, StreamRefusedError, open_stream

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def served(*parts: bytes, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that sends exactly these bytes to each client and then closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            seen.append(request)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/events?after=1"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", [(None, "a"), (None, "b")]),
        (b"data: a\r\n\r\ndata: b\r\r", [(None, "a"), (None, "b")]),
        (b"data: a\rdata:b\r\n\n", [(None, "a\nb")]),
        (b"\xef\xbb\xbfdata: a\n\n", [(None, "a")]),
        (b"id: 1\ndata\n\n", [("1", "")]),
        (b"id: 1\n\n: hb\n\nevent: x\n\nretry: 5\n\n", []),
        (b": hb\ndata:  two spaces\n\n", [(None, " two spaces")]),
        (b"data: unfinished\n", []),
        (b"data: \xff\n\n", [(None, "\ufffd")]),
        ("data: a\u2028b\u0085c\n\n".encode(), [(None, "a\u2028b\u0085c")]),
        (b"id: a\0b\ndata: x\n\n", [(None, "x")]),
    ],
)
@pytest.mark.parametrize("split", [lambda raw: [raw], lambda raw: [bytes([byte]) for byte in raw]])
def test_frames_are_those_of_the_standard(
    raw: bytes, expected: list[tuple[str | None, str]], split: Callable[[bytes], list[bytes]]
) -> None:
    parser = FrameParser()
    frames = [frame for part in split(raw + b"x") for frame in parser.feed(part)]
    assert [(frame.id, frame.data) for frame in frames] == expected


def test_the_last_id_sticks_and_an_empty_one_resets_it() -> None:
    parser = FrameParser()
    parser.feed(b"id: 7\nretry: 2000\ndata: a\n\ndata: b\n\n")
    assert (parser.last_event_id, parser.retry) == ("7", 2000)
    parser.feed(b"id\ndata: c\n\n")
    assert parser.last_event_id == ""


def test_the_bytes_of_a_frame_are_kept() -> None:
    parser = FrameParser()
    first, second = parser.feed(b": hb\nid: 1\ndata: a\n\nid: 2\ndata: b\n\n")
    assert (first.raw, second.raw) == (b": hb\nid: 1\ndata: a\n\n", b"id: 2\ndata: b\n\n")
    assert parser.comments == ["hb"]


async def test_a_clean_end_is_an_end() -> None:
    async with served(OK, chunk(b"id: 1\ndata: {}\n\n"), chunk(b"")) as url, open_stream(url) as stream:
        (frame,) = await stream.rest()
    assert (frame.id, frame.json()) == ("1", {})
    assert stream.body == b"id: 1\ndata: {}\n\n"


@pytest.mark.parametrize("tail", [b"", b"5", b"ff\r\nid: 2"])
async def test_a_body_without_its_last_chunk_is_a_cut(tail: bytes) -> None:
    async with served(OK, chunk(b"id: 1\ndata: {}\n\n"), tail) as url, open_stream(url) as stream:
        assert (await stream.take(1))[0].id == "1"
        with pytest.raises(StreamCutError, match="last id '1'"):
            await stream.rest()


async def test_an_end_before_the_wanted_frames_is_a_failure() -> None:
    async with served(OK, chunk(b"id: 1\ndata: {}\n\n"), chunk(b"")) as url, open_stream(url) as stream:
        with pytest.raises(AssertionError, match=r"ended after 1 of 2 frames"):
            await stream.take(2)


async def test_204_is_an_ended_stream() -> None:
    async with served(b"HTTP/1.1 204 No Content\r\n\r\n") as url, open_stream(url) as stream:
        assert (stream.status, await stream.rest()) == (204, [])


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
async def test_any_other_answer_is_a_refusal_with_its_body(status: str) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/problem+json\r\nContent-Length: 13\r\n\r\n".encode()
    async with served(head, b'{"type": "x"}') as url:
        with pytest.raises(StreamRefusedError) as refused:
            async with open_stream(url):
                pass
    assert refused.value.status == int(status[:3])
    assert refused.value.json() == {"type": "x"}


async def test_the_cursor_and_the_body_are_sent() -> None:
    seen: list[bytes] = []
    headers = {"X-A": "b"}
    async with (
        served(OK, chunk(b""), seen=seen) as url,
        open_stream(url, method="POST", json_body={"a": 1}, headers=headers, last_event_id="4"),
    ):
        pass
    head = seen[0].decode()
    assert head.startswith("POST /v1/events?after=1 HTTP/1.1\r\n")
    for line in ("Last-Event-ID: 4", "X-A: b", "Content-Length: 8", "Content-Type: application/json"):
        assert line in head


async def test_heartbeats_can_be_waited_for_and_frames_before_them_stay() -> None:
    async with served(OK, chunk(b"data: a\n\n"), chunk(b": hb\n"), chunk(b"")) as url, open_stream(url) as stream:
        await stream.until_comment(within=5)
        assert [frame.data for frame in await stream.rest()] == ["a"]
