"""Old rows go, and nothing else: what was said stays whole, what waits for a person stays, and nobody waits for a pass."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from processes import Product, ProductProcesses
from run_factory import AGENT, claimed, event, ledger_row, submission, submitted
from run_logs import LOGS, Log, written
from waiting import eventually

from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.follow_ups import Policy
from agentrun.domain.reducer import Transcript
from agentrun.domain.states import RunStatus
from agentrun.gateway.log import EventLog
from agentrun.maintenance import retention as maintenance
from agentrun.maintenance.retention import DAY_SECONDS, Ages, Retention
from agentrun.store import dead_letters, effects, follow_ups, messages, retention, runs, transitions
from agentrun.store.effects import Begin, EffectState
from agentrun.store.follow_ups import FollowedUp
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.retention import BEGINNING, Archived
from agentrun.store.transitions import Finish, Flush, Reason, TakeOver

HOUR, DAY = 3600.0, DAY_SECONDS
MOST_BATCHES = 1000
NOT_NEEDED = ("text_delta", "reasoning_delta", "tool_arguments_delta", "void")


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 10)
    yield made
    await made.close()


async def aged(pool: Pool, run: UUID, *, days: float = 0, seconds: float = 0) -> None:
    """As if the run had ended so long ago."""
    await pool.execute("UPDATE runs SET finished_at = now() - make_interval(secs => $2) WHERE id = $1", run, days * DAY + seconds)


async def ended(
    pool: Pool, events: Sequence[Event] = (), *, text: str = "hello", session: str = "s1", days: float = 10, calls: int = 1
) -> UUID:
    """A run that succeeded long ago with these events before its last one."""
    run = (await submitted(pool, text, session=session)).run_id
    await claimed(pool, run)
    for start in range(0, len(events), 5000):
        await transitions.flush(pool, [Flush(run, 1, len(events) + 128, events[start : start + 5000])])
    last = event(len(events), Kind.COMPLETED, output="ok")
    result = '{"output": "ok", "messages": []}'
    ledger = [ledger_row(call) for call in range(calls)]
    wish = Finish(run, 1, RunStatus.SUCCEEDED, result=result, events=[last], ledger=ledger)
    assert (await transitions.finish(pool, [wish]))[0].ok
    await aged(pool, run, days=days)
    return run


def message(pieces: int, *, first: int = 0, item: int = 0) -> list[Event]:
    """A whole message of so many pieces."""
    texts = [f"{item}.{n} " for n in range(pieces)]
    return [
        event(first, Kind.ITEM_ADDED, item=item, type="message"),
        *(event(first + 1 + n, Kind.TEXT_DELTA, item=item, part=0, text=text) for n, text in enumerate(texts)),
        event(first + 1 + pieces, Kind.TEXT_DONE, item=item, part=0, text="".join(texts)),
        event(first + 2 + pieces, Kind.ITEM_DONE, item=item),
    ]


async def archive(pool: Pool, *, age: float = HOUR, run_count: int = 100, events: int = 2000) -> Archived:
    """All that there is to archive."""
    total = Archived(0, 0)
    for _ in range(MOST_BATCHES):
        done = await retention.archive(pool, age_seconds=age, runs=run_count, events=events)
        if done == Archived(0, 0):
            return total
        total = Archived(total.events + done.events, total.runs + done.runs)
    raise AssertionError("it never ends")


async def deletions(pool: Pool, *, days: float = 1, run_count: int = 100) -> AsyncIterator[int]:
    """One pass over old runs; how many went with each batch."""
    place = BEGINNING
    for _ in range(MOST_BATCHES):
        done = await retention.delete_runs(pool, age_seconds=days * DAY, after=place, runs=run_count)
        yield done.runs
        if done.place is None:
            return
        place = done.place
    raise AssertionError("it never ends")


async def delete(pool: Pool, *, days: float = 1, run_count: int = 100) -> int:
    """One pass over old runs; how many went."""
    return sum([gone async for gone in deletions(pool, days=days, run_count=run_count)])


def reduced(events: Sequence[Event]) -> tuple[str, Kind | None]:
    transcript = Transcript()
    for one in events:
        transcript.feed(one.seq, one.kind, json.loads(one.data))
    return transcript.text, transcript.end


async def stored(pool: Pool, log: Log) -> UUID:
    """The log as a finished run's, whatever it says."""
    run = (await submitted(pool, "x", session=str(new_id()))).run_id
    await pool.executemany(
        "INSERT INTO messages (run_id, seq, epoch, kind, data) VALUES ($1, $2, $3, $4, $5)",
        [(run, one["seq"], one["epoch"], one["kind"], encode_data(one["data"]).decode()) for one in log.events],
    )
    await pool.execute("UPDATE runs SET status = 'cancelled', finished_at = now() - interval '1 day' WHERE id = $1", run)
    return run


