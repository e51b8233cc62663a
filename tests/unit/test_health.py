"""The health server of processes that have no other HTTP."""

import asyncio
import socket

import httpx2
import pytest
from waiting import eventually

from agentrun import health
from agentrun.domain.errors import ConfigurationError


def fine() -> str | None:
    return None


async def get(port: int | None, path: str, *, method: str = "GET") -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        return await client.request(method, path)


async def test_probes_answer_200_or_503_with_the_reason() -> None:
    wrong: str | None = "no progress: sweep"
    async with health.serve(host="127.0.0.1", port=0, alive=lambda: wrong, ready=fine) as port:
        stalled = await get(port, "/healthz")
        ready = await get(port, "/readyz?verbose=1")
        wrong = None
        alive = await get(port, "/healthz")

    assert (stalled.status_code, stalled.text) == (503, "no progress: sweep\n")
    assert (ready.status_code, ready.text) == (200, "ok\n")
    assert alive.status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/other"])
async def test_the_head_of_an_answer_is_the_answer_without_its_body(path: str) -> None:
    async with health.serve(host="127.0.0.1", port=0, alive=fine, ready=fine) as port:
        whole = await get(port, path)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert body == b""
    assert head.split()[1] == str(whole.status_code).encode()
    assert b"Content-Length: " in head


async def test_metrics_are_in_the_form_of_prometheus_and_described() -> None:
    async with health.serve(host="127.0.0.1", port=0, alive=fine, ready=fine) as port:
        metrics = await get(port, "/metrics")
        other = await get(port, "/other")

    assert metrics.headers["content-type"].startswith("text/plain")
    assert "# HELP agentrun_fenced_writes_total " in metrics.text
    assert other.status_code == 404


@pytest.mark.parametrize("sent", [b"\r\n", b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 20_000, b""])
async def test_nonsense_is_cut_and_the_next_request_answered(sent: bytes) -> None:
    async with health.serve(host="127.0.0.1", port=0, alive=fine, ready=fine) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()

        assert (await get(port, "/healthz")).status_code == 200


async def test_no_port_means_no_server_and_a_taken_one_is_told() -> None:
    async with health.serve(host="127.0.0.1", port=None, alive=fine, ready=fine) as port:
        assert port is None
    async with health.serve(host="127.0.0.1", port=0, alive=fine, ready=fine) as port:
        with pytest.raises(ConfigurationError, match="AGENTRUN_HEALTH_PORT: cannot listen on"):
            async with health.serve(host="127.0.0.1", port=port, alive=fine, ready=fine):
                pass


def test_a_probe_that_is_open_when_the_process_ends_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:

        async def process() -> None:
            async with health.serve(host="127.0.0.1", port=0, alive=fine, ready=fine) as port:
                probe.connect(("127.0.0.1", port))
                probe.sendall(b"GET /healthz HTTP/1.1\r\n")
                await eventually(lambda: len(asyncio.all_tasks()) > 1, within=5, what="the probe is being read")

        asyncio.run(process())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
