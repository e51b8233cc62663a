"""Reports: the sums equal the ledger at every moment, for late and repriced rows too; everybody sees their own; cells are harmless."""

import asyncio
import csv
import io
import json
import random
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import combinations
from typing import Any

import commands
import pytest
from gateway_bench import NAME, NAMESPACE, Room
from hypothesis import given
from hypothesis import strategies as st
from run_factory import ledger_row
from store_servers import Databases

from agentrun.costs.reports import SUMS, defused
from agentrun.store import usage
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Flush, flush
from agentrun.store.usage import GroupBy

pytestmark = pytest.mark.asyncio(loop_scope="module")

AGENT = f"{NAMESPACE}/{NAME}"
FIRST, LAST = date(2020, 1, 1), date(2100, 1, 1)
FULL = """
    SELECT %s, count(*) AS calls, sum(input_tokens) AS input_tokens, sum(cached_tokens) AS cached_tokens,
           sum(cache_write_tokens) AS cache_write_tokens, sum(output_tokens) AS output_tokens, sum(reasoning_tokens) AS reasoning_tokens,
           sum(audio_input_tokens) AS audio_input_tokens, sum(audio_output_tokens) AS audio_output_tokens,
           coalesce(sum(cost_usd), 0) AS cost_usd, count(*) FILTER (WHERE cost_usd IS NULL) AS unpriced,
           count(*) FILTER (WHERE unmeasured) AS unmeasured, count(*) FILTER (WHERE lost) AS lost_calls,
           coalesce(sum(cost_usd) FILTER (WHERE lost), 0) AS lost_usd
    FROM ledger l GROUP BY %s"""
OF_LEDGER = {
    GroupBy.DAY: "(l.at AT TIME ZONE 'UTC')::date::text",
    GroupBy.MODEL: "l.model",
    GroupBy.SESSION: "l.session_id::text",
    GroupBy.USER: "l.user_id",
    GroupBy.TASK: "coalesce(l.cron_task::text, '')",
    GroupBy.AGENT: "l.agent",
}