# Events


async def test_deltas_and_voids_of_old_finished_runs_go_and_all_the_rest_stays(pool: Pool) -> None:
    old = await ended(pool, message(20))
    young = await ended(pool, message(20), session="s2", days=0)
    going = (await submitted(pool, "x", session="s3")).run_id
    await claimed(pool, going)
    await transitions.flush(pool, [Flush(going, 1, 200, message(20))])
    before = {run: await messages.after(pool, run, after=-1) for run in (old, young, going)}

    assert await archive(pool) == Archived(20, 1)

    assert await messages.after(pool, old, after=-1) == [one for one in before[old] if one.kind not in NOT_NEEDED]
    assert reduced(await messages.after(pool, old, after=-1)) == reduced(before[old])
    for run in (young, going):
        assert await messages.after(pool, run, after=-1) == before[run]
    archived = dict(await pool.fetch("SELECT id, archived_at IS NOT NULL FROM runs"))
    assert archived == {old: True, young: False, going: False}
    assert await archive(pool) == Archived(0, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=LOGS)
async def test_what_was_said_is_the_same_after_archiving_and_what_a_reader_makes_of_the_gap_too(pool: Pool, log: Log) -> None:
    run = await stored(pool, log)
    before = await messages.after(pool, run, after=-1)
    await archive(pool)
    left = await messages.after(pool, run, after=-1)
    assert reduced(left) == reduced(before)
    assert not [one for one in left if one.kind is Kind.VOID]
    assert left[-1] == before[-1]
    parts = await EventLog(pool, _nothing).gap(run, after=-1)
    if parts is not None:
        transcript = Transcript()
        transcript.feed(None, "gap", {"parts": [{"through": part.through, "text": part.text} for part in parts]})
        transcript.feed(left[-1].seq, left[-1].kind, {})
        assert (transcript.text, transcript.end) == reduced(before)


async def _nothing(_run: UUID, _after: int, _limit: int) -> Sequence[Event]:
    return ()


async def test_what_was_cut_off_is_the_only_copy_and_stays(pool: Pool) -> None:
    log = written([("message", ["a", "b"]), ("tool", None)], ["cut ", "off"], Kind.FAILED)
    run = await stored(pool, log)
    await archive(pool)
    left = await messages.after(pool, run, after=-1)
    assert [json.loads(one.data)["text"] for one in left if one.kind is Kind.TEXT_DELTA] == ["cut ", "off"]
    assert reduced(left)[0] == "abcut off"


async def test_a_whole_text_that_was_taken_back_spares_no_delta_before_it(pool: Pool) -> None:
    """A checkpoint within a message, as an agent of one's own may make it."""
    log = Log()
    log.add("item_added", item=0, type="message")
    log.add("text_delta", item=0, part=0, text="kept ")
    log.add("text_delta", item=0, part=0, text="lost ")
    log.add("text_done", item=0, part=0, text="kept lost ")
    log.add("restart", keep=1)
    log.add("cancelled")
    run = await stored(pool, log)
    await archive(pool)
    left = await messages.after(pool, run, after=-1)
    assert [one.seq for one in left] == [0, 1, 3, 4, 5]
    assert reduced(left) == ("kept ", Kind.CANCELLED)


