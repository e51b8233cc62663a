"""At AGENTRUN_SCALE_ROWS rows (`make test-scale`) no statement of the product reads a table as a whole that grows with use.

Plans are looked at where they are made: what a statement, or a statement within a function, has read is counted by Postgres itself.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio
from run_factory import event, ledger_row, submission
from scale_data import AGENT, BIG, fill, run_id
from store_servers import Databases

from agentrun.domain.events import Kind
from agentrun.domain.folding import Fold
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import (
    attempts,
    cron_tasks,
    dead_letters,
    effects,
    follow_ups,
    ledger,
    messages,
    retention,
    runs,
    sessions,
    slots,
    transitions,
)
from agentrun.store.effects import Begin, EffectState, Settle
from agentrun.store.ids import new_id
from agentrun.store.pool import connect
from agentrun.store.retention import BEGINNING
from agentrun.store.transitions import AttemptRef, Claim, Finish, Flush, Reason, TakeOver

ROWS = int(os.environ.get("AGENTRUN_SCALE_ROWS", "1000000"))
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.scale,
]

TIMES = 7
"""After five, Postgres may use one plan for all values of a statement."""
PENDING, DONE, TOLD = ROWS - 2, ROWS // 2, ROWS * 95 // 100
"""Runs: one that waits, an old one, one with events."""


def rid(number: int) -> UUID:
    return UUID(run_id(number))


class Explained:
    """A connection that explains each statement before it makes it, and remembers what was read how."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._conn = conn
        self.indexes: set[str] = set()
        self.whole: set[str] = set()

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        await self._explain(sql, arguments)
        return await self._conn.fetch(sql, *arguments)

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        await self._explain(sql, arguments)
        return await self._conn.fetchrow(sql, *arguments)

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        await self._explain(sql, arguments)
        return await self._conn.fetchval(sql, *arguments)

    async def execute(self, sql: str, *arguments: Any) -> Any:
        await self._explain(sql, arguments)
        return await self._conn.execute(sql, *arguments)

    async def _explain(self, sql: str, arguments: tuple[Any, ...]) -> None:
        plan = json.loads(await self._conn.fetchval(f"EXPLAIN (FORMAT JSON) {sql}", *arguments))
        self._walk(plan[0]["Plan"])

    def _walk(self, node: dict[str, Any]) -> None:
        if "Index Name" in node:
            self.indexes.add(node["Index Name"])
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG:
            self.whole.add(node["Relation Name"])
        for child in node.get("Plans", ()):
            self._walk(child)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conn(databases: Databases) -> AsyncIterator[asyncpg.Connection]:
    async with databases.migrated() as url:
        made = await connect(url, command_timeout=None)
        await fill(made, ROWS)  # type: ignore[arg-type]
        yield made  # type: ignore[misc]
        await made.close()