async def full(pool: Pool, by: list[GroupBy]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The report from every single row."""
    columns = ", ".join(OF_LEDGER[one] for one in by)
    rows = await pool.fetch(FULL % (columns, ", ".join(str(n + 1) for n in range(len(by)))))
    return {tuple(row[n] for n in range(len(by))): {name: row[name] for name in SUMS} for row in rows}


async def reported(pool: Pool, by: list[GroupBy]) -> dict[tuple[str, ...], dict[str, Any]]:
    found = await usage.report(pool, by, agent=AGENT, user=None, since=FIRST, until=LAST, most=100_000)
    for name in SUMS:
        assert sum(getattr(group.sums, name) for group in found.groups) == getattr(found.total, name)
    return {group.values: {name: getattr(group.sums, name) for name in SUMS} for group in found.groups}


async def agree(pool: Pool) -> None:
    for size in (1, 2, 3):
        for by in combinations(GroupBy, size):
            assert await reported(pool, list(by)) == await full(pool, list(by)), by


async def spend(
    room: Room, user: str = "ann", *, session: str = "s", model: str = "m", cost: str | None = "0.25", calls: int = 1
) -> None:
    """A run that has made calls."""
    run = (await room.work_on(await room.new_run(session=session, user=user))).run_id
    rows = [replace(ledger_row(call, cost=cost), model=model) for call in range(calls)]
    await flush(room.pool, [Flush(run, 1, 128, ledger=rows)])
    await room.pool.execute("UPDATE runs SET status = 'cancelled' WHERE id = $1", run)


async def test_sums_equal_the_ledger_while_calls_come_late_change_and_are_folded(room: Room) -> None:
    pool, rng = room.pool, random.Random(11)
    tasks, sessions = [None, new_id(), new_id()], [new_id() for _ in range(7)]
    over = asyncio.Event()

    async def insert(count: int) -> None:
        now = datetime.now(UTC)
        rows = [
            (
                new_id(),
                rng.randint(1, 3),
                rng.randint(0, 9),
                now - timedelta(days=rng.randint(0, 5), seconds=rng.randint(0, 90_000)),
                AGENT,
                rng.choice(["ann", "bob", "=eve"]),
                rng.choice(sessions),
                rng.choice(tasks),
                rng.choice(["m1", "m2", "m3"]),
                *(rng.choice([0, 1, 17, 2**53 - 1]) for _ in range(7)),
                rng.choice([None, Decimal(0), Decimal("0.0000001"), Decimal("123456789.123456789")]),
                rng.random() < 0.2,
            )
            for _ in range(count)
        ]
        await pool.executemany(
            """INSERT INTO ledger (run_id, epoch, call, at, agent, user_id, session_id, cron_task, model, input_tokens, cached_tokens,
                   cache_write_tokens, output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, unmeasured)
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)""",
            rows,
        )

    async def change() -> None:
        some = "(SELECT run_id FROM ledger ORDER BY random() LIMIT 5)"
        await pool.execute(f"UPDATE ledger SET cost_usd = 0.75 WHERE cost_usd IS NULL AND run_id IN {some}")
        await pool.execute(f"UPDATE ledger SET lost = true WHERE run_id IN {some}")
        await pool.execute(
            f"UPDATE ledger SET unmeasured = false, input_tokens = 3, model = 'm1' WHERE unmeasured AND run_id IN {some}"
        )

    async def folding() -> None:
        while not over.is_set():
            await usage.fold(pool, at_once=rng.randint(1, 40))
            await asyncio.sleep(0.001)

    folders = [asyncio.create_task(folding()) for _ in range(3)]
    for turn in range(25):
        await insert(rng.randint(1, 20))
        await change()
        if turn % 8 == 0:
            assert await reported(pool, [GroupBy.DAY, GroupBy.MODEL]) == await full(pool, [GroupBy.DAY, GroupBy.MODEL])
    over.set()
    await asyncio.gather(*folders)
    await agree(pool)
    while await usage.fold(pool):
        pass
    assert await pool.fetchval("SELECT count(*) FROM usage_changes") == 0
    await agree(pool)
    before = await reported(pool, [GroupBy.MODEL])
    await pool.execute("DELETE FROM ledger")
    assert await reported(pool, [GroupBy.MODEL]) == before, "what retention deletes stays in the reports"


async def test_a_report_reads_no_single_call(room: Room) -> None:
    for by in ([GroupBy.DAY, GroupBy.MODEL], [GroupBy.SESSION], [GroupBy.TASK, GroupBy.USER]):
        plan = json.loads(await room.pool.fetchval(f"EXPLAIN (FORMAT JSON) {usage.statement(by)}", AGENT, None, FIRST, LAST, 10))
        tables = relations(plan[0]["Plan"])
        assert tables >= {"usage_changes"} and "ledger" not in tables
        assert ("usage_sessions" in tables) == (GroupBy.SESSION in by) != ("usage_daily" in tables)


def relations(plan: dict[str, Any]) -> set[str]:
    return {plan[key] for key in ("Relation Name",) if key in plan}.union(*(relations(one) for one in plan.get("Plans", [])))


async def test_everybody_sees_what_they_spent_and_an_admin_all(room: Room) -> None:
    await spend(room, "ann", calls=2)
    await spend(room, "bob", session="b", cost=None)
    mine = (await room.get("/v1/usage?group_by=user,model")).json()
    assert [one["user"] for one in mine["groups"]] == ["ann"] and mine["total"]["cost_usd"] == "0.5"
    assert (await room.get("/v1/usage?user=bob")).status_code == 403
    assert (await room.get("/v1/usage", user="bob")).json()["total"]["cost_usd"] is None
    everybody = (await room.get("/v1/usage?group_by=user", user="root")).json()
    assert [(one["user"], one["calls"], one["cost_usd"], one["unpriced"]) for one in everybody["groups"]] == [
        ("ann", 2, "0.5", 0),
        ("bob", 1, None, 1),
    ]
    assert everybody["total"]["calls"] == 3 and everybody["total"]["cost_usd"] == "0.5"
    one = (await room.get("/v1/usage?group_by=user&user=bob", user="root")).json()
    assert [group["user"] for group in one["groups"]] == ["bob"]


async def test_a_session_has_its_name_and_a_cron_task_too(room: Room) -> None:
    await spend(room, session="trip")
    uid = new_id()
    spec = '{"name": "nightly"}'
    await room.pool.execute("INSERT INTO cron_tasks (uid, generation, spec, slots_from) VALUES ($1, 1, $2, now())", uid, spec)
    await room.pool.execute(
        "INSERT INTO ledger SELECT (jsonb_populate_record(l, jsonb_build_object('call', 7, 'cron_task', $1::uuid))).* FROM ledger l",
        uid,
    )
    found = (await room.get("/v1/usage?group_by=session,task")).json()["groups"]
    assert [(one["session"], one["task"], one["calls"]) for one in found] == [("trip", "", 1), ("trip", "nightly", 1)]
    assert found[0]["session_id"] == found[1]["session_id"] != ""


async def test_days_are_a_range_and_nothing_is_a_report_too(room: Room) -> None:
    await spend(room)
    await room.pool.execute("UPDATE ledger SET at = at - interval '3 days'")
    today = datetime.now(UTC).date()
    day = today - timedelta(days=3)
    for text in (f"{day}", f"{day:%Y%m%d}"):
        found = (await room.get(f"/v1/usage?from={text}&to={text}")).json()
        assert (found["from"], found["to"], found["total"]["calls"]) == (str(day), str(day), 1)
    empty = (await room.get(f"/v1/usage?from={today}&to={today}")).json()
    assert (empty["groups"], empty["total"]["calls"], empty["total"]["cost_usd"]) == ([], 0, "0")
    assert (await room.get("/v1/usage")).json()["from"] == str(today - timedelta(days=29))


@pytest.mark.parametrize(
    "query",
    [
        "group_by=moon",
        "group_by=day,day",
        "group_by=",
        "from=2026-02-31",
        "from=2026-02-02&to=2026-02-01",
        "to=1764460800",
        "format=xml",
    ],
)
async def test_what_cannot_be_reported_is_refused_in_words(room: Room, query: str) -> None:
    refused = await room.get(f"/v1/usage?{query}")
    assert refused.status_code == 400 and refused.json()["code"] == "invalid_parameter"


async def test_api_csv_and_command_line_agree_to_the_micro_dollar(room: Room) -> None:
    await spend(room, session="a", model="m1", cost="0.0000001", calls=3)
    await spend(room, session="b", model="m2", cost="1234567.000001")
    await spend(room, session="c", model="=cmd|'/c calc'!A0", cost=None)
    query = "group_by=day,model"
    found = (await room.get(f"/v1/usage?{query}")).json()
    answer = await room.get(f"/v1/usage?{query}&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["model"] for row in rows] == ["'=cmd|'/c calc'!A0", "m1", "m2"]
    assert (
        [row["cost_usd"] or None for row in rows]
        == [one["cost_usd"] for one in found["groups"]]
        == [None, "0.0000003", "1234567.000001"]
    )
    assert [[row[name] for name in SUMS if name != "cost_usd"] for row in rows] == [
        [str(one[name]) for name in SUMS if name != "cost_usd"] for one in found["groups"]
    ]
    assert await command(room, "--group-by", "day,model", "--csv") == answer.text.replace("\r\n", "\n")
    assert json.loads(await command(room, "--group-by", "day,model", "--json")) == found
    table = [line.split() for line in (await command(room, "--group-by", "day,model")).splitlines()]
    assert table[0][:3] == ["DAY", "MODEL", "CALLS"] and len(table) == 5
    assert [line[-4] for line in table[1:]] == ["unknown", "0.0000003", "1234567.000001", found["total"]["cost_usd"]]
    assert Decimal(found["total"]["cost_usd"]) == await room.pool.fetchval("SELECT sum(cost_usd) FROM ledger")


async def command(room: Room, *arguments: str) -> str:
    """What `agentrun usage` prints."""
    code, out, err = await commands.command(room.base_url, room.keys["ann"], "usage", *arguments)
    assert code == 0, err
    return out.replace("\r\n", "\n")


@given(st.text(st.sampled_from("=+-@\t\r\nab1 '"), max_size=6))
async def test_no_cell_begins_as_a_formula_and_every_other_cell_stays_as_it_is(text: str) -> None:
    cell = defused(text)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) and cell in (text, f"'{text}")
    assert cell == text or text[0] in "=+-@\t\r\n"


@pytest.mark.scale
async def test_a_million_calls_are_answered_from_the_sums(databases: Databases) -> None:
    """30 days, 200 users, 20,000 sessions, 8 models, 3 CronTasks; then late and repriced rows."""
    async with databases.migrated() as url:
        pool = await create_pool(url, 3)
        for part in range(10):
            await pool.execute(
                """INSERT INTO ledger (run_id, epoch, call, at, agent, user_id, session_id, cron_task, model, input_tokens, cached_tokens,
                       cache_write_tokens, output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, unmeasured)
                   SELECT md5(n::text)::uuid, 1, 0, now() - make_interval(secs => n * 2.5), $1, 'u' || n % 200,
                          md5('s' || n % 20000)::uuid, CASE WHEN n % 10 = 0 THEN md5('t' || n % 3)::uuid END, 'm' || n % 8,
                          n % 5000, n % 100, n % 10, n % 900, n % 50, 0, 0,
                          CASE WHEN n % 97 > 0 THEN n * 0.0000001 END, n % 31 = 0
                   FROM generate_series($2::integer + 1, $2::integer + 100000) AS n""",
                AGENT,
                part * 100_000,
                timeout=300,
            )
            while await usage.fold(pool):
                pass
        await pool.execute(
            "UPDATE ledger SET cost_usd = 1 WHERE cost_usd IS NULL AND run_id < '20000000-0000-0000-0000-000000000000'",
            timeout=300,
        )
        await pool.execute("ANALYZE", timeout=300)
        assert await pool.fetchval("SELECT count(*) FROM ledger") == 1_000_000
        for by in ([GroupBy.DAY, GroupBy.MODEL], [GroupBy.USER], [GroupBy.TASK], [GroupBy.AGENT], [GroupBy.SESSION]):
            begun = asyncio.get_running_loop().time()
            found = await reported(pool, by)
            took = asyncio.get_running_loop().time() - begun
            assert found == await full(pool, by)
            plan = json.loads(
                await pool.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {usage.statement(by)}", AGENT, None, FIRST, LAST, 10**6)
            )
            assert "ledger" not in relations(plan[0]["Plan"])
            print(f"{','.join(by)}: {len(found)} groups in {took:.2f} s")
        await pool.close()