async def test_a_large_run_goes_in_bounded_batches_and_is_archived_with_the_last(pool: Pool) -> None:
    run = await ended(pool, message(2500))
    sizes = []
    while not await pool.fetchval("SELECT archived_at FROM runs WHERE id = $1", run):
        done = await retention.archive(pool, age_seconds=HOUR, runs=10, events=1000)
        sizes.append(done.events)
    assert sizes == [1000, 1000, 500]
    assert reduced(await messages.after(pool, run, after=-1))[0] == "".join(f"0.{n} " for n in range(2500))


async def test_a_batch_looks_at_no_more_runs_than_its_events_allow(pool: Pool) -> None:
    """Or each of many batches would read the same long runs again, up to the one that it begins with."""
    for number in range(5):
        await ended(pool, message(30), session=f"s{number}", days=10 - number)  # 34 events each
    batches = [await retention.archive(pool, age_seconds=HOUR, runs=100, events=70) for _ in range(4)]
    assert batches == [Archived(60, 2), Archived(60, 2), Archived(30, 1), Archived(0, 0)]


async def test_several_at_once_do_the_work_once(pool: Pool) -> None:
    for number in range(12):
        await ended(pool, message(30), session=f"s{number}")
    done = await asyncio.gather(*(archive(pool, run_count=3, events=40) for _ in range(6)))
    assert sum(one.events for one in done) == 12 * 30
    assert await pool.fetchval("SELECT count(*) FROM runs WHERE archived_at IS NULL") == 0
    assert await pool.fetchval("SELECT count(*) FROM messages WHERE kind = 'text_delta'") == 0


async def test_a_run_that_somebody_holds_is_passed_over(pool: Pool) -> None:
    held, free = await ended(pool, message(3)), await ended(pool, message(3), session="s2")
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT 1 FROM runs WHERE id = $1 FOR NO KEY UPDATE", held)
        async with asyncio.timeout(5):
            assert await archive(pool) == Archived(3, 1)
    assert await pool.fetchval("SELECT archived_at IS NOT NULL FROM runs WHERE id = $1", free)
    assert await archive(pool) == Archived(3, 1)


# Runs


async def test_old_runs_go_with_everything_and_sessions_that_are_empty_then(pool: Pool) -> None:
    old = await ended(pool, message(3))
    young = await ended(pool, message(3), days=0.5)
    alone = await ended(pool, session="s2")
    await archive(pool)
    assert await delete(pool) == 2
    assert [row["id"] for row in await pool.fetch("SELECT id FROM runs")] == [young]
    assert [row["external_id"] for row in await pool.fetch("SELECT external_id FROM sessions")] == ["s1"]
    for table in ("attempts", "messages", "inputs"):
        assert await pool.fetchval(f"SELECT count(*) FROM {table} WHERE run_id = ANY ($1)", [old, alone]) == 0
    assert await pool.fetchval("SELECT count(*) FROM ledger") == 3, "what was spent is kept apart"


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([24_003, 4994, 4994, 4994], [(0, 10_000), (0, 10_000), (1, 4003), (2, 9988), (1, 4994)]),
        ([10_000, 5000, 5000, 1], [(1, 10_000), (2, 10_000), (1, 1)]),
        ([20_000, 10_001], [(0, 10_000), (1, 10_000), (0, 10_000), (1, 1)]),
    ],
)
async def test_old_runs_with_many_events_go_in_bounded_batches(
    pool: Pool, lengths: list[int], steps: list[tuple[int, int]]
) -> None:
    """10,000 events at most; the last event of a run goes with the run, or a reader would wait for it."""
    kept = await ended(pool, _cut_off(12_000), session="kept", days=30)
    await pool.execute("INSERT INTO dead_letters (run_id, payload, reason, attempts) VALUES ($1, '{}', 'x', 1)", kept)
    for number, length in enumerate(lengths):
        await ended(pool, _cut_off(length), session=f"s{number}", days=20 - number)
    await pool.execute("UPDATE runs SET archived_at = now()")
    seen, before = [], await pool.fetchval("SELECT count(*) FROM messages")
    async for gone in deletions(pool):
        left = await pool.fetchval("SELECT count(*) FROM messages")
        seen.append((gone, before - left))
        before = left
        assert not await pool.fetch(
            "SELECT 1 FROM runs r WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.run_id = r.id AND m.kind = 'completed')"
        )
    assert [one for one in seen if one != (0, 0)] == steps
    assert [row["id"] for row in await pool.fetch("SELECT id FROM runs")] == [kept]
    assert await pool.fetchval("SELECT count(*) FROM messages") == 12_000


