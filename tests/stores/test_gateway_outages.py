"""The gateway while a store is away, hangs or loses a reply; leaving clients; the end of the process."""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from fault_proxy import fault_proxy
from gateway_bench import NAME, NAMESPACE, USERS, Room, gateway, keys_file, manifest
from processes import Product, ProductProcesses
from sse_client import EventStream, StreamCutError, open_stream
from store_servers import PrivateServer
from waiting import eventually

from agentrun.bus import connection
from agentrun.gateway.process import Timing
from agentrun.store.migrations import migrate
from agentrun.store.pool import create_pool

QUICK = Timing(heartbeat_seconds=5, poll_seconds=0.2)


async def test_st_01_runs_are_accepted_at_once_while_redis_is_away(
    database_url: str, private_redis: PrivateServer, tmp_path: Path
) -> None:
    async with gateway(database_url, private_redis.url, tmp_path) as room:
        await private_redis.kill()
        async with asyncio.timeout(2):
            answers = [await room.submit(f"text {number}") for number in range(5)]
        assert {answer.status_code for answer in answers} == {202}
        assert await room.count("runs") == 5
        await private_redis.start()


async def test_st_01_runs_are_accepted_at_once_while_redis_hangs(
    database_url: str, private_redis: PrivateServer, tmp_path: Path
) -> None:
    async with gateway(database_url, private_redis.url, tmp_path) as room:
        await room.submit("before")
        await private_redis.pause()
        async with asyncio.timeout(2):
            answers = [await room.submit(f"text {number}") for number in range(5)]
        await private_redis.resume()
        assert {answer.status_code for answer in answers} == {202}


async def test_the_gateway_starts_and_streams_while_redis_is_away(
    database_url: str, private_redis: PrivateServer, tmp_path: Path
) -> None:
    await private_redis.stop()
    async with gateway(database_url, private_redis.url, tmp_path, timing=QUICK) as room:
        worker = await room.work_on(await room.new_run())
        async with room.follow(worker.run_id) as stream:
            for number in range(3):
                worker.make_text(f"{number} ")
                await worker.flush()
                assert [frame.id for frame in await stream.take(1, within=2)] == [str(number)]
            await worker.finish(send=False)
            assert len(await stream.rest(within=2)) == 1
    await private_redis.start()


async def test_streams_go_on_from_postgres_while_redis_is_away_and_from_redis_when_it_is_back(
    database_url: str, private_redis: PrivateServer, tmp_path: Path
) -> None:
    async with gateway(database_url, private_redis.url, tmp_path, timing=QUICK) as room:
        worker = await room.work_on(await room.new_run())
        async with room.follow(worker.run_id) as stream:
            await worker.say("0 ")
            await stream.take(1)
            await private_redis.kill()
            worker.make_text("1 ")
            await worker.flush()
            assert [frame.id for frame in await stream.take(1, within=3)] == ["1"]
            await private_redis.start()

            async def said() -> bool:
                with contextlib.suppress(Exception):
                    await room.redis.ping()
                    return True
                return False

            await eventually(said, within=10, what="Redis is back")
            worker.make_text("2 ")
            await worker.flush()
            assert [frame.id for frame in await stream.take(1, within=3)] == ["2"]
            for number in range(3, 6):
                await worker.say(f"{number} ")
            await worker.flush()
            assert [frame.id for frame in await stream.take(3, within=4)] == ["3", "4", "5"]
            await worker.finish()
            await stream.rest(within=3)