Query = Callable[[Any], Awaitable[object]]
READS: dict[str, tuple[Query, set[str]]] = {
    "runs.look": (lambda c: runs.look(c, [rid(PENDING), rid(DONE)]), {"runs_pkey", "runs_unfinished"}),
    "runs.due_heads": (runs.due_heads, {"runs_pending", "runs_unfinished"}),
    "runs.get": (lambda c: runs.get(c, rid(DONE), agent=AGENT), {"runs_pkey or runs_by_agent"}),
    "runs.by_client_key": (
        lambda c: runs.by_client_key(c, agent=AGENT, user_id="user-1", session_given="session-1", client_key="client-4"),
        {"runs_client_key"},
    ),
    "runs.by_keys": (lambda c: runs.by_keys(c, ["key-1", "key-2"]), {"runs_idempotency_key_key"}),
    "runs.list_runs": (lambda c: runs.list_runs(c, agent=AGENT, user_id="user-7"), {"runs_by_user"}),
    "runs.list_runs, admin": (lambda c: runs.list_runs(c, agent=AGENT, user_id=None), {"runs_by_agent or runs_pkey"}),
    "runs.list_runs, session": (
        lambda c: runs.list_runs(c, agent=AGENT, user_id="user-1", session="session-1"),
        {"sessions_agent_user_id_external_id_key", "runs_session_id_session_position_key"},
    ),
    "runs.list_runs, session, admin": (
        lambda c: runs.list_runs(c, agent=AGENT, user_id=None, session="session-1"),
        {"sessions_by_name", "runs_session_id_session_position_key"},
    ),
    "runs.held_inputs": (lambda c: runs.held_inputs(c, [rid(DONE)]), {"inputs_held"}),
    "runs.inputs_of": (lambda c: runs.inputs_of(c, rid(DONE)), {"inputs_held", "inputs_run"}),
    "runs.history": (lambda c: runs.history(c, rid(DONE), before_position=3), {"runs_session_id_session_position_key"}),
    "attempts.expired": (attempts.expired, {"attempts_lease"}),
    "attempts.of_run": (lambda c: attempts.of_run(c, rid(DONE)), {"attempts_pkey"}),
    "messages.after": (lambda c: messages.after(c, rid(TOLD), after=3), {"messages_pkey"}),
    "messages.page": (lambda c: messages.page(c, rid(TOLD), after=-1, limit=200, most_bytes=1000), {"messages_pkey"}),
    "messages.tops": (lambda c: messages.tops(c, [rid(TOLD), rid(DONE)]), {"messages_pkey", "runs_pkey"}),
    "messages.outline": (lambda c: messages.outline(c, rid(TOLD)), {"messages_pkey"}),
    "messages.spoken": (lambda c: messages.spoken(c, rid(TOLD), Fold(8, None, frozenset())), {"messages_pkey"}),
    "ledger.of_run": (lambda c: ledger.of_run(c, rid(DONE)), {"ledger_pkey"}),
    "ledger.unpriced_models": (ledger.unpriced_models, {"ledger_unpriced"}),
    "sessions.named": (
        lambda c: sessions.named(c, agent=AGENT, user_id="user-1", external_id="session-1"),
        {"sessions_agent_user_id_external_id_key"},
    ),
    "sessions.named, admin": (
        lambda c: sessions.named(c, agent=AGENT, user_id=None, external_id="session-1"),
        {"sessions_by_name"},
    ),
    "sessions.list_sessions": (lambda c: sessions.list_sessions(c, agent=AGENT, user_id="user-7"), {"sessions_by_user"}),
    "sessions.list_sessions, admin": (lambda c: sessions.list_sessions(c, agent=AGENT, user_id=None), {"sessions_pkey"}),
    "effects.of_run": (lambda c: effects.of_run(c, rid(DONE)), {"effects_run"}),
    "effects.unsettled": (lambda c: effects.unsettled(c, agent=AGENT, user_id=None), {"effects_unsettled"}),
    "effects.settle_by_hand": (
        lambda c: effects.settle_by_hand(c, rid(0), name="refund", key="o-0", state=EffectState.FAILED, response=None),
        set(),
    ),
    "dead_letters.count_open": (dead_letters.count_open, {"dead_letters_open"}),
    "dead_letters.list_letters": (lambda c: dead_letters.list_letters(c, agent=AGENT, user_id=None), {"dead_letters_open"}),
    "dead_letters.list_letters, all": (
        lambda c: dead_letters.list_letters(c, agent=AGENT, user_id=None, state=None),
        {"dead_letters_pkey"},
    ),
    "dead_letters.get": (lambda c: dead_letters.get(c, rid(0), agent=AGENT), {"dead_letters_pkey"}),
    "dead_letters.discard": (lambda c: dead_letters.discard(c, rid(0)), {"dead_letters_pkey"}),
    "slots.unfinished": (lambda c: slots.unfinished(c, new_id()), {"runs_unfinished_of_task"}),
    "cron_tasks.states": (lambda c: cron_tasks.states(c, [new_id()]), {"runs_unfinished_of_task"}),
}