def _cut_off(length: int) -> list[Event]:
    """So many events with the last one of the run, of which none is spare."""
    return message(length)[: length - 1]


async def test_what_is_not_archived_is_not_deleted(pool: Pool) -> None:
    await ended(pool, message(3))
    assert await delete(pool) == 0


async def test_an_old_session_goes_on_with_a_new_run(pool: Pool) -> None:
    await ended(pool)
    await archive(pool)
    assert await delete(pool) == 1
    again = await submitted(pool)
    assert (await claimed(pool, again.run_id)).session_position == 0


async def test_runs_that_are_still_asked_for_stay(pool: Pool) -> None:
    async def put_aside(session: str) -> UUID:
        run = (await submitted(pool, "poison", session=session)).run_id
        epoch = (await claimed(pool, run)).epoch
        await pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1", run)
        await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch=epoch)], max_lost_attempts=1)
        await aged(pool, run, days=10)
        return run

    letter, discarded, redriven = await put_aside("a"), await put_aside("b"), await put_aside("c")
    await dead_letters.discard(pool, discarded)
    redrive = new_id()
    await dead_letters.redrive(pool, redriven, run_id=redrive, inputs=[new_id()])

    cut = (await submitted(pool, "x", session="d")).run_id
    await claimed(pool, cut)
    await effects.begin(pool, [Begin(cut, 1, new_id(), "refund", "o-1", None, again=False)])
    await transitions.take_over(pool, [TakeOver(cut, Reason.CANCELLED)])
    await aged(pool, cut, days=10)

    first = (await submitted(pool, "one", session="e")).run_id
    item = submission("two", session="e")
    assert (await follow_ups.submit(pool, [item], Policy.MERGE))[0] is None
    second = (await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=30)).run.run_id
    await aged(pool, first, days=10)

    task, slot = new_id(), "2026-01-01T00:00:00Z"
    of_slot = await ended(pool, session="f")
    await pool.execute("INSERT INTO cron_tasks (uid, generation, spec, slots_from) VALUES ($1, 1, '{}', now())", task)
    await pool.execute(f"INSERT INTO slots (task, slot, outcome, run_id) VALUES ($1, '{slot}', 'ran', $2)", task, of_slot)
    await pool.execute(f"UPDATE runs SET cron_task = $1, slot = '{slot}' WHERE id = $2", task, of_slot)

    await archive(pool)
    assert await delete(pool, run_count=2) == 1
    left = {row["id"] for row in await pool.fetch("SELECT id FROM runs")}
    assert left == {letter, redriven, redrive, cut, first, second, of_slot}

    # and go once they are not
    await dead_letters.discard(pool, letter)
    await effects.settle_by_hand(pool, cut, name="refund", key="o-1", state=EffectState.FAILED, response=None)
    for run in (redrive, second):
        await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
        await aged(pool, run, days=9)
    await pool.execute("DELETE FROM slots")
    await archive(pool)
    while await delete(pool, run_count=2):
        pass
    for table in ("runs", "sessions", "inputs", "dead_letters", "effects", "messages", "attempts"):
        assert await pool.fetchval(f"SELECT count(*) FROM {table}") == 0, table


async def test_a_session_in_use_is_passed_over_and_nobody_waits(pool: Pool) -> None:
    await ended(pool)
    await archive(pool)
    async with pool.acquire() as conn, conn.transaction():
        await transitions.submit(conn, [submission("late")])
        async with asyncio.timeout(5):
            assert await delete(pool) == 0
    assert await delete(pool) == 1
    assert await pool.fetchval("SELECT count(*) FROM sessions") == 1


