"""One AgentRun as real processes: gateways, workers, a scheduler, a fake provider, and a client that knows only HTTP."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
from fake_provider import FakeProvider
from processes import Product, ProductProcess, ProductProcesses
from sse_client import Frame, StreamCutError, StreamRefusedError, open_stream
from waiting import eventually

from agentrun.domain.keys import RANDOM_BYTES, generate, record_line
from agentrun.domain.reducer import Transcript

LEASE_SECONDS = 2
MANIFEST = f"""
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {{name: agent, namespace: default}}
spec:
  agent:
    entrypoint: "whole_path_agent:agent"
  workers: {{leaseSeconds: {LEASE_SECONDS}, concurrency: 8, drainSeconds: 1, maxRunSeconds: 120}}
  reaper: {{idleSeconds: {LEASE_SECONDS}, intervalSeconds: 1}}
  followUps: {{policy: Enqueue}}
"""
AGENT = '''
"""A real pydantic-ai Agent with two tools."""
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(OpenAIChatModel("fake-model", provider=OpenAIProvider()), instructions="be brief")


@agent.tool_plain
async def add(a: int, b: int) -> int:
    return a + b


@agent.tool_plain
def shout(text: str) -> str:
    return text.upper() + "!"
'''


@dataclass
class System:
    """The processes of one AgentRun and what a client may do. `pool` looks into the tables behind its back."""

    product: Product
    processes: ProductProcesses
    provider: FakeProvider
    key: str
    pool: asyncpg.Pool
    http: httpx2.AsyncClient
    gateways: list[ProductProcess] = field(default_factory=list)

    async def gateway(self, **options: Any) -> ProductProcess:
        process = await self.processes.gateway(self.product, **options)
        self.gateways.append(process)
        return process

    async def worker(self, *, database_url: str | None = None, **options: Any) -> ProductProcess:
        product = self.product if database_url is None else replace(self.product, database_url=database_url)
        return await self.processes.worker(product, **options)

    async def scheduler(self, **options: Any) -> ProductProcess:
        return await self.processes.scheduler(self.product, **options)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def post(
        self, text: str, *, session: str = "s", key: str | None = None, gateway: ProductProcess | None = None
    ) -> httpx2.Response:
        """Submits a message; the answer as it came."""
        headers = self.headers | ({"Idempotency-Key": key} if key else {})
        url = f"{(gateway or self.gateways[-1]).base_url}/v1/sessions/{session}/messages"
        return await self.http.post(url, json={"input": text}, headers=headers)

    async def submit(self, text: str, *, session: str = "s", key: str | None = None) -> UUID:
        """Submits a message that is accepted."""
        response = await self.post(text, session=session, key=key)
        assert response.status_code == 202, response.text
        return UUID(response.json()["run_id"])

    async def get(self, path: str, gateway: ProductProcess | None = None) -> httpx2.Response:
        return await self.http.get((gateway or self.gateways[-1]).base_url + path, headers=self.headers)

    def events_url(self, run_id: UUID, gateway: ProductProcess | None = None) -> str:
        return f"{(gateway or self.gateways[-1]).base_url}/v1/runs/{run_id}/events"

    async def follow(self, run_id: UUID, *, cut: Callable[[], int | None] = lambda: None, within: float = 60.0) -> "Followed":
        """Follows a run to its end as a client does: takes up a cut stream after the last id. `cut` says after how many frames the
        client itself breaks off (None: never).
        """
        seen = Followed()
        async with asyncio.timeout(within):
            while not seen.transcript.ended:
                with contextlib.suppress(OSError, StreamCutError):
                    await self._follow_once(run_id, seen, cut())
        return seen

    async def _follow_once(self, run_id: UUID, seen: "Followed", most: int | None) -> None:
        cursor = str(seen.transcript.cursor) if seen.transcript.cursor >= 0 else None
        try:
            async with open_stream(self.events_url(run_id), headers=self.headers, last_event_id=cursor, within=30.0) as stream:
                seen.connections += 1
                async for frame in stream:
                    seen.take(frame)
                    if most is not None:
                        most -= 1
                        if most <= 0:
                            return
        except StreamRefusedError as refused:
            if refused.status != 503:
                raise
            await asyncio.sleep(0.05)

    async def log_text(self, run_id: UUID) -> str:
        """What the log in Postgres says, by the reducer."""
        return (await self.log_transcript(run_id)).text

    async def log_transcript(self, run_id: UUID) -> Transcript:
        import json

        transcript = Transcript()
        for row in await self.pool.fetch(
            "SELECT seq, kind, data::text AS data FROM messages WHERE run_id = $1 ORDER BY seq", run_id
        ):
            transcript.feed(row["seq"], row["kind"], json.loads(row["data"]))
        return transcript

    async def status(self, run_id: UUID) -> str:
        found: str = await self.pool.fetchval("SELECT status FROM runs WHERE id = $1", run_id)
        return found

    async def stored(self, run_id: UUID, *, kinds: tuple[str, ...] = ()) -> int:
        """How many events of a run (of these kinds) are in Postgres."""
        found: int = await self.pool.fetchval(
            "SELECT count(*) FROM messages WHERE run_id = $1 AND ($2::text[] = '{}' OR kind = ANY ($2))", run_id, list(kinds)
        )
        return found

    async def outcomes(self, run_id: UUID) -> list[str]:
        rows = await self.pool.fetch("SELECT outcome FROM attempts WHERE run_id = $1 ORDER BY epoch", run_id)
        return [row["outcome"] for row in rows]

    async def has_no_holes(self) -> bool:
        """Whether every log counts 0, 1, 2…"""
        holes: int = await self.pool.fetchval(
            "SELECT count(*) FROM (SELECT run_id FROM messages GROUP BY run_id HAVING max(seq) + 1 <> count(*)) x"
        )
        return holes == 0

    async def worker_of(self, run_id: UUID, workers: list[ProductProcess]) -> ProductProcess:
        """Which of the worker processes has the run now: its pod name begins the owner."""
        owner: str = await self.pool.fetchval("SELECT owner FROM attempts WHERE run_id = $1 AND outcome = 'running'", run_id)
        return next(worker for worker in workers if owner.startswith(worker.name + "-"))


@dataclass
class Followed:
    """What a client saw of one run."""

    transcript: Transcript = field(default_factory=Transcript)
    seqs: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    connections: int = 0

    def take(self, frame: Frame) -> None:
        event = frame.json()
        if event.get("seq") is not None:
            assert str(event["seq"]) == frame.id, "the frame's id is the event's seq"
            self.seqs.append(event["seq"])
        self.kinds.append(event["kind"])
        self.transcript.feed(event.get("seq"), event["kind"], event["data"])


@contextlib.asynccontextmanager
async def system(database_url: str, redis_url: str, processes: ProductProcesses, folder: Path) -> AsyncIterator[System]:
    """Files and a fake provider; the test starts the processes that it needs."""
    key, record = generate(
        secrets.token_bytes(RANDOM_BYTES), user="ann", scopes=(), created=datetime.now(UTC).replace(microsecond=0)
    )
    (folder / "agentrun.yaml").write_text(MANIFEST)
    (folder / "whole_path_agent.py").write_text(AGENT)
    (folder / "keys").write_text(record_line(record) + "\n")
    with FakeProvider() as provider:
        environment = {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "none"}
        product = Product(
            folder / "agentrun.yaml",
            database_url,
            redis_url,
            folder / "keys",
            namespace="default",
            name="agent",
            environment=environment,
        )
        pool = await asyncpg.create_pool(database_url, min_size=1, max_size=5)
        unlimited = httpx2.Limits(max_connections=None)
        http = httpx2.AsyncClient(trust_env=False, timeout=60, limits=unlimited)
        try:
            yield System(product, processes, provider, key, pool, http)
        finally:
            await http.aclose()
            processes.close()
            await pool.close()


def random_cuts(seed: int, most: int) -> Callable[[], int | None]:
    """Cuts after 1 to `most` frames, by a seed."""
    rng = random.Random(seed)
    return lambda: rng.randint(1, most)


async def attempt_is_under_way(system: System, run_id: UUID, *, events: int, kinds: tuple[str, ...] = (), epoch: int = 1) -> None:
    """Waits until the run's attempt has stored so many events."""
    await eventually(lambda: _enough(system, run_id, events, kinds, epoch), within=20, what=f"{events} events of attempt {epoch}")


async def _enough(system: System, run_id: UUID, events: int, kinds: tuple[str, ...], epoch: int) -> bool:
    row = await system.pool.fetchrow("SELECT status, epoch FROM runs WHERE id = $1", run_id)
    assert row is not None
    return row["epoch"] >= epoch and await system.stored(run_id, kinds=kinds) >= events