@pytest.mark.parametrize("name", READS)
async def test_a_named_query_uses_its_index(conn: asyncpg.Connection, name: str) -> None:
    query, wanted = READS[name]
    for _ in range(TIMES):
        explained = Explained(conn)
        async with _taken_back(conn):
            await query(explained)
        assert explained.whole == set(), f"{name} reads whole tables"
        for one in wanted:
            assert explained.indexes & set(one.split(" or ")), f"{name} uses {explained.indexes}, not {one}"


async def _submit(c: asyncpg.Connection) -> None:
    new = [submission(session=f"session-{n}", user=f"user-{n}") for n in (1, 2)]
    await transitions.submit(c, new)
    await follow_ups.submit(c, [submission(session="other", user="user-3")], Policy.MERGE)
    await follow_ups.follow_up(c, submission(session="session-1", user="user-1"), Policy.MERGE, window_seconds=30)


async def _claim(c: asyncpg.Connection) -> None:
    # the newest runs wait; the first of each session is its head
    heads = [number for number in range(ROWS - 40, ROWS) if number % 4 == 0]
    claimed = await transitions.claim(c, [Claim(rid(number), 0, "w/n") for number in heads], lease_seconds=30)
    assert claimed
    refs = [AttemptRef(one.run_id, one.epoch) for one in claimed]
    await transitions.renew(c, refs, lease_seconds=30)
    first, second, third, fourth = refs[:4]
    await transitions.flush(c, [Flush(first.run_id, 1, 200, [event(20)], [ledger_row()])])
    await effects.begin(c, [Begin(second.run_id, 1, new_id(), "refund", "o-x", None, again=False)])
    await effects.settle(c, [Settle(second.run_id, 1, "refund", "o-x", EffectState.DONE, None)])
    end = event(21, Kind.COMPLETED, output="x")
    await transitions.finish(c, [Finish(first.run_id, 1, RunStatus.SUCCEEDED, result="{}", events=[end])])
    await transitions.take_over(c, [TakeOver(third.run_id, Reason.CANCELLED), TakeOver(fourth.run_id, Reason.HANDED_BACK, 1, 10)])


async def _redrive(c: asyncpg.Connection) -> None:
    assert await dead_letters.redrive(c, rid(5000), run_id=new_id(), inputs=[new_id()])


async def _retention(c: asyncpg.Connection) -> None:
    done = await retention.archive(c, age_seconds=86_400, runs=100, events=2000)
    assert done.events
    assert (await retention.delete_runs(c, age_seconds=30 * 86_400, after=BEGINNING, runs=100)).runs
    assert await retention.delete_ledger(c, age_seconds=30 * 86_400, rows=1000) == 1000


@pytest.mark.parametrize("work", [_submit, _claim, _redrive, _retention], ids=lambda one: one.__name__.strip("_"))
async def test_no_statement_within_a_function_reads_a_whole_table(
    conn: asyncpg.Connection, work: Callable[[asyncpg.Connection], Awaitable[None]]
) -> None:
    for _ in range(TIMES):
        async with _taken_back(conn):
            before = await whole_reads(conn)
            await work(conn)
            after = await whole_reads(conn)
        assert {name for name in BIG if after.get(name) != before.get(name)} == set()


async def whole_reads(conn: asyncpg.Connection) -> dict[str, int]:
    """How often this connection has read each table as a whole, by what it has not reported yet."""
    return dict(await conn.fetch("SELECT relname, seq_scan FROM pg_stat_xact_user_tables"))


def _taken_back(conn: asyncpg.Connection) -> Any:
    return _TakenBack(conn)


class _TakenBack:
    """A transaction that changes nothing in the end."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._transaction = conn.transaction()

    async def __aenter__(self) -> None:
        await self._transaction.start()

    async def __aexit__(self, *_: object) -> None:
        await self._transaction.rollback()
