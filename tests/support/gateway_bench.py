"""A gateway in this process on real stores, and somebody who plays the worker. No tests in here."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
from api_contract import Contract
from redis.asyncio import Redis
from sse_client import EventStream as ClientStream
from sse_client import open_stream
from store_servers import Databases
from waiting import eventually

from agentrun.bus import connection
from agentrun.bus.events import EventStream
from agentrun.bus.keys import Keys
from agentrun.dev.stores import StoreUrls
from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.keys import RANDOM_BYTES, Scope, generate, record_line
from agentrun.domain.states import RunStatus
from agentrun.gateway import process
from agentrun.gateway.process import Timing
from agentrun.manifests import AgentRun, parse
from agentrun.settings import Settings
from agentrun.store import runs, transitions
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Claim, Finish, Flush

NAMESPACE, NAME = "test", "agent"
AGENT = f"{NAMESPACE}/{NAME}"
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent, namespace: test}
spec:
  agent: {model: "demo:echo"}
  database: {poolSize: %d}
  gateway: {maxBodyBytes: %d}
  submission: {dedupeSeconds: %d}
  followUps: {policy: %s, windowSeconds: %d}
  streaming: {replayLimit: %d}
  suspend: %s
"""


def manifest(
    *,
    pool_size: int = 5,
    max_body_bytes: int = 65536,
    dedupe_seconds: int = 10,
    policy: str = "Enqueue",
    window_seconds: int = 30,
    replay_limit: int = 10_000,
    suspend: bool = False,
) -> AgentRun:
    values = (pool_size, max_body_bytes, dedupe_seconds, policy, window_seconds, replay_limit, str(suspend).lower())
    return parse(MANIFEST % values, source="test")[0]


def keys_file(folder: Path, users: Mapping[str, Sequence[Scope]]) -> tuple[Path, dict[str, str]]:
    """A file of keys, and each user's key."""
    presented, lines = {}, []
    for user, scopes in users.items():
        presented[user], record = generate(secrets.token_bytes(RANDOM_BYTES), user=user, scopes=scopes, created=datetime.now(UTC))
        lines.append(record_line(record))
    path = folder / f"keys-{secrets.token_hex(4)}"
    path.write_text("\n".join(lines))
    return path, presented


def settings(database_url: str, redis_url: str, keys: Path) -> Settings:
    return Settings(
        namespace=NAMESPACE,
        name=NAME,
        database_url=database_url,
        redis_url=redis_url,
        api_keys=keys,
        host="127.0.0.1",
        port=0,
        pod_name="gateway-0",
    )


@dataclass
class PlayedWorker:
    """One attempt at a run, driven by the test."""

    pool: Pool
    events: EventStream
    run_id: UUID
    epoch: int
    seq: int = -1
    unstored: list[Event] = field(default_factory=list)

    def make(self, kind: Kind, data: Any) -> Event:
        self.seq += 1
        event = Event(self.seq, self.epoch, kind, encode_data(data))
        self.unstored.append(event)
        return event

    async def say(self, text: str) -> Event:
        """A text delta, sent to the readers at once and stored with the next flush."""
        event = self.make_text(text)
        await self.events.append([(self.run_id, event)], ttl_seconds=60)
        return event

    def make_text(self, text: str) -> Event:
        """A text delta that nobody has been told of."""
        return self.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": text})

    async def flush(self) -> None:
        held = await transitions.flush(self.pool, [Flush(self.run_id, self.epoch, self.seq + 128, self.unstored)])
        assert held
        self.unstored = []

    async def finish(self, output: str = "done", *, send: bool = True) -> Event:
        """The end: stored, then sent."""
        event = self.make(Kind.COMPLETED, {"output": output})
        result = encode_data({"output": output, "messages": []}).decode()
        ended = await transitions.finish(
            self.pool, [Finish(self.run_id, self.epoch, RunStatus.SUCCEEDED, result=result, events=self.unstored)]
        )
        assert ended[0].ok
        if send:
            await self.events.append([(self.run_id, event)], ttl_seconds=60)
        return event


