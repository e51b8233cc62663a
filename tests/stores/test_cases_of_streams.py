"""Streams as they reach clients: behind a reverse proxy, through all middleware, and from a log that commits out of order."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx2
import pytest
import yaml
from gateway_bench import PlayedWorker, gateway, keys_file, manifest
from processes import Product, ProductProcess, ProductProcesses, free_port
from redis.asyncio import Redis
from sse_client import EventStream as ClientStream
from sse_client import StreamCutError, open_stream
from waiting import eventually, holds

from agentrun.bus import connection
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.domain.reducer import Transcript
from agentrun.gateway.process import Timing
from agentrun.store import runs, transitions
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Claim, Flush

QUICK = Timing(heartbeat_seconds=0.3, poll_seconds=0.1)
NGINX = shutil.which(os.environ.get("AGENTRUN_TEST_NGINX", "nginx"), path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx here; AGENTRUN_TEST_NGINX may name one")

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {upstream}; {more} }}
    }}
}}
"""


@contextlib.asynccontextmanager
async def nginx(folder: Path, upstream: str, more: str = "") -> AsyncIterator[str]:
    """A real one in front of the gateway, with its default settings for proxied answers."""
    assert NGINX is not None
    folder.mkdir()
    folder.chmod(0o777)
    port = free_port()
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, upstream=upstream, more=more))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-c", str(folder / "nginx.conf"), "-e", "stderr", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx2.AsyncClient(trust_env=False) as http:

            async def answers() -> bool:
                return (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200

            await eventually(answers, within=10, what="nginx answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_se_08_what_commits_late_is_neither_overtaken_nor_lost(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """Two writes of one attempt: the second waits for the first, so no reader can move past what is not there yet."""
    async with gateway(database_url, redis_url, tmp_path, timing=QUICK) as room:
        worker = await room.work_on(await room.new_run())
        first = [worker.make_text("first "), worker.make_text("also first ")]
        second = [worker.make_text("second ")]
        async with room.follow(worker.run_id) as stream, room.pool.acquire() as conn:
            transaction = conn.transaction()
            await transaction.start()
            await transitions.flush(conn, [Flush(worker.run_id, worker.epoch, 200, first)])
            later = asyncio.create_task(transitions.flush(room.pool, [Flush(worker.run_id, worker.epoch, 200, second)]))

            async def waits() -> bool:
                return bool(await room.pool.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

            async def nothing_seen() -> bool:
                return not stream.body.strip(b": hb\n") and not later.done()

            async def beaten() -> bool:
                return len(stream.comments) >= beats + 3

            await eventually(waits, within=5, what="the second write waits for the first")
            beats = len(stream.comments)
            reading = asyncio.create_task(stream.take(3))
            await holds(nothing_seen, until=beaten, within=10, what="nothing is seen")
            await transaction.commit()
            await later
            frames = await reading
            assert [frame.json()["data"]["text"] for frame in frames] == ["first ", "also first ", "second "]
            assert [frame.id for frame in frames] == ["0", "1", "2"]


async def test_se_12_a_stream_asks_not_to_be_held_back_and_is_never_compressed(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path) as room:
        run = await room.finished_run(5)
        async with room.follow(run, headers={"Accept-Encoding": "gzip, br, zstd, deflate"}) as stream:
            assert len(await stream.rest()) == 5
        assert stream.headers["x-accel-buffering"] == "no"
        assert {"no-cache", "no-transform"} <= set(stream.headers["cache-control"].split(", "))
        assert "content-encoding" not in stream.headers and "content-length" not in stream.headers


@needs_nginx
async def test_se_12_behind_a_proxy_with_default_settings_each_event_comes_when_it_is_said(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path) as room, nginx(tmp_path / "nginx", room.base_url) as url:
        worker = await room.work_on(await room.new_run())
        headers = {**room.authorization(), "Accept-Encoding": "gzip"}
        async with open_stream(f"{url}/v1/runs/{worker.run_id}/events", headers=headers) as stream:
            for number in range(20):
                await worker.say(f"{number} ")
                (frame,) = await stream.take(1, within=1.0)  # before the next one is said: nothing is collected
                assert frame.json()["data"]["text"] == f"{number} "
            await worker.finish()
            assert len(await stream.rest()) == 1
        assert "content-encoding" not in stream.headers


@needs_nginx
async def test_se_13_a_silent_stream_outlives_the_idle_limit_of_a_proxy(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The limit is two and a half heartbeats, as 60 s are four of 15 s; the silence lasts several limits."""
    async with (
        gateway(database_url, redis_url, tmp_path, timing=Timing(heartbeat_seconds=0.8)) as room,
        nginx(tmp_path / "nginx", room.base_url, "proxy_read_timeout 2s;") as url,
    ):
        worker = await room.work_on(await room.new_run())
        path = f"{url}/v1/runs/{worker.run_id}/events"
        async with open_stream(path, headers=room.authorization()) as stream:
            await worker.say("before ")
            first = await stream.take(1)
            began = time.monotonic()
            while time.monotonic() - began < 6:
                await stream.until_comment(within=2)
            assert set(stream.comments) == {"hb"} and stream.last_event_id == "0"
            await worker.say("after ")
            second = await stream.take(1)
        async with open_stream(path, headers=room.authorization(), last_event_id=stream.last_event_id) as stream:
            await worker.finish()
            rest = await stream.rest()
        assert [frame.id for frame in (*first, *second, *rest)] == ["0", "1", "2"]


# Through the whole process, with everything that wraps the application


class Watched:
    """The resident memory of a process, as it grows."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.base = self.now()
        self.most = self.base

    def now(self) -> int:
        (line,) = [line for line in self._status.read_text().splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    def look(self) -> None:
        self.most = max(self.most, self.now())


MEGABYTE = 1_000_000


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 3)
    yield made
    await made.close()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    made = await connection.connect(redis_url)
    yield made
    await made.aclose()


async def gateway_process(
    database_url: str, redis_url: str, product_processes: ProductProcesses, folder: Path
) -> tuple[ProductProcess, dict[str, str], UUID]:
    """A gateway as a process of its own, the headers of a user, and a new run of theirs."""
    path, presented = keys_file(folder, {"ann": []})
    (folder / "agentrun.yaml").write_text(yaml.safe_dump(manifest().as_document()))
    product = Product(folder / "agentrun.yaml", database_url, redis_url, path, namespace="test", name="agent")
    process = await product_processes.gateway(product)
    headers = {"Authorization": f"Bearer {presented['ann']}"}
    async with httpx2.AsyncClient(base_url=process.base_url, headers=headers, trust_env=False) as http:
        run = UUID((await http.post("/v1/runs", json={"input": "x"})).json()["run_id"])
    return process, headers, run


@pytest.mark.slow
async def test_se_17_a_reader_that_stalls_costs_no_memory(
    database_url: str, redis_url: str, pool: Pool, redis: Redis, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    """Thirty megabytes pass it by in thirty thousand events; another reader has each at once, and it resumes with nothing missing."""
    process, headers, run = await gateway_process(database_url, redis_url, product_processes, tmp_path)
    worker = await played(pool, redis, run)
    url = f"{process.base_url}/v1/runs/{run}/events"
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1024)
    lines = [f"GET {where.path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    await reader.readuntil(b"\r\n\r\n")
    async with open_stream(url, headers=headers, within=120) as quick:
        await worker.say("warm ")
        await quick.take(1)
        memory = Watched(process.pid)
        for _ in range(60):
            batch = [(run, worker.make_text("x" * 1000)) for _ in range(500)]
            await worker.events.append(batch, ttl_seconds=600)
            await worker.flush()
            await quick.take(500)
            memory.look()
    assert memory.most - memory.base < 20 * MEGABYTE, f"{(memory.most - memory.base) / MEGABYTE:.0f} MB more"
    stalled = ClientStream(200, {"transfer-encoding": "chunked"}, reader)
    seen = []
    with pytest.raises((StreamCutError, ConnectionError)):
        async for frame in stalled:
            seen.append(frame)
    writer.transport.abort()
    assert 0 < len(seen) < 30_000 and [frame.id for frame in seen] == [str(seq) for seq in range(len(seen))]
    await worker.finish()
    async with open_stream(url, headers=headers, last_event_id=seen[-1].id, within=120) as stream:
        seen += await stream.rest(within=120)  # so far behind a run that has ended it is told the text in one piece
    transcript = Transcript()
    for frame in seen:
        transcript.feed(frame.json().get("seq"), frame.json()["kind"], frame.json()["data"])
    assert transcript.ended and transcript.text == "warm " + "x" * 30_000_000


async def test_se_21_fifty_megabytes_pass_through_all_middleware_in_little_memory(
    database_url: str, redis_url: str, pool: Pool, redis: Redis, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    process, headers, run = await gateway_process(database_url, redis_url, product_processes, tmp_path)
    worker = await played(pool, redis, run)
    for _ in range(100):
        for _ in range(10):
            worker.make_text("x" * 50_000)
        await worker.flush()
    url = f"{process.base_url}/v1/runs/{run}/events"

    async with open_stream(url, headers=headers) as stream:  # what is needed once is there afterwards
        await stream.take(20)
    memory = Watched(process.pid)
    async with open_stream(url, headers=headers, within=60) as stream:
        began = time.monotonic()
        await stream.take(1, within=5)
        assert time.monotonic() - began < 5, "the first does not wait for the rest"
        for number in range(1, 1000):
            await stream.take(1)
            if number % 20 == 0:
                memory.look()
                await asyncio.sleep(0.02)
        assert len(stream.body) > 50 * MEGABYTE
        await worker.say("the last ")
        await stream.take(1)
    assert memory.most - memory.base < 25 * MEGABYTE, f"{(memory.most - memory.base) / MEGABYTE:.0f} MB more"

    async def is_gone() -> bool:
        return (await process.metrics()).total("agentrun_stream_clients") == 0

    await eventually(is_gone, within=5, what="the gateway notices that the reader has left")


async def played(pool: Pool, redis: Redis, run: UUID) -> PlayedWorker:
    epoch = (await runs.look(pool, [run]))[run].epoch
    (claimed,) = await transitions.claim(pool, [Claim(run, epoch, "w/n")], lease_seconds=600)
    return PlayedWorker(pool, EventStream(redis, Keys("test", "agent")), run, claimed.epoch, claimed.top)
