"""The transitions on a real Postgres: what each may do, and what changes nothing."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from itertools import product
from uuid import UUID

import asyncpg
import pytest
from run_factory import AGENT, claimed, event, ledger_row, submission, submitted
from store_servers import Databases
from waiting import eventually

from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.events import Kind
from agentrun.domain.states import TRANSITIONS, RunStatus, may_move
from agentrun.store import attempts, messages, runs, transitions
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import AttemptRef, Checkpoint, Claim, Finish, Flush, Reason, TakeOver


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 20)
    yield made
    await made.close()


async def log(pool: Pool, run_id: UUID) -> list[tuple[int, int, str]]:
    return [(e.seq, e.epoch, e.kind.value) for e in await messages.after(pool, run_id, after=-1)]


async def expire(pool: Pool, run_id: UUID) -> None:
    await pool.execute(
        "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1 AND outcome = 'running'", run_id
    )


# ---------------------------------------------------------------- the transition table


async def brought_to(pool: Pool, status: RunStatus, session: str) -> UUID:
    """A run of that status, moved there by hand."""
    run = (await submitted(pool, session=session)).run_id
    path = {RunStatus.PENDING: [], RunStatus.RUNNING: ["running"]}.get(status, ["running", status.value])
    for step in path:
        await pool.execute("UPDATE runs SET status = $2, epoch = epoch + ($2 = 'running')::int WHERE id = $1", run, step)
    return run


async def test_st_03_the_database_enforces_the_transition_table_of_the_code(pool: Pool) -> None:
    for old, new in product(RunStatus, RunStatus):
        if old == new:
            continue
        run = await brought_to(pool, old, f"{old} {new}")
        move = pool.execute("UPDATE runs SET status = $2, epoch = epoch + ($2 = 'running')::int WHERE id = $1", run, new.value)
        if may_move(old, new):
            await move
        else:
            with pytest.raises(asyncpg.CheckViolationError):
                await move


async def test_st_03_of_two_moves_at_once_exactly_one_happens_if_the_table_allows_any(pool: Pool) -> None:
    """From each state, any two moves, by two connections."""

    async def moved(run: UUID, old: RunStatus, new: RunStatus) -> bool:
        try:
            done = await pool.execute(
                "UPDATE runs SET status = $3, epoch = epoch + ($3 = 'running')::int WHERE id = $1 AND status = $2",
                run,
                old.value,
                new.value,
            )
        except asyncpg.CheckViolationError:
            return False
        return str(done) == "UPDATE 1"

    for old, one, other in product(RunStatus, repeat=3):
        if old in (one, other):
            continue
        run = await brought_to(pool, old, f"{old} {one} {other}")
        happened = await asyncio.gather(moved(run, old, one), moved(run, old, other))
        allowed = [may_move(old, one), may_move(old, other)]
        assert sum(happened) == any(allowed), (old, one, other)
        assert all(may for did, may in zip(happened, allowed, strict=True) if did), (old, one, other)
        now = await pool.fetchval("SELECT status FROM runs WHERE id = $1", run)
        assert now == (old if not any(allowed) else one if happened[0] else other)


@pytest.mark.parametrize("way", ["cancelled", "finished"])
async def test_st_03_a_run_never_ends_before_it_began(pool: Pool, way: str) -> None:
    """Whoever ends it has begun a transaction before the claim's."""
    run = (await submitted(pool)).run_id
    async with pool.acquire() as conn, conn.transaction():
        began = await conn.fetchval("SELECT now()")
        await claimed(pool, run)
        if way == "cancelled":
            (ended,) = await transitions.take_over(conn, [TakeOver(run, Reason.CANCELLED)])
        else:
            ends = Finish(run, 1, RunStatus.SUCCEEDED, result="{}", events=[event(0, Kind.COMPLETED)])
            (ended,) = await transitions.finish(conn, [ends])
        assert ended.ok
    row = await pool.fetchrow(
        """SELECT r.started_at > $2 AS later, r.finished_at >= r.started_at AS run, a.ended_at >= a.started_at AS attempt
           FROM runs r JOIN attempts a ON a.run_id = r.id WHERE r.id = $1""",
        run,
        began,
    )
    assert tuple(row) == (True, True, True)