async def test_id_04_a_lost_reply_to_the_commit_is_no_conflict(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with fault_proxy(database_url) as proxy, gateway(proxy.url, redis_url, tmp_path) as room:
        await room.submit("warm up")
        for key in ({"Idempotency_Key": "k"}, {}):
            before = await room.count("runs")
            fault = proxy.lose_reply("agentrun_1.submit")
            response = await room.submit(f"pay {key}", session="s", **key)
            assert fault.count == 1
            assert response.status_code == 202, response.text
            assert "idempotency-replayed" not in response.headers
            assert await room.count("runs") == before + 1


async def test_postgres_away_is_503_with_a_time_to_retry_and_mends_itself(
    private_postgres: PrivateServer, redis_url: str, tmp_path: Path
) -> None:
    await migrate(private_postgres.url)
    async with gateway(private_postgres.url, redis_url, tmp_path) as room:
        run_id = await room.new_run()
        await private_postgres.kill()
        for response in (
            await room.submit("x", Idempotency_Key="k"),
            await room.get(f"/v1/runs/{run_id}"),
            await room.get("/v1/sessions"),
            await room.http.post(f"/v1/runs/{run_id}/cancel", headers=room.authorization()),
            await room.get(f"/v1/runs/{run_id}/events"),
        ):
            assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
            assert response.headers["retry-after"] == "1"
        assert (await room.http.get("/readyz")).status_code == 200
        # A browser's EventSource never comes back after a 503.
        stream = await cut_stream(room, f"/v1/runs/{run_id}/events")
        assert (stream.status, stream.retry) == (200, 5000)
        await private_postgres.start()

        async def accepted() -> bool:
            return (await room.submit("x", Idempotency_Key="k")).status_code == 202

        await eventually(accepted, within=10, what="submissions are taken again")


async def cut_stream(room: Room, path: str) -> EventStream:
    async with open_stream(room.base_url + path, headers=room.authorization()) as stream:
        with pytest.raises(StreamCutError):
            await stream.rest(within=5)
        return stream


async def test_a_database_that_hangs_is_503_in_time(
    private_postgres: PrivateServer, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrun.gateway.answering.ANSWER_SECONDS", 0.5)
    await migrate(private_postgres.url)
    async with gateway(private_postgres.url, redis_url, tmp_path) as room:
        run_id = await room.new_run()
        await private_postgres.pause()
        try:
            async with asyncio.timeout(4):
                assert (await room.submit("x", Idempotency_Key="k")).status_code == 503
                assert (await room.submit("y", Idempotency_Key="l")).status_code == 503
                assert (await room.get("/healthz")).status_code == 200
        finally:
            await private_postgres.resume()
        async with asyncio.timeout(5):
            assert (await room.get(f"/v1/runs/{run_id}")).status_code == 200
            assert (await room.submit("x", Idempotency_Key="k")).status_code == 202
        assert await room.pool.fetchval("SELECT count(*) FROM runs WHERE client_key = 'k'") == 1


async def test_a_database_without_its_schema_is_not_served(empty_database_url: str, redis_url: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ready"):
        async with gateway(empty_database_url, redis_url, tmp_path, ready_within=1.5):
            pass
    async with gateway(empty_database_url, redis_url, tmp_path, ready_within=0) as room:
        response = await room.submit("x")
        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
        assert (await cut_stream(room, f"/v1/runs/{uuid4()}/events")).retry == 5000

        async def says_why() -> bool:
            return "agentrun migrate" in (await room.http.get("/readyz")).json()["detail"]

        await eventually(says_why, within=5, what="readiness says what to do")
        await migrate(empty_database_url)

        async def accepted() -> bool:
            return (await room.submit("x")).status_code == 202

        await eventually(accepted, within=10, what="the schema is seen")


async def test_pg_02_clients_that_leave_while_they_wait_cost_no_connection(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path, pool_size=3) as room:
        run_id = await room.new_run()

        async def impatient(number: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005 + number % 10 / 1000):
                    await (room.get(f"/v1/runs/{run_id}") if number % 2 else room.submit(f"{number}"))

        await asyncio.gather(*(impatient(number) for number in range(200)))
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*(room.get(f"/v1/runs/{run_id}") for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200}


def sockets() -> int:
    """How many sockets this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


async def test_se_14_three_hundred_readers_that_leave_leave_nothing_behind(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path) as room:
        runs = [await room.new_run() for _ in range(3)]

        async def come_and_go(number: int) -> None:
            async with room.follow(runs[number % 3]):
                pass

        async def settled() -> bool:
            return "agentrun_stream_clients 0.0" in (await room.http.get("/metrics")).text

        async def crowd() -> None:
            await asyncio.gather(*(come_and_go(number) for number in range(50)))
            await eventually(settled, within=5, what="no client is left")

        await crowd()
        tasks, open_sockets, clients = len(asyncio.all_tasks()), sockets(), len(await room.redis.client_list())
        for _ in range(6):
            await crowd()

        async def as_before() -> bool:
            gc.collect()
            return (
                await settled()
                and len(asyncio.all_tasks()) <= tasks
                and sockets() <= open_sockets + 16 + 5  # what the pools of both stores may keep
                and len(await room.redis.client_list()) <= clients + 16
                and not await room.redis.pubsub_channels()
            )

        await eventually(as_before, within=10, what="tasks, sockets and Redis clients are as before")
        assert (await room.get(f"/v1/runs/{runs[0]}")).json()["status"] == "pending"


async def test_se_15_readers_that_leave_before_the_first_byte_leave_nothing_behind(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with gateway(database_url, redis_url, tmp_path) as room:
        run_id = await room.new_run()
        port = int(room.base_url.rpartition(":")[2])
        request = f"GET /v1/runs/{run_id}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {room.keys['ann']}\r\n\r\n".encode()
        for number in range(100):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
            if number % 10 == 0:
                await asyncio.sleep(0)

        async def settled() -> bool:
            metrics = (await room.http.get("/metrics")).text
            return "agentrun_stream_clients 0.0" in metrics and not await room.redis.pubsub_channels()

        await eventually(settled, within=10, what="no client is left")


def product(database_url: str, redis_url: str, folder: Path) -> tuple[Product, str]:
    path, presented = keys_file(folder, USERS)
    file = folder / "agentrun.yaml"
    file.write_text(json.dumps(manifest().as_document()))
    return Product(file, database_url, redis_url, path, NAMESPACE, NAME), presented["ann"]


@contextlib.asynccontextmanager
async def remote_room(base_url: str, key: str, database_url: str, redis_url: str) -> AsyncIterator[Room]:
    """A gateway in another process."""
    pool = await create_pool(database_url, 5)
    redis = await connection.connect(redis_url)
    async with httpx2.AsyncClient(base_url=base_url, timeout=15, trust_env=False) as http:
        yield Room(base_url, {"ann": key}, http, pool, redis, asyncio.Event())
    await redis.aclose()
    await pool.close()


async def test_se_11_the_stop_signal_cuts_open_streams_and_they_go_on_elsewhere(
    database_url: str, redis_url: str, tmp_path: Path, product_processes: ProductProcesses
) -> None:
    what, key = product(database_url, redis_url, tmp_path)
    first, second = await product_processes.gateway(what), await product_processes.gateway(what)
    async with remote_room(first.base_url, key, database_url, redis_url) as room:
        worker = await room.work_on(await room.new_run())
        silent = await room.new_run()
        await worker.say("0 ")
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(room.follow(run_id)) for run_id in [worker.run_id] * 3 + [silent] * 2]
            for stream in streams[:3]:
                await stream.take(1)
            began = time.monotonic()
            first.signal(signal.SIGTERM)
            for stream in streams:
                with pytest.raises(StreamCutError):
                    await stream.rest(within=5)
            assert await first.wait(within=5) == 0
            assert time.monotonic() - began < 5
    assert "Traceback" not in first.log_tail(200)
    async with remote_room(second.base_url, key, database_url, redis_url) as room:
        await worker_moves(room, worker)
        async with room.follow(worker.run_id, last_event_id=streams[0].last_event_id) as stream:
            assert [frame.id for frame in await stream.rest(within=5)] == ["1", "2"]


async def worker_moves(room: Room, worker: Any) -> None:
    worker.pool = room.pool
    worker.events = type(worker.events)(room.redis, worker.events._keys)
    await worker.say("1 ")
    await worker.finish()


async def test_id_03_a_gateway_killed_around_the_commit_leaves_its_key_usable(
    database_url: str, redis_url: str, tmp_path: Path, product_processes: ProductProcesses
) -> None:
    what, key = product(database_url, redis_url, tmp_path)
    healthy = await product_processes.gateway(what)
    for failpoint, stored in (("gateway.submit.before", 0), ("gateway.submit.committed", 1)):
        doomed = await product_processes.gateway(what, failpoints=f"{failpoint}=kill")
        client_key = secrets.token_hex(4)
        async with remote_room(doomed.base_url, key, database_url, redis_url) as room:
            before = await room.count("runs")
            with pytest.raises(Exception):  # noqa: B017 - whatever the library calls it
                await room.submit("x", session="s", Idempotency_Key=client_key)
            assert await doomed.wait(within=5) == -signal.SIGKILL
            assert await room.count("runs") == before + stored
        async with remote_room(healthy.base_url, key, database_url, redis_url) as room:
            again = await room.submit("x", session="s", Idempotency_Key=client_key)
            assert again.status_code == 202
            assert ("idempotency-replayed" in again.headers) == bool(stored)
            assert await room.count("runs") == before + 1