@dataclass
class Room:
    """A running gateway and its stores."""

    base_url: str
    keys: dict[str, str]
    http: httpx2.AsyncClient
    pool: Pool
    redis: Redis
    stop: asyncio.Event

    def authorization(self, user: str = "ann") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[user]}"}

    def authorization_lines(self, user: str = "ann") -> list[str]:
        """The same for those who write their requests themselves."""
        return [f"{name}: {value}" for name, value in self.authorization(user).items()]

    async def submit(
        self, text: Any = "hello", *, session: str | None = None, user: str = "ann", **headers: str
    ) -> httpx2.Response:
        """POSTs a message; header names may be written with underscores."""
        path = "/v1/runs" if session is None else f"/v1/sessions/{session}/messages"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json={"input": text}, headers={**self.authorization(user), **named})

    async def new_run(self, text: str = "hello", *, session: str | None = None, user: str = "ann") -> UUID:
        response = await self.submit(text, session=session, user=user, Idempotency_Key=secrets.token_hex(8))
        assert response.status_code == 202, response.text
        return UUID(response.json()["run_id"])

    async def get(self, path: str, *, user: str = "ann") -> httpx2.Response:
        return await self.http.get(path, headers=self.authorization(user))

    async def work_on(self, run_id: UUID) -> PlayedWorker:
        """Claims a run."""
        seen = (await runs.look(self.pool, [run_id]))[run_id].epoch
        claimed = (await transitions.claim(self.pool, [Claim(run_id, seen, f"w/{secrets.token_hex(4)}")], lease_seconds=60))[0]
        return PlayedWorker(self.pool, EventStream(self.redis, Keys(NAMESPACE, NAME)), run_id, claimed.epoch, claimed.top)

    async def finished_run(self, events: int = 10, *, text: str = "t") -> UUID:
        """A run that has ended with `events` events, the terminal one included."""
        worker = await self.work_on(await self.new_run())
        for number in range(events - 1):
            worker.make(Kind.TEXT_DELTA, {"item": 0, "part": 0, "text": f"{text}{number} "})
        await worker.finish(send=False)
        return worker.run_id

    def follow(
        self, run_id: UUID, *, last_event_id: str | None = None, user: str = "ann", query: str = "", **options: Any
    ) -> contextlib.AbstractAsyncContextManager[ClientStream]:
        return open_stream(
            f"{self.base_url}/v1/runs/{run_id}/events{query}",
            headers={**self.authorization(user), **options.pop("headers", {})},
            last_event_id=last_event_id,
            **options,
        )

    async def empty(self) -> "Room":
        """Forgets everything, so that tests can share a gateway."""
        await self.pool.execute(
            "TRUNCATE sessions, runs, attempts, messages, inputs, effects, dead_letters, ledger, cron_tasks, slots,"
            " usage_changes, usage_daily, usage_sessions, budget_counters"
        )
        await self.redis.flushall()
        return self

    async def count(self, table: str) -> int:
        return int(await self.pool.fetchval(f"SELECT count(*) FROM {table}"))


@contextlib.asynccontextmanager
async def shared_gateway(
    databases: Databases, store_urls: StoreUrls, folder: Path, *, timing: Timing | None = None
) -> AsyncIterator[Room]:
    """For the tests of a module together: making a database and starting a gateway takes longer than most of them."""
    async with databases.migrated() as database_url, gateway(database_url, store_urls.redis_url, folder, timing=timing) as room:
        yield room


USERS: dict[str, Sequence[Scope]] = {
    "ann": [],
    "bob": [],
    "backend": [Scope.ACT_AS],
    "root": [Scope.ADMIN],
    "chief": [Scope.ACT_AS, Scope.ADMIN],
}


@contextlib.asynccontextmanager
async def gateway(
    database_url: str, redis_url: str, folder: Path, *, timing: Timing | None = None, ready_within: float = 10, **spec: Any
) -> AsyncIterator[Room]:
    """A gateway in this event loop; ready, unless `ready_within` is 0."""
    path, presented = keys_file(folder, USERS)
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        process.run(
            settings(database_url, redis_url, path), manifest(**spec), stop=stop, on_listening=port.set_result, timing=timing
        )
    )
    waits: list[asyncio.Future[Any]] = [running, port]
    await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    base_url = f"http://127.0.0.1:{await port}"
    pool = await create_pool(database_url, 5)
    redis = await connection.connect(redis_url)
    try:
        async with httpx2.AsyncClient(base_url=base_url, timeout=15, trust_env=False) as http:
            http.event_hooks = {"response": [Contract((await http.get("/openapi.json")).json()).check]}

            async def ready() -> bool:
                return (await http.get("/readyz")).status_code == 200

            if ready_within:
                await eventually(ready, within=ready_within, what="the gateway is ready")
            yield Room(base_url, presented, http, pool, redis, stop)
    finally:
        stop.set()
        await redis.aclose()
        await pool.close()
        async with asyncio.timeout(10):
            await running