async def test_a_run_starts_as_pending_at_epoch_0(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    with pytest.raises(asyncpg.CheckViolationError, match="starts as pending"):
        await pool.execute(
            """INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, status, idempotency_key, body_hash, input)
               SELECT gen_random_uuid(), agent, user_id, session_id, '', 99, 'running', 'k', 'h', '{}' FROM runs WHERE id = $1""",
            run,
        )


async def test_only_a_claim_raises_the_epoch(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    with pytest.raises(asyncpg.CheckViolationError, match="epoch"):
        await pool.execute("UPDATE runs SET epoch = epoch + 1 WHERE id = $1", run)


async def test_no_final_state_has_a_way_out() -> None:
    assert all(not TRANSITIONS[status] for status in TRANSITIONS if status not in (RunStatus.PENDING, RunStatus.RUNNING))


# ---------------------------------------------------------------- submit


async def test_a_submission_makes_session_run_and_input(pool: Pool) -> None:
    answer = await submitted(pool, "hi")
    row = await runs.get(pool, answer.run_id, agent=AGENT)
    assert row is not None
    assert (row.status, row.epoch, row.session_position, row.external_id, row.head, row.due) == (
        "pending",
        0,
        0,
        "s1",
        True,
        True,
    )
    assert [(i.run_id, i.content) for i in await runs.held_inputs(pool, [answer.run_id])] == [(answer.run_id, '"hi"')]
    assert (answer.replayed, answer.reused, answer.is_head) == (False, False, True)


async def test_a_group_may_hold_the_same_submission_twice(pool: Pool) -> None:
    first, second = submission("x", client_key="k"), submission("x", client_key="k")
    a, b = await transitions.submit(pool, [first, second])
    assert (a.run_id, a.replayed, b.run_id, b.replayed) == (first.run_id, False, first.run_id, True)
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1
    assert await pool.fetchval("SELECT count(*) FROM inputs") == 1


async def test_id_01_the_same_client_key_with_another_body_stores_nothing(pool: Pool) -> None:
    (first,) = await transitions.submit(pool, [submission("one", client_key="k")])
    (second,) = await transitions.submit(pool, [submission("two", client_key="k")])
    assert second.reused and second.run_id == first.run_id
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1


async def test_id_01_refused_bodies_without_a_session_leave_no_session_behind(pool: Pool) -> None:
    """Without a session the run's own is named after its key, which depends on the body."""
    bodies = [replace(submission(f"body {n}", client_key="k"), session_given="", external_id=f"run:{n}") for n in range(5)]
    answers = [(await transitions.submit(pool, [body]))[0] for body in bodies]
    assert [answer.reused for answer in answers] == [False, True, True, True, True]
    assert await pool.fetchval("SELECT count(*) FROM sessions") == 1


async def test_id_01_also_when_both_arrive_at_once_and_in_one_group(pool: Pool) -> None:
    group = [submission(f"body {n}", client_key="k") for n in range(10)]
    answers = await asyncio.gather(*(transitions.submit(pool, group[n : n + 2]) for n in range(0, 10, 2)))
    flat = [answer for part in answers for answer in part]
    assert sorted(answer.reused for answer in flat) == [False] + [True] * 9
    assert len({answer.run_id for answer in flat}) == 1


async def test_pg_06_fifty_submissions_with_one_key_find_one_run_while_the_first_holds_its_transaction(pool: Pool) -> None:
    async with pool.acquire() as conn:
        transaction = conn.transaction()
        await transaction.start()
        (mine,) = await transitions.submit(conn, [submission("x", client_key="k")])
        others = [asyncio.ensure_future(transitions.submit(pool, [submission("x", client_key="k")])) for _ in range(50)]
        waiting = "SELECT count(*) >= 10 FROM pg_locks WHERE NOT granted"
        await eventually(lambda: conn.fetchval(waiting), within=10, what="the others wait for the first")
        await transaction.commit()
    answers = [answer for (answer,) in await asyncio.gather(*others)]
    assert {answer.run_id for answer in answers} == {mine.run_id}
    assert all(answer.replayed for answer in answers)


async def test_a_submission_sent_again_with_the_same_ids_is_found_as_its_own(pool: Pool) -> None:
    item = submission("x", client_key="k")
    (first,) = await transitions.submit(pool, [item])
    (again,) = await transitions.submit(pool, [item])
    assert first == again and not again.replayed


async def test_messages_of_a_session_queue_in_the_order_of_the_group(pool: Pool) -> None:
    group = [submission(f"m{n}") for n in range(5)]
    answers = await transitions.submit(pool, group)
    assert [answer.is_head for answer in answers] == [True, False, False, False, False]
    rows = await pool.fetch("SELECT id FROM runs ORDER BY session_position")
    assert [row["id"] for row in rows] == [item.run_id for item in group]


async def test_a_nul_in_one_member_fails_its_group_and_stores_nothing(pool: Pool) -> None:
    good, bad = submission("good"), submission("bad\x00")
    with pytest.raises((asyncpg.DataError, asyncpg.PostgresError)):
        await transitions.submit(pool, [good, bad])
    assert await pool.fetchval("SELECT count(*) FROM runs") == 0
    assert await pool.fetchval("SELECT count(*) FROM sessions") == 0


# ---------------------------------------------------------------- claim


async def test_a_claim_makes_an_attempt_with_a_lease_and_128_numbers(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    assert (mine.epoch, mine.seq_reserved, mine.top, mine.checkpoint_seq) == (1, 127, -1, -1)
    look = (await runs.look(pool, [run]))[run]
    assert (look.status, look.lease_alive, look.owner) == ("running", True, "w-1/n")


async def test_a_second_claim_takes_nothing(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    assert await transitions.claim(pool, [Claim(run, 0, "w-2/n")], lease_seconds=30) == []


async def test_a_claim_asked_again_by_its_owner_is_read_back(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    assert await transitions.claim(pool, [Claim(run, 0, "w-1/n")], lease_seconds=30) == [mine]
    assert await pool.fetchval("SELECT count(*) FROM attempts") == 1


async def test_a_late_claim_at_an_old_epoch_takes_nothing(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    await transitions.take_over(pool, [TakeOver(run, Reason.HANDED_BACK, mine.epoch, last_seq=-1)])
    assert await transitions.claim(pool, [Claim(run, 0, "w-1/late")], lease_seconds=30) == []
    assert (await runs.look(pool, [run]))[run].status == RunStatus.PENDING


async def test_only_the_head_that_is_due_can_be_claimed(pool: Pool) -> None:
    first, second = (await submitted(pool, "1")).run_id, (await submitted(pool, "2")).run_id
    assert await transitions.claim(pool, [Claim(second, 0, "w/1")], lease_seconds=30) == []
    mine = await claimed(pool, first)
    await transitions.take_over(pool, [TakeOver(first, Reason.RETRYING, mine.epoch, last_seq=-1, retry_after=60)])
    assert await transitions.claim(pool, [Claim(first, 1, "w/2")], lease_seconds=30) == []
    assert await runs.due_heads(pool) == []


async def test_two_workers_that_claim_at_once_get_each_run_once(pool: Pool) -> None:
    ids = [(await submitted(pool, session=f"s{n}")).run_id for n in range(40)]
    groups = [[Claim(run, 0, f"w{w}/{n}") for n, run in enumerate(ids)] for w in range(4)]
    answers = await asyncio.gather(*(transitions.claim(pool, group, lease_seconds=30) for group in groups))
    got = [mine.run_id for part in answers for mine in part]
    assert sorted(got) == sorted(ids)


# ---------------------------------------------------------------- flush, checkpoint, renew


async def test_a_flush_stores_events_and_raises_the_reservation(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    held = await transitions.flush(pool, [Flush(run, mine.epoch, 129, [event(0, Kind.CREATED), event(1)])])
    assert held == {AttemptRef(run, 1)}
    assert await log(pool, run) == [(0, 1, "created"), (1, 1, "text_delta")]
    assert (await messages.tops(pool, [run]))[run].seq_reserved == 129


async def test_a_flush_sent_again_changes_nothing(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    request = Flush(run, mine.epoch, 129, [event(0)], [ledger_row()])
    await transitions.flush(pool, [request])
    assert await transitions.flush(pool, [request]) == {AttemptRef(run, 1)}
    assert await pool.fetchval("SELECT count(*) FROM messages") == 1
    assert await pool.fetchval("SELECT count(*) FROM ledger") == 1


async def test_a_late_flush_lowers_neither_the_reservation_nor_the_checkpoint(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    mine = await claimed(pool, run)
    late = Flush(run, mine.epoch, 128, [event(0)], checkpoint=Checkpoint(0, '"old"'))
    await transitions.flush(pool, [Flush(run, mine.epoch, 300, [event(0), event(1)], checkpoint=Checkpoint(1, '"new"'))])
    await transitions.flush(pool, [late])
    row = await pool.fetchrow("SELECT seq_reserved, checkpoint_seq, checkpoint FROM attempts")
    assert tuple(row) == (300, 1, '"new"')


async def test_a_late_write_of_an_old_attempt_changes_nothing_but_the_ledger(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    old = await claimed(pool, run)
    await expire(pool, run)
    await transitions.take_over(pool, [TakeOver(run, Reason.LOST, old.epoch)])
    new = await claimed(pool, run, owner="w-2/n")
    before = await log(pool, run)

    assert (
        await transitions.flush(pool, [Flush(run, old.epoch, 999, [event(500)], [ledger_row()], Checkpoint(500, "{}"))]) == set()
    )
    gone = await transitions.renew(pool, [AttemptRef(run, old.epoch)], lease_seconds=30)
    assert (gone.renewed, gone.lost) == (frozenset(), {AttemptRef(run, old.epoch)})
    (done,) = await transitions.finish(
        pool, [Finish(run, old.epoch, RunStatus.SUCCEEDED, '"x"', None, [event(500)], [ledger_row(1)])]
    )

    assert not done.ok
    assert await log(pool, run) == before
    assert (await runs.look(pool, [run]))[run].epoch == new.epoch
    assert await pool.fetchval("SELECT count(*) FROM ledger WHERE epoch = 1") == 2
    assert await pool.fetchval("SELECT sum(cost_usd) FROM ledger") == Decimal("0.000030")


async def test_a_flush_waits_for_whoever_ends_its_attempt(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    async with pool.acquire() as conn:
        transaction = conn.transaction()
        await transaction.start()
        await transitions.take_over(conn, [TakeOver(run, Reason.CANCELLED)])
        flushing = asyncio.ensure_future(transitions.flush(pool, [Flush(run, 1, 500, [event(0), event(200)])]))
        await eventually(
            lambda: conn.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"), within=10, what="the flush waits"
        )
        await transaction.commit()
    assert await flushing == set()
    assert (await log(pool, run))[-1] == (129, 1, "cancelled")
    assert await pool.fetchval("SELECT seq_reserved FROM attempts") == 127


async def test_in_a_group_only_the_fenced_member_is_refused(pool: Pool) -> None:
    one, two = (await submitted(pool, session="a")).run_id, (await submitted(pool, session="b")).run_id
    for run in (one, two):
        await claimed(pool, run)
    await transitions.take_over(pool, [TakeOver(one, Reason.CANCELLED)])
    held = await transitions.flush(pool, [Flush(one, 1, 200, [event(150)]), Flush(two, 1, 200, [event(0)])])
    assert held == {AttemptRef(two, 1)}
    finished = await transitions.finish(pool, [Finish(run, 1, RunStatus.SUCCEEDED) for run in (one, two)])
    assert {done.run_id: done.ok for done in finished} == {one: False, two: True}


async def test_a_renewal_may_come_late_as_long_as_nobody_took_the_run(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    await expire(pool, run)
    assert (await attempts.expired(pool)).refs == [AttemptRef(run, 1)]
    assert (await transitions.renew(pool, [AttemptRef(run, 1)], lease_seconds=30)).renewed == {AttemptRef(run, 1)}
    assert (await attempts.expired(pool)).refs == []


async def test_a_renewal_passes_over_a_row_that_somebody_holds(pool: Pool) -> None:
    """One slow transaction on one attempt costs the worker's other attempts no lease."""
    held, free = (await submitted(pool, session="a")).run_id, (await submitted(pool, session="b")).run_id
    for run in (held, free):
        await claimed(pool, run)
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT 1 FROM attempts WHERE run_id = $1 FOR UPDATE", held)
        answer = await transitions.renew(pool, [AttemptRef(held, 1), AttemptRef(free, 1)], lease_seconds=30)
    assert (answer.renewed, answer.lost) == ({AttemptRef(free, 1)}, frozenset())


async def test_a_group_may_hold_a_flush_and_a_checkpoint_of_one_attempt(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    group = [
        Flush(run, 1, 300, [event(0)]),
        Flush(run, 1, 400, [event(1)], checkpoint=Checkpoint(1, '"k"')),
        Flush(run, 1, 350, [event(2)]),
    ]
    assert await transitions.flush(pool, group) == {AttemptRef(run, 1)}
    row = await pool.fetchrow("SELECT seq_reserved, checkpoint_seq, checkpoint FROM attempts")
    assert row is not None and tuple(row) == (400, 1, '"k"')
    assert len(await log(pool, run)) == 3


# ---------------------------------------------------------------- finish


async def test_finish_stores_the_end_and_names_the_next_head(pool: Pool) -> None:
    first, second = (await submitted(pool, "1")).run_id, (await submitted(pool, "2")).run_id
    await claimed(pool, first)
    request = Finish(
        first, 1, RunStatus.SUCCEEDED, '{"output":"hi"}', None, [event(0), event(1, Kind.COMPLETED, output="hi")], [ledger_row()]
    )
    (done,) = await transitions.finish(pool, [request])
    assert (done.ok, done.next_head) == (True, second)
    row = await runs.get(pool, first, agent=AGENT)
    assert row is not None and row.status == RunStatus.SUCCEEDED and row.finished_at is not None and row.started_at is not None
    assert row.created_at <= row.started_at <= row.finished_at
    fate = await pool.fetchrow("SELECT fate, fate_run FROM inputs WHERE run_id = $1", first)
    assert tuple(fate) == ("answered_in", first)


async def test_finish_sent_again_is_read_back_as_done(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    request = Finish(run, 1, RunStatus.FAILED, None, '{"type":"x"}', [event(0, Kind.FAILED)])
    first = await transitions.finish(pool, [request])
    assert await transitions.finish(pool, [request]) == first
    assert first[0].ok
    assert await log(pool, run) == [(0, 1, "failed")]


async def test_a_failed_run_frees_its_session_and_keeps_its_input_out_of_the_answered_ones(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    await transitions.finish(pool, [Finish(run, 1, RunStatus.FAILED, None, '{"type":"x"}', [event(0, Kind.FAILED)])])
    assert await pool.fetchval("SELECT fate FROM inputs") == "failed_in"
    assert (await submitted(pool, "next")).is_head


# ---------------------------------------------------------------- take_over


async def test_the_reaper_takes_only_a_run_whose_lease_is_over(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    (refused,) = await transitions.take_over(pool, [TakeOver(run, Reason.LOST, 1)])
    assert (refused.ok, refused.status) == (False, RunStatus.RUNNING)
    await expire(pool, run)
    (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.LOST, 1)])
    assert (taken.ok, taken.status, taken.next_head) == (True, RunStatus.PENDING, run)


async def test_what_was_reserved_and_never_stored_becomes_void_then_restart(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    await transitions.flush(pool, [Flush(run, 1, 129, [event(0), event(1)], checkpoint=Checkpoint(0, '{"n":1}'))])
    await expire(pool, run)
    (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.LOST, 1)])
    assert await log(pool, run) == [
        (0, 1, "text_delta"), (1, 1, "text_delta"), *[(n, 1, "void") for n in range(2, 130)], (130, 1, "restart"),
    ]  # fmt: skip
    assert [(e.seq, e.kind, e.data) for e in taken.events] == [(130, Kind.RESTART, b'{"keep" : 0}')]

    new = await claimed(pool, run)
    assert (new.epoch, new.top, new.seq_reserved, new.checkpoint, new.checkpoint_seq) == (2, 130, 258, '{"n": 1}', 0)


async def test_an_attempt_that_dies_at_once_passes_the_earlier_checkpoint_on(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    await transitions.flush(pool, [Flush(run, 1, 128, [event(0)], checkpoint=Checkpoint(0, '"first"'))])
    for epoch in (1, 2):
        await expire(pool, run)
        await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch)], max_lost_attempts=9)
        mine = await claimed(pool, run)
    assert (mine.epoch, mine.checkpoint, mine.checkpoint_seq) == (3, '"first"', 0)
    restarts = [e for e in await messages.after(pool, run, after=-1) if e.kind is Kind.RESTART]
    assert [e.data for e in restarts] == [b'{"keep" : 0}'] * 2


@pytest.mark.parametrize("reason", [Reason.HANDED_BACK, Reason.RETRYING])
async def test_an_attempt_that_gives_back_its_own_run_leaves_nothing_to_void(pool: Pool, reason: Reason) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    request = TakeOver(run, reason, 1, last_seq=1, events=[event(0), event(1)], ledger=[ledger_row()])
    (taken,) = await transitions.take_over(pool, [request])
    assert (taken.ok, taken.status) == (True, RunStatus.PENDING)
    assert await log(pool, run) == [(0, 1, "text_delta"), (1, 1, "text_delta"), (2, 1, "restart")]
    assert await pool.fetchval("SELECT count(*) FROM ledger") == 1
    again = await transitions.take_over(pool, [request])
    assert again[0].ok and again[0].events == taken.events
    assert len(await log(pool, run)) == 3


async def test_a_retry_is_not_due_before_its_time(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.RETRYING, 1, last_seq=-1, retry_after=0.4)])
    assert taken.next_head is None
    await eventually(lambda: runs.due_heads(pool), within=5, what="the run is due")
    mine = await claimed(pool, run)
    assert (mine.epoch, mine.retries) == (2, 1)


async def test_cancel_of_a_run_that_never_started_is_event_0(pool: Pool) -> None:
    run, follower = (await submitted(pool, "1")).run_id, (await submitted(pool, "2")).run_id
    (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
    assert (taken.ok, taken.status, taken.next_head) == (True, RunStatus.CANCELLED, follower)
    assert await log(pool, run) == [(0, 0, "cancelled")]
    assert await pool.fetchval("SELECT fate FROM inputs WHERE run_id = $1", run) == "cancelled_in"


async def test_cancel_of_a_running_run_keeps_what_was_stored(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    await transitions.flush(pool, [Flush(run, 1, 3, [event(0), event(1)])])
    (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
    assert [(e.seq, e.kind, e.data) for e in taken.events] == [(128, Kind.RESTART, b'{"keep" : 1}'), (129, Kind.CANCELLED, b"{}")]
    assert taken.owner == "w-1/n"
    assert [row["outcome"] for row in await pool.fetch("SELECT outcome FROM attempts")] == ["interrupted"]


async def test_a_second_cancel_gives_the_same_answer_and_one_of_a_finished_run_is_refused(pool: Pool) -> None:
    run, other = (await submitted(pool)).run_id, (await submitted(pool, session="b")).run_id
    first = await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)])
    assert await transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)]) == first
    await claimed(pool, other)
    await transitions.finish(pool, [Finish(other, 1, RunStatus.SUCCEEDED)])
    (refused,) = await transitions.take_over(pool, [TakeOver(other, Reason.CANCELLED)])
    assert (refused.ok, refused.status, refused.events) == (False, RunStatus.SUCCEEDED, [])


async def test_the_third_lost_attempt_puts_the_run_aside_and_frees_its_session(pool: Pool) -> None:
    run, follower = (await submitted(pool, "1")).run_id, (await submitted(pool, "2")).run_id
    for epoch in (1, 2, 3):
        await claimed(pool, run)
        await expire(pool, run)
        (taken,) = await transitions.take_over(pool, [TakeOver(run, Reason.LOST, epoch)], max_lost_attempts=3)
    assert (taken.ok, taken.status, taken.next_head) == (True, RunStatus.FAILED, follower)
    assert [e.kind for e in taken.events] == [Kind.RESTART, Kind.FAILED]
    letter = await pool.fetchrow("SELECT reason, attempts FROM dead_letters WHERE run_id = $1", run)
    assert tuple(letter) == ("lost_too_often", 3)
    assert await pool.fetchval("SELECT fate FROM inputs WHERE run_id = $1", run) == "failed_in"


async def test_a_hand_back_does_not_count_as_lost(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    for epoch in range(1, 6):
        await claimed(pool, run)
        (taken,) = await transitions.take_over(
            pool, [TakeOver(run, Reason.HANDED_BACK, epoch, last_seq=3 * epoch)], max_lost_attempts=1
        )
        assert taken.status == RunStatus.PENDING


# ---------------------------------------------------------------- locks


@pytest.mark.parametrize("held", ["sessions", "runs"])
@pytest.mark.parametrize("ends", ["finish", "take_over"])
async def test_whoever_ends_a_run_locks_session_run_and_attempt_in_this_order(pool: Pool, held: str, ends: str) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    async with pool.acquire() as conn, pool.acquire() as other:
        transaction = conn.transaction()
        await transaction.start()
        await conn.execute(f"SELECT 1 FROM {held} FOR NO KEY UPDATE")
        if ends == "finish":
            ending = asyncio.ensure_future(transitions.finish(pool, [Finish(run, 1, RunStatus.FAILED, error="{}")]))
        else:
            ending = asyncio.ensure_future(transitions.take_over(pool, [TakeOver(run, Reason.CANCELLED)]))
        await eventually(
            lambda: conn.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"), within=10, what=f"{ends} waits"
        )
        later = {"sessions": ("runs", "attempts"), "runs": ("attempts",)}[held]
        for table in later:
            await other.execute(f"SELECT 1 FROM {table} FOR UPDATE NOWAIT")
        await transaction.rollback()
    assert (await ending)[0].ok


async def test_a_write_that_checks_a_foreign_key_waits_for_no_transition(pool: Pool) -> None:
    run = (await submitted(pool)).run_id
    await claimed(pool, run)
    for holds in ("take_over", "finish", "claim"):
        async with pool.acquire() as conn, pool.acquire() as other:
            transaction = conn.transaction()
            await transaction.start()
            if holds == "take_over":
                await transitions.take_over(conn, [TakeOver(run, Reason.CANCELLED)])
            elif holds == "finish":
                await transitions.finish(conn, [Finish(run, 1, RunStatus.FAILED, error="{}")])
            else:
                await transitions.take_over(conn, [TakeOver(run, Reason.HANDED_BACK, 1, last_seq=-1)])
                assert await transitions.claim(conn, [Claim(run, 1, "w/2")], lease_seconds=60)
            async with other.transaction():
                await other.execute("SET LOCAL lock_timeout = '200ms'")
                await other.execute(
                    "INSERT INTO messages (run_id, seq, epoch, kind, data) VALUES ($1, 9999, 1, 'void', '{}')", run
                )
                await other.execute("DELETE FROM messages WHERE seq = 9999")
            await transaction.rollback()


async def test_sixteen_writers_at_once_never_deadlock(pool: Pool) -> None:
    """Two of each kind, so that two groups of one kind meet too, over the same few sessions, in groups in any order."""
    sessions = [f"s{n}" for n in range(6)]
    deadline = asyncio.get_running_loop().time() + 4
    kinds = ("submit", "claim", "flush", "renew", "finish", "cancel", "lost", "handback")
    counts = dict.fromkeys(kinds, 0)
    together = asyncio.Barrier(2 * len(kinds))

    async def pick(where: str, limit: int = 8) -> list[asyncpg.Record]:
        rows = await pool.fetch(
            f"SELECT r.id, r.epoch, (SELECT coalesce(max(seq), -1) FROM messages m WHERE m.run_id = r.id) AS top FROM runs r WHERE {where} "
            f"ORDER BY random() LIMIT {limit}"
        )
        return list(rows)

    async def writer(name: str, rng: random.Random) -> None:
        turn = 0
        await together.wait()
        while asyncio.get_running_loop().time() < deadline:
            turn += 1
            running = await pick("r.status = 'running'")
            if name == "submit":
                group = [submission(f"{turn}", session=s) for s in sessions for _ in range(2)]
                rng.shuffle(group)
                await transitions.submit(pool, group)
            elif name == "claim":
                rows = await pick("r.status = 'pending'", 20)
                await transitions.claim(pool, [Claim(r["id"], r["epoch"], f"w/{turn}") for r in rows], lease_seconds=0.001)
            elif name == "flush":
                group_of = [
                    Flush(r["id"], r["epoch"], r["top"] + 5, [event(r["top"] + 1, epoch=r["epoch"])], [ledger_row(turn)])
                    for r in running
                ]
                await transitions.flush(pool, group_of)
            elif name == "renew":
                await transitions.renew(pool, [AttemptRef(r["id"], r["epoch"]) for r in running], lease_seconds=0.001)
            elif name == "finish":
                await transitions.finish(pool, [Finish(r["id"], r["epoch"], RunStatus.SUCCEEDED) for r in running[:4]])
            else:
                reason = {"cancel": Reason.CANCELLED, "lost": Reason.LOST, "handback": Reason.HANDED_BACK}[name]
                await transitions.take_over(pool, [TakeOver(r["id"], reason, r["epoch"]) for r in running[:4]])
            counts[name] += 1

    await asyncio.gather(*(writer(name, random.Random(f"{name}{n}")) for name in kinds for n in range(2)))
    assert all(counts.values()), counts
    holes = await pool.fetchval(
        "SELECT count(*) FROM (SELECT run_id FROM messages GROUP BY run_id HAVING max(seq) + 1 <> count(*)) x"
    )
    assert holes == 0
    assert await pool.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


# ---------------------------------------------------------------- what an error means


async def test_a_database_that_takes_no_connections_for_a_while_is_an_outage(database_url: str, databases: Databases) -> None:
    """As in a restore, a rename, a rotated password: none of it says anything about the values."""
    name = database_url.partition("?")[0].rpartition("/")[2]
    await databases.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
    pool = await create_pool(database_url, 2)
    with pytest.raises(StoreUnavailable):
        await transitions.submit(pool, [submission()])
    await databases.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    assert (await submitted(pool)).is_head
    await pool.close()


async def test_a_schema_that_is_not_there_is_an_outage(empty_database_url: str) -> None:
    pool = await create_pool(empty_database_url, 2)
    with pytest.raises(StoreUnavailable):
        await transitions.submit(pool, [submission()])
    await pool.close()
