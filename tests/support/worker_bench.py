"""Workers inside the test's own process, on real stores, with agents that are plain functions."""

import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from uuid import UUID

from run_factory import submission
from waiting import eventually

from agentrun.agents.base import Context, Result
from agentrun.bus import connection
from agentrun.bus.keys import Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.domain.events import Event, Kind
from agentrun.domain.reducer import Transcript
from agentrun.domain.states import FINAL, RunStatus
from agentrun.store import attempts, messages, runs, transitions
from agentrun.store.attempts import AttemptRow
from agentrun.store.pool import Pool, create_pool
from agentrun.worker import consumer
from agentrun.worker.endings import Retries
from agentrun.worker.keeper import LeaseKeeper, LeaseStores
from agentrun.worker.run_log import FlushLimits
from agentrun.worker.worker import Limits, Worker, consumer_name

Agent = Callable[[Context], Awaitable[Result]]
KEYS = Keys("test", "agent")
LIMITS = Limits(
    capacity=4,
    lease_seconds=2.0,
    max_run_seconds=30.0,
    flush=FlushLimits(50, 0.05),
    retries=Retries(3, 0.05, random.random),
    max_lost_attempts=3,
)


@dataclass
class FunctionExecutor:
    """Runs a function, and counts how often."""

    agent: Agent
    started: list[UUID] = field(default_factory=list)

    async def execute(self, context: Context) -> Result:
        self.started.append(context.run.id)
        return await self.agent(context)


async def say(context: Context, text: str, item: int = 0) -> None:
    """One message of one delta."""
    await context.emit(Kind.ITEM_ADDED, {"item": item, "type": "message"})
    await context.emit(Kind.TEXT_DELTA, {"item": item, "part": 0, "text": text})
    await context.emit(Kind.TEXT_DONE, {"item": item, "part": 0, "text": text})
    await context.emit(Kind.ITEM_DONE, {"item": item})


async def echo(context: Context) -> Result:
    """Says what the user said."""
    text = " ".join(one.text for one in context.inputs)
    await say(context, text)
    return Result(text, [{"said": text}])