@pytest.mark.parametrize("policy", list(Policy))
async def test_a_message_to_a_session_that_goes_at_this_moment_is_a_run_all_the_same(pool: Pool, policy: Policy) -> None:
    """The gateway's way, against a pass that deletes its sessions again and again."""
    stop = asyncio.Event()

    async def delete_all_the_time() -> None:
        while not stop.is_set():
            await pool.execute(
                "UPDATE runs SET finished_at = now() - interval '10 days', archived_at = now() WHERE status = 'cancelled'"
            )
            await delete(pool)

    async def send(number: int) -> UUID:
        item = submission(f"m{number}", session=f"s{number % 3}")
        found = (await follow_ups.submit(pool, [item], policy))[0]
        if found is None:
            done = await follow_ups.follow_up(pool, item, policy, window_seconds=30)
            assert not done.rejected
            found = done.run
        return found.run_id

    deleting = asyncio.create_task(delete_all_the_time())
    try:
        for number in range(60):
            sent = await asyncio.gather(*(send(number * 3 + place) for place in range(3)))
            for run in sent:
                assert (await runs.get(pool, run, agent=AGENT)) is not None
            await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED) for run in sent])
    finally:
        stop.set()
        await deleting


@pytest.mark.parametrize("policy", list(Policy))
async def test_a_session_that_goes_between_two_statements_of_a_submission_is_made_anew(pool: Pool, policy: Policy) -> None:
    """As if a pass had come just after the look at whether the session is there: a trigger does it."""
    await pool.execute("CREATE TABLE armed ()")
    await pool.execute(
        """CREATE FUNCTION deletes_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF EXISTS (SELECT 1 FROM armed) THEN
                   DELETE FROM armed;
                   DELETE FROM sessions s WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id);
               END IF;
               RETURN NULL;
           END $$"""
    )
    await pool.execute("CREATE TRIGGER goes AFTER INSERT ON sessions FOR EACH STATEMENT EXECUTE FUNCTION deletes_once()")
    item = submission("late")

    async def empty_session() -> None:
        await pool.execute("INSERT INTO sessions (id, agent, user_id, external_id) VALUES ($1, $2, 'ann', 's1')", new_id(), AGENT)
        await pool.execute("INSERT INTO armed DEFAULT VALUES")

    await empty_session()
    assert await follow_ups.submit(pool, [item], policy) == [None], "it leaves its group"
    await empty_session()
    done = await follow_ups.follow_up(pool, item, policy, window_seconds=30)
    assert isinstance(done, FollowedUp) and not done.rejected
    assert (await runs.get(pool, item.run_id, agent=AGENT)) is not None


async def test_the_ledger_has_its_own_time(pool: Pool) -> None:
    await ended(pool, calls=5)
    await pool.execute("UPDATE ledger SET at = now() - interval '30 days' WHERE call < 3")
    assert [await retention.delete_ledger(pool, age_seconds=10 * DAY, rows=2) for _ in range(3)] == [2, 1, 0]
    assert [row["call"] for row in await pool.fetch("SELECT call FROM ledger ORDER BY call")] == [3, 4]
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1


# The loop


async def test_a_tick_does_all_three_and_0_days_mean_for_ever(pool: Pool) -> None:
    for number in range(3):
        await ended(pool, message(5), session=f"s{number}", days=10)
    await pool.execute("UPDATE ledger SET at = now() - interval '10 days'")
    for_ever = Retention(pool, Ages(HOUR, 0, 0))
    await for_ever.tick()
    await for_ever.tick()
    assert [await pool.fetchval(f"SELECT count(*) FROM {table}") for table in ("runs", "ledger")] == [3, 3]
    assert await pool.fetchval("SELECT count(*) FROM messages WHERE kind = 'text_delta'") == 0
    await Retention(pool, Ages(HOUR, 1, 1)).tick()
    assert [await pool.fetchval(f"SELECT count(*) FROM {table}") for table in ("runs", "ledger", "sessions")] == [0, 0, 0]


