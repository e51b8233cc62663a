"""Functions that code of a former schema calls: a roll-back, and pods of both versions side by side, need them as they were."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from run_factory import submission

from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Submission, submission_columns, submission_row

SUBMITTED = ["run_id", "session_id", "status", "inserted", "reused", "is_head"]
FOLLOWED_UP = [*SUBMITTED, "rejected", "superseded", "epoch", "owner", "event_seq", "event_kind", "event_data"]


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 2)
    yield made
    await made.close()


async def call(pool: Pool, name: str, values: Sequence[Any]) -> list[asyncpg.Record]:
    places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
    return await pool.fetch(f"SELECT * FROM agentrun_1.{name}({places})", *values)


async def stored(pool: Pool) -> set[Any]:
    return {row["id"] for row in await pool.fetch("SELECT id FROM runs WHERE reserved_usd IS NULL AND budget_day IS NULL")}


def two() -> list[Submission]:
    return [submission("a", session="s1"), submission("b", session="s2")]


async def test_mg_05_code_before_schema_3_submits(pool: Pool) -> None:
    items = two()
    rows = await call(pool, "submit", submission_columns(items))
    assert [list(row.keys()) for row in rows] == [SUBMITTED] * 2
    assert [(row["run_id"], row["status"], row["inserted"], row["is_head"]) for row in rows] == [
        (item.run_id, "pending", True, True) for item in items
    ]
    assert await stored(pool) == {item.run_id for item in items}


async def test_mg_05_code_before_schema_4_submits_a_group_and_decides_what_leaves_it(pool: Pool) -> None:
    items = two()
    rows = await call(pool, "submit_group", [*submission_columns(items), "Merge"])
    assert [list(row.keys()) for row in rows] == [SUBMITTED] * 2
    assert [(row["run_id"], row["inserted"]) for row in rows] == [(item.run_id, True) for item in items]

    late = submission("c", session="s1")
    [row] = await call(pool, "submit_group", [*submission_columns([late]), "Merge"])
    assert row["run_id"] is None, "its session is busy"
    [row] = await call(pool, "follow_up", [*submission_row(late), "Merge", 30.0])
    assert list(row.keys()) == FOLLOWED_UP
    assert (row["run_id"], row["inserted"], row["rejected"], row["superseded"]) == (late.run_id, True, False, items[0].run_id)
    assert await stored(pool) == {late.run_id, *(item.run_id for item in items)}


SIGNATURES = {
    1: [
        "claim(uuid[], integer[], text[], double precision, integer)",
        "renew(uuid[], integer[], double precision)",
        "flush(uuid[], integer[], integer[], integer[], text[], uuid[], integer[], integer[], text[], text[], jsonb)",
        "finish(uuid[], integer[], text[], text[], text[], uuid[], integer[], integer[], text[], text[], jsonb)",
        "take_over(uuid[], text[], integer[], integer[], double precision[], text[], uuid[], integer, timestamptz, uuid[], integer[],"
        " integer[], text[], text[], jsonb)",
        f"submit({', '.join(['uuid[]'] * 3 + ['text[]'] * 9)})",
    ],
    3: [
        f"submit_group({', '.join(['uuid[]'] * 3 + ['text[]'] * 9)}, text)",
        f"follow_up({', '.join(['uuid'] * 3 + ['text'] * 10)}, double precision)",
        "begin_effects(uuid[], integer[], uuid[], text[], text[], text[], boolean[])",
        "settle_effects(uuid[], integer[], text[], text[], text[], text[])",
    ],
    4: [
        f"submit_group({', '.join(['uuid[]'] * 3 + ['text[]'] * 9)}, text, jsonb)",
        f"follow_up({', '.join(['uuid'] * 3 + ['text'] * 10)}, double precision, jsonb)",
        "hold_sessions(uuid[], text[], text[], text[], uuid[])",
        "reprice(uuid[], integer[], integer[], numeric[], text[])",
    ],
    5: [
        "redrive(uuid, uuid, uuid[], jsonb)",
        "archive(double precision, integer, integer)",
        "delete_runs(double precision, timestamptz, uuid, integer)",
        "delete_ledger(double precision, integer)",
    ],
}
"""What code of the schema of this number has called first, and newer code may call still."""


async def test_mg_05_a_schema_has_all_that_is_called_by_the_oldest_code_that_it_accepts_or_newer(pool: Pool) -> None:
    oldest = await pool.fetchval("SELECT oldest_accepted FROM meta")
    assert oldest == 1, "no migration refuses code of an older one; when one does, say in it, and here, what is called no more"
    for version, signatures in SIGNATURES.items():
        for signature in signatures:
            found = await pool.fetchval("SELECT to_regprocedure($1)::text", f"agentrun_1.{signature}")
            assert found is not None, f"code for schema {version} calls {signature}"