class Bench:
    """Stores and their direct view: the test looks at Postgres and Redis past the worker, and past any proxy."""

    def __init__(self, database_url: str, redis_url: str, pool: Pool, work: WorkStream, redis: Any) -> None:
        self.database_url = database_url
        self.redis_url = redis_url
        self.pool = pool
        self.work = work
        self.redis = redis

    async def submit(self, *texts: str, session: str = "s1", publish: bool = True) -> list[UUID]:
        """New runs in one session."""
        done = [(await transitions.submit(self.pool, [submission(text, session=session)]))[0] for text in texts]
        if publish:
            await self.work.publish([one.run_id for one in done if one.is_head])
        return [one.run_id for one in done]

    async def status(self, run_id: UUID) -> RunStatus:
        return RunStatus(await self.pool.fetchval("SELECT status FROM runs WHERE id = $1", run_id))

    async def ended(self, *run_ids: UUID, within: float = 10.0) -> list[RunStatus]:
        """Waits for the runs' ends."""

        async def all_final() -> bool:
            return all([await self.status(run_id) in FINAL for run_id in run_ids])

        await eventually(all_final, within=within, what="the runs have ended")
        return [await self.status(run_id) for run_id in run_ids]

    async def result(self, run_id: UUID) -> Any:
        return json.loads(await self.pool.fetchval("SELECT result FROM runs WHERE id = $1", run_id))

    async def error(self, run_id: UUID) -> Any:
        return json.loads(await self.pool.fetchval("SELECT error FROM runs WHERE id = $1", run_id))

    async def log(self, run_id: UUID) -> list[Event]:
        return await messages.after(self.pool, run_id, after=-1, limit=100_000)

    async def stored(self, run_id: UUID, count: int) -> None:
        """Waits until the log has so many events."""

        async def there() -> bool:
            return len(await self.log(run_id)) >= count

        await eventually(there, within=5, what=f"{count} events are stored")

    async def kinds(self, run_id: UUID) -> list[str]:
        return [event.kind.value for event in await self.log(run_id)]

    async def text(self, run_id: UUID) -> str:
        """What a reader of the whole log sees at the end; the log has no hole."""
        seen = Transcript()
        log = await self.log(run_id)
        assert [event.seq for event in log] == list(range(len(log)))
        for event in log:
            seen.feed(event.seq, event.kind, json.loads(event.data))
        return seen.text

    async def outcomes_are(self, run_id: UUID, *outcomes: str, within: float = 5.0) -> None:
        async def they_are() -> bool:
            return await self.outcomes(run_id) == list(outcomes)

        await eventually(they_are, within=within, what=f"the attempts' outcomes are {outcomes}")

    async def sweep_until_published(self, run_id: UUID, within: float = 5.0) -> None:
        """What the sweep does: a pending, due head without an entry is published."""

        async def published() -> bool:
            due = [head.run_id for head in await runs.due_heads(self.pool)]
            return run_id in due and await self.work.publish(due) > 0

        await eventually(published, within=within, what="the run is due and published")

    async def lease_runs_out(self, run_id: UUID) -> None:
        """As if the time of the running attempt's lease had passed."""
        await self.pool.execute(
            "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1 AND outcome = 'running'",
            run_id,
        )

    async def republish(self, run_id: UUID) -> None:
        """What a reaper does after it took a run."""
        await self.work.republish([Held(run_id, (await self.work.entries([run_id]))[run_id])])

    async def attempts(self, run_id: UUID) -> Sequence[AttemptRow]:
        return await attempts.of_run(self.pool, run_id)

    async def outcomes(self, run_id: UUID) -> list[str]:
        return [row.outcome.value for row in await self.attempts(run_id)]

    async def streamed(self, run_id: UUID) -> list[int]:
        """The numbers that went out to Redis."""
        return [int(entry.split(b"-")[0]) - 1 for entry, _ in await self.redis.xrange(KEYS.run(run_id))]

    async def nothing_held(self, within: float = 5.0) -> None:
        """Waits until no entry is pending and the hash is empty."""

        async def empty() -> bool:
            pending = await self.redis.xpending(KEYS.runs, "workers")
            return bool(pending["pending"] == 0 and await self.redis.hlen(KEYS.entries) == 0)

        await eventually(empty, within=within, what="no entry is held any more")


@contextlib.asynccontextmanager
async def bench(database_url: str, redis_url: str) -> AsyncIterator[Bench]:
    pool = await create_pool(database_url, 5)
    redis = await connection.connect(redis_url)
    work = WorkStream(redis, KEYS)
    await work.ensure_group()
    try:
        yield Bench(database_url, redis_url, pool, work, redis)
    finally:
        await work.aclose()
        await redis.aclose()
        await pool.close()


@contextlib.asynccontextmanager
async def worker(
    agent: Agent,
    stores: Bench,
    *,
    database_url: str = "",
    redis_url: str = "",
    lease_database_url: str = "",
    limits: Limits = LIMITS,
    on_blocked: Callable[[str], None] = lambda message: None,
) -> AsyncIterator[tuple[Worker, FunctionExecutor]]:
    """A running worker, on the bench's stores or through proxies; stopped at the end."""
    database_url, redis_url = database_url or stores.database_url, redis_url or stores.redis_url
    executor = FunctionExecutor(agent)
    name = consumer_name("w")
    pool = await create_pool(database_url, 5)
    redis = await connection.connect(redis_url)
    keeper = LeaseKeeper(
        lambda: LeaseStores(lease_database_url or database_url, redis_url, KEYS, name),
        lease_seconds=limits.lease_seconds,
        on_blocked=on_blocked,
        blocked_seconds=1.0,
    )
    await keeper.start()
    made = Worker(executor, name=name, pool=pool, redis=redis, keys=KEYS, keeper=keeper, limits=limits)
    with patch.object(consumer, "BLOCK_MS", 100):  # a worker that stops waits for its last read
        made.start()
        try:
            yield made, executor
        finally:
            await made.stop(0.0)
            await keeper.stop()
            await redis.aclose()
            pool.terminate()