async def test_slots_of_crontasks_that_were_deleted_long_ago_go_and_their_runs_with_them(pool: Pool) -> None:
    """Those of others stay; the CronTask's row stays too, since reports of what was spent name it."""
    runs: dict[str, UUID] = {}
    for name, deleted in (("gone", "2 days"), ("lately", "2 hours"), ("live", None)):
        task = new_id()
        await pool.execute(
            """INSERT INTO cron_tasks (uid, generation, spec, slots_from, deleted_at)
               VALUES ($1, 1, jsonb_build_object('name', $2::text), now(), now() - $3::text::interval)""",
            task,
            name,
            deleted,
        )
        runs[name] = await ended(pool, session=name, days=10)
        await pool.execute(
            """INSERT INTO slots (task, slot, outcome, run_id)
               SELECT $1, '2026-01-01Z'::timestamptz + n * interval '1 hour', 'ran', CASE n WHEN 0 THEN $2::uuid END
               FROM generate_series(0, 9) AS n""",
            task,
            runs[name],
        )
        await pool.execute("UPDATE runs SET cron_task = $1, slot = '2026-01-01Z' WHERE id = $2", task, runs[name])

    await Retention(pool, Ages(HOUR, 0, 0)).tick()
    assert await pool.fetchval("SELECT count(*) FROM slots") == 30, "0 days: for ever"
    assert [await retention.delete_slots(pool, age_seconds=DAY, rows=6) for _ in range(3)] == [6, 4, 0]
    await Retention(pool, Ages(HOUR, 1, 0)).tick()
    names = await pool.fetch("SELECT spec ->> 'name', count(*) FROM slots JOIN cron_tasks ON uid = task GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in names] == [("lately", 10), ("live", 10)]
    assert {row["id"] for row in await pool.fetch("SELECT id FROM runs")} == {runs["lately"], runs["live"]}
    assert await pool.fetchval("SELECT count(*) FROM cron_tasks") == 3


async def test_a_pass_goes_on_behind_runs_that_stay(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrun.maintenance.retention.RUNS", 2)
    for number in range(7):
        run = await ended(pool, session=f"s{number}", days=20 - number)
        if number < 4:
            await pool.execute("INSERT INTO dead_letters (run_id, payload, reason, attempts) VALUES ($1, '{}', 'x', 1)", run)
    await archive(pool)
    await Retention(pool, Ages(HOUR, 1, 0)).tick()
    assert await pool.fetchval("SELECT count(*) FROM runs") == 4


async def test_a_tick_has_a_quarter_of_its_time_for_batches(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits comes first: ten seconds on a clock of the test's, batches of half a second."""
    now, began = 0.0, []

    async def a_batch(*_: object, **__: object) -> Archived:
        nonlocal now
        began.append(now)
        now += 0.5
        return Archived(1, 0)

    async def rest(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(retention, "archive", a_batch)
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(maintenance, "asyncio", SimpleNamespace(sleep=rest))
    await Retention(pool, Ages(HOUR, 0, 0)).tick()
    assert began == [0, 2, 4, 6, 8]


MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent}
spec:
  agent: {model: "demo:chat"}
  workers: {leaseSeconds: 2}
  reaper: {idleSeconds: 2}
  streaming: {eventRetentionSeconds: 60}
  retention: {runs: 1, ledger: 1}
"""


async def test_the_scheduler_does_it_by_the_manifest_with_no_operator(
    pool: Pool, database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    (tmp_path / "agentrun.yaml").write_text(MANIFEST)
    older = await ended(pool, message(5), days=2)
    old, young = await ended(pool, message(5), days=0), await ended(pool, message(5), days=0)
    await aged(pool, old, seconds=61)
    await pool.execute("UPDATE ledger SET at = now() - interval '2 days' WHERE run_id = $1", older)
    scheduler = await product_processes.scheduler(Product(tmp_path / "agentrun.yaml", database_url, redis_url, tmp_path / "keys"))

    async def is_done() -> bool:
        left = {row["id"]: row["archived_at"] is not None for row in await pool.fetch("SELECT id, archived_at FROM runs")}
        return left == {old: True, young: False} and await pool.fetchval("SELECT count(*) FROM ledger") == 2

    await eventually(is_done, within=30, what="events, a run and a ledger row have gone")
    assert len(await messages.after(pool, young, after=-1)) == 9
    metrics = await scheduler.metrics()
    assert metrics.total("agentrun_retention_total", what="events") == 10
