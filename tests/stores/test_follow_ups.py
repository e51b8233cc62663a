"""Merge, Enqueue and Reject in Postgres: what becomes of a message, of the run before it and of every input. Against the pure rules too."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest
from follow_up_rules import Decision, LastRun, decide
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_factory import AGENT, claimed, event, submission
from waiting import eventually

from agentrun.domain.events import Kind
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import effects, follow_ups, messages, runs, transitions
from agentrun.store.effects import Begin
from agentrun.store.follow_ups import FollowedUp
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import AttemptRef, Finish, Flush, Reason, Submission, TakeOver

WINDOW = 30.0


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 10)
    yield made
    await made.close()


async def send(
    pool: Pool, item: Submission | str, policy: Policy = Policy.MERGE, *, window: float = WINDOW, session: str = "s1"
) -> FollowedUp:
    """A message as the gateway treats it: in a group first, alone if it leaves it."""
    item = submission(item, session=session) if isinstance(item, str) else item
    found = (await follow_ups.submit(pool, [item], policy))[0]
    if found is not None:
        return FollowedUp(found, rejected=False, superseded=None)
    return await follow_ups.follow_up(pool, item, policy, window_seconds=window)


async def texts(pool: Pool, run_id: UUID) -> list[str]:
    """What the run holds, in order."""
    return [json.loads(one.content) for one in await runs.held_inputs(pool, [run_id])]


async def status(pool: Pool, run_id: UUID) -> str:
    found: str = await pool.fetchval("SELECT status FROM runs WHERE id = $1", run_id)
    return found


async def aged(pool: Pool, run_id: UUID, seconds: float) -> None:
    """As if the inputs that the run holds had come so long ago."""
    await pool.execute("UPDATE inputs SET created_at = now() - make_interval(secs => $2) WHERE held_by = $1", run_id, seconds)


async def has_effect(pool: Pool, run_id: UUID, epoch: int) -> None:
    begun = (await effects.begin(pool, [Begin(run_id, epoch, new_id(), "refund", "o-1", None, again=False)]))[0]
    assert begun.mine


async def ended(pool: Pool, run_id: UUID, epoch: int, state: RunStatus = RunStatus.SUCCEEDED) -> None:
    result = json.dumps({"output": "ok", "messages": []}) if state is RunStatus.SUCCEEDED else None
    kind = Kind.COMPLETED if state is RunStatus.SUCCEEDED else Kind.FAILED
    done = await transitions.finish(pool, [Finish(run_id, epoch, state, result=result, events=[event(0, kind, epoch=epoch)])])
    assert done[0].ok


# ------------------------------------------------------------------------------------------------------------ what is decided


async def test_a_message_to_an_idle_session_is_a_plain_run_under_every_policy(pool: Pool) -> None:
    for policy in Policy:
        item = submission("hello", session=f"idle-{policy}")
        (found,) = await follow_ups.submit(pool, [item], policy)
        assert found is not None and found.is_head and not found.replayed


async def test_st_08_three_messages_in_a_row_are_one_run_that_holds_them_in_order(pool: Pool) -> None:
    first = await send(pool, "one")
    claim = await claimed(pool, first.run.run_id)
    second = await send(pool, "two")
    third = await send(pool, "three")
    assert second.superseded is not None and second.superseded.run_id == first.run.run_id
    assert second.superseded.owner == claim.owner and second.superseded.epoch == 1
    assert third.superseded is not None and third.superseded.run_id == second.run.run_id and third.superseded.owner is None
    assert await texts(pool, third.run.run_id) == ["one", "two", "three"]
    assert third.run.is_head
    assert [await status(pool, one.run.run_id) for one in (first, second, third)] == ["superseded", "superseded", "pending"]
    assert await pool.fetchval("SELECT superseded_by FROM runs WHERE id = $1", first.run.run_id) == second.run.run_id
    last = await claimed(pool, third.run.run_id)
    await ended(pool, third.run.run_id, last.epoch)
    rows = await pool.fetch("SELECT run_id, held_by, fate, fate_run FROM inputs ORDER BY position")
    assert [row["run_id"] for row in rows] == [one.run.run_id for one in (first, second, third)], (
        "each keeps what it was sent with"
    )
    assert {(row["held_by"], row["fate"], row["fate_run"]) for row in rows} == {
        (third.run.run_id, "answered_in", third.run.run_id)
    }


async def test_the_superseded_log_is_closed_and_its_attempt_is_fenced(pool: Pool) -> None:
    first = await send(pool, "one")
    claim = await claimed(pool, first.run.run_id)
    await transitions.flush(pool, [Flush(claim.run_id, 1, 3, [event(0), event(1)])])
    second = await send(pool, "two")
    log = await messages.after(pool, claim.run_id, after=-1, limit=1000)
    assert [one.seq for one in log] == list(range(len(log)))
    assert [one.kind for one in log[-2:]] == [Kind.RESTART, Kind.SUPERSEDED]
    assert json.loads(log[-1].data) == {"by": str(second.run.run_id)}
    assert second.superseded is not None and [one.kind for one in second.superseded.events] == [Kind.RESTART, Kind.SUPERSEDED]
    assert await transitions.flush(pool, [Flush(claim.run_id, 1, 300, [event(500)])]) == set()
    assert not (await transitions.finish(pool, [Finish(claim.run_id, 1, RunStatus.SUCCEEDED, result="{}")]))[0].ok
    assert (await transitions.renew(pool, [AttemptRef(claim.run_id, 1)], lease_seconds=30)).renewed == frozenset()


async def test_the_last_unfinished_run_is_merged_not_the_head(pool: Pool) -> None:
    head = await send(pool, "a")
    claim = await claimed(pool, head.run.run_id)
    await has_effect(pool, claim.run_id, 1)
    second = await send(pool, "b")
    third = await send(pool, "c")
    assert second.superseded is None and not second.run.is_head, "an effect forbids the merge"
    assert third.superseded is not None and third.superseded.run_id == second.run.run_id, "those behind merge with each other"
    assert await texts(pool, third.run.run_id) == ["b", "c"]
    assert await status(pool, head.run.run_id) == "running"
    await ended(pool, head.run.run_id, 1)
    fourth = await send(pool, "d")
    assert fourth.superseded is not None and fourth.superseded.run_id == third.run.run_id
    assert await texts(pool, fourth.run.run_id) == ["b", "c", "d"], "in the order in which they came"


async def test_st_09_the_window_counts_from_the_first_input_held(pool: Pool) -> None:
    """A message every ten seconds does not keep the window open; a cancel does not wait for it."""
    run = await send(pool, "0")
    for number in range(1, 3):
        await aged(pool, run.run.run_id, 10.0 * number)  # all of its inputs: only the first one decides
        following = await send(pool, str(number))
        assert following.superseded is not None
        run = following
    await pool.execute(
        "UPDATE inputs SET created_at = now() - interval '30.1 s' WHERE run_id = (SELECT min(run_id::text)::uuid FROM inputs)"
    )
    late = await send(pool, "late")
    assert late.superseded is None and not late.run.is_head
    assert await texts(pool, run.run.run_id) == ["0", "1", "2"]
    taken = (await transitions.take_over(pool, [TakeOver(run.run.run_id, Reason.CANCELLED)]))[0]
    assert taken.ok and taken.next_head == late.run.run_id


@pytest.mark.parametrize(("age", "merges"), [(29.9, True), (30.1, False)])
async def test_st_09_just_inside_and_just_outside_the_window(pool: Pool, age: float, merges: bool) -> None:
    first = await send(pool, "one")
    await aged(pool, first.run.run_id, age)
    assert ((await send(pool, "two")).superseded is not None) is merges


async def test_enqueue_makes_the_next_run(pool: Pool) -> None:
    first, second = await send(pool, "one", Policy.ENQUEUE), await send(pool, "two", Policy.ENQUEUE)
    assert second.superseded is None and not second.run.is_head
    assert [await texts(pool, one.run.run_id) for one in (first, second)] == [["one"], ["two"]]


async def test_reject_stores_nothing_and_decides_the_same_key_anew(pool: Pool) -> None:
    first = await send(pool, "one", Policy.REJECT)
    claim = await claimed(pool, first.run.run_id)
    before = await pool.fetchval("SELECT next_position FROM sessions")
    item = submission("two", client_key="k")
    answer = await follow_ups.follow_up(pool, item, Policy.REJECT, window_seconds=WINDOW)
    assert answer.rejected and answer.run.run_id == first.run.run_id and answer.superseded is None
    counts = "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM inputs), (SELECT next_position FROM sessions)"
    assert tuple(await pool.fetchrow(counts)) == (1, 1, before)
    assert (await send(pool, submission("two", client_key="k"), Policy.REJECT)).rejected, "again: decided anew, to the same end"
    await ended(pool, claim.run_id, 1)
    again = await send(pool, submission("two", client_key="k"), Policy.REJECT)
    assert not again.rejected and not again.run.replayed and again.run.is_head


@pytest.mark.parametrize("policy", list(Policy))
async def test_a_replay_changes_nothing_under_any_policy(pool: Pool, policy: Policy) -> None:
    """The insert comes first: who sends his own message again neither supersedes his run nor is refused."""
    first = await send(pool, submission("one", client_key="k"), policy)
    await claimed(pool, first.run.run_id)
    again = await send(pool, submission("one", client_key="k"), policy)
    alone = await follow_ups.follow_up(pool, submission("one", client_key="k"), policy, window_seconds=WINDOW)
    for answer in (again, alone):
        assert answer.run.run_id == first.run.run_id and answer.run.replayed and not answer.run.reused
        assert not answer.rejected and answer.superseded is None
    assert await status(pool, first.run.run_id) == "running"
    other = await follow_ups.follow_up(pool, submission("other", client_key="k"), policy, window_seconds=WINDOW)
    assert other.run.reused and other.superseded is None
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1


async def test_a_replay_of_a_superseded_message_finds_its_own_run(pool: Pool) -> None:
    first = await send(pool, submission("one", client_key="k"))
    second = await send(pool, "two")
    again = await send(pool, submission("one", client_key="k"))
    assert again.run.run_id == first.run.run_id and again.run.status is RunStatus.SUPERSEDED and again.superseded is None
    assert await status(pool, second.run.run_id) == "pending"


async def test_a_lost_reply_is_found_again(pool: Pool) -> None:
    first = await send(pool, "one")
    await claimed(pool, first.run.run_id)
    item = submission("two")
    answers = [await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=WINDOW) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2], "new, superseding, with the same news for readers and worker"
    assert answers[0].superseded is not None and not answers[0].run.replayed
    assert await pool.fetchval("SELECT count(*) FROM runs") == 2
    assert await pool.fetchval("SELECT next_position FROM sessions") == await pool.fetchval(
        "SELECT max(session_position) + 1 FROM runs"
    )


async def test_a_run_that_has_just_ended_is_decided_again_under_the_lock(pool: Pool) -> None:
    """The row left its group because the session was busy; when it gets the session's lock, the run has finished."""
    first = await send(pool, "one")
    await claimed(pool, first.run.run_id)
    item = submission("two")
    assert (await follow_ups.submit(pool, [item], Policy.MERGE)) == [None]
    await ended(pool, first.run.run_id, 1)
    answer = await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=WINDOW)
    assert answer.superseded is None and answer.run.is_head
    assert await texts(pool, first.run.run_id) == ["one"]
    assert await pool.fetchval("SELECT fate_run FROM inputs WHERE run_id = $1", first.run.run_id) == first.run.run_id


async def test_a_run_of_a_cron_task_is_never_merged(pool: Pool) -> None:
    """Its slot shows what became of it; what a person says to its session is another matter."""
    first = await send(pool, "report")
    await pool.execute("UPDATE runs SET cron_task = $2 WHERE id = $1", first.run.run_id, new_id())
    assert (await send(pool, "two")).superseded is None


async def test_the_effects_of_an_earlier_run_of_the_chain_forbid_the_merge(pool: Pool) -> None:
    origin = await send(pool, "refund it")
    await claimed(pool, origin.run.run_id)
    await has_effect(pool, origin.run.run_id, 1)
    await ended(pool, origin.run.run_id, 1, RunStatus.FAILED)
    redrive = await send(pool, "refund it")
    await pool.execute("UPDATE runs SET redrive_of = $2 WHERE id = $1", redrive.run.run_id, origin.run.run_id)
    assert (await send(pool, "hurry")).superseded is None


async def test_a_run_that_waits_for_its_retry_is_merged_and_starts_at_once(pool: Pool) -> None:
    first = await send(pool, "one")
    await claimed(pool, first.run.run_id)
    wish = TakeOver(first.run.run_id, Reason.RETRYING, epoch=1, last_seq=-1, retry_after=60.0, error='{"type": "timeout"}')
    assert (await transitions.take_over(pool, [wish]))[0].ok
    second = await send(pool, "two")
    assert second.superseded is not None and second.run.is_head
    await claimed(pool, second.run.run_id)
    assert await texts(pool, second.run.run_id) == ["one", "two"]


@pytest.mark.parametrize(("state", "fate"), [(RunStatus.FAILED, "failed_in"), (None, "cancelled_in")])
async def test_all_inputs_share_the_fate_of_the_run_that_holds_them(pool: Pool, state: RunStatus | None, fate: str) -> None:
    await send(pool, "one")
    last = (await send(pool, "two")).run.run_id
    if state is None:
        await transitions.take_over(pool, [TakeOver(last, Reason.CANCELLED)])
    else:
        await claimed(pool, last)
        await ended(pool, last, 1, state)
    rows = await pool.fetch("SELECT fate, fate_run FROM inputs")
    assert {tuple(row) for row in rows} == {(fate, last)} and len(rows) == 2


# ------------------------------------------------------------------------------------------------------------ groups


async def test_only_the_first_row_of_an_idle_session_stays_in_the_group(pool: Pool) -> None:
    busy = await send(pool, "busy", session="busy")
    group = [
        submission("a1", session="a"),
        submission("b1", session="busy"),
        submission("a2", session="a"),
        submission("c1", session="c"),
        submission("b2", session="busy"),
    ]
    found = await follow_ups.submit(pool, group, Policy.MERGE)
    assert [one is not None for one in found] == [True, False, False, True, False]
    for item in (group[1], group[2], group[4]):
        await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=WINDOW)
    assert await texts(pool, group[4].run_id) == ["busy", "b1", "b2"] and await texts(pool, group[2].run_id) == ["a1", "a2"]
    assert await status(pool, busy.run.run_id) == "superseded"


async def test_a_group_answers_replays_of_busy_sessions_at_once(pool: Pool) -> None:
    first = await send(pool, submission("one", client_key="k"))
    (again, new) = await follow_ups.submit(pool, [submission("one", client_key="k"), submission("two")], Policy.MERGE)
    assert again is not None and again.run_id == first.run.run_id and again.replayed and new is None


async def test_a_refused_key_leaves_no_session_behind(pool: Pool) -> None:
    await send(pool, submission("one", client_key="k"))
    item = submission("two", client_key="k")
    strange = Submission(**{name: getattr(item, name) for name in item.__slots__} | {"external_id": "another"})
    answer = await follow_ups.follow_up(pool, strange, Policy.MERGE, window_seconds=WINDOW)
    assert answer.run.reused
    assert await pool.fetchval("SELECT count(*) FROM sessions") == 1


async def test_code_before_this_schema_submits_as_it_did(pool: Pool) -> None:
    """An old gateway calls agentrun_1.submit with its twelve arguments and gets its six columns."""
    item = submission("one")
    for _ in range(2):
        rows = await pool.fetch(
            "SELECT * FROM agentrun_1.submit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
            *([value] for value in transitions.submission_row(item)),
        )
        assert list(rows[0].keys()) == ["run_id", "session_id", "status", "inserted", "reused", "is_head"]
        assert rows[0]["run_id"] == item.run_id and rows[0]["inserted"]
    queued = (await transitions.submit(pool, [submission("two")]))[0]
    assert not queued.is_head and await status(pool, item.run_id) == "pending"
    merged = await send(pool, "three")
    assert merged.superseded is not None and merged.superseded.run_id == queued.run_id


# ------------------------------------------------------------------------------------------------------------ races


async def test_effect_and_merge_at_once_never_both_win(pool: Pool) -> None:
    """H3: the effect's row is read after the attempt's lock. Either the effect is on record and the message waits, or it is fenced."""
    merged = 0
    for number in range(40):
        session = f"race-{number}"
        first = await send(pool, "refund it", session=session)
        await claimed(pool, first.run.run_id)
        begin = Begin(first.run.run_id, 1, new_id(), "refund", "o", None, again=False)
        item = submission("hurry", session=session)
        both = await asyncio.gather(
            effects.begin(pool, [begin]), follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=WINDOW)
        )
        assert both[0][0].mine is (both[1].superseded is None), "the call goes out, or its run is superseded: never both"
        merged += both[1].superseded is not None
    assert await pool.fetchval("SELECT count(*) FROM effects") == 40 - merged


async def test_an_effect_that_waits_for_no_commit_is_seen(pool: Pool, database_url: str) -> None:
    """The schedule that a condition inside the UPDATE gets wrong: the merge waits for the attempt while the effect commits."""
    first = await send(pool, "refund it")
    await claimed(pool, first.run.run_id)
    other = await asyncpg.connect(database_url)
    transaction = other.transaction()
    await transaction.start()
    begun = await effects.begin(other, [Begin(first.run.run_id, 1, new_id(), "refund", "o", None, again=False)])
    merging = asyncio.create_task(send(pool, "hurry"))

    waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%follow_up%'"
    await eventually(lambda: pool.fetchval(waiting), within=10, what="the merge waits for the attempt")
    await transaction.commit()
    await other.close()
    assert begun[0].mine and (await merging).superseded is None


async def test_fifty_messages_to_one_session_while_its_runs_are_claimed_and_finished(pool: Pool) -> None:
    """No input is lost, none is held twice, and the runs that ended well hold them in the order in which they came."""
    done = asyncio.Event()

    async def work() -> None:
        while True:
            heads = [head.run_id for head in await runs.due_heads(pool)]
            for run_id in heads:
                seen = (await runs.look(pool, [run_id]))[run_id]
                got = await transitions.claim(pool, [transitions.Claim(run_id, seen.epoch, "w/n")], lease_seconds=30)
                if got:
                    await asyncio.sleep(0.002)
                    result = json.dumps({"output": "ok", "messages": []})
                    last = event(got[0].top + 1, Kind.COMPLETED, epoch=got[0].epoch)
                    await transitions.finish(
                        pool, [Finish(run_id, got[0].epoch, RunStatus.SUCCEEDED, result=result, events=[last])]
                    )
            if not heads and done.is_set():
                return
            await asyncio.sleep(0)

    worker = asyncio.create_task(work())
    answers = await asyncio.gather(*(send(pool, f"m{number}") for number in range(50)))
    done.set()
    await asyncio.wait_for(worker, 30)
    rows = await pool.fetch(
        "SELECT i.run_id, i.fate, i.fate_run, i.held_by, i.position, r.status, r.session_position AS of FROM inputs i "
        "JOIN runs r ON r.id = i.held_by ORDER BY i.position"
    )
    assert {row["run_id"] for row in rows} == {one.run.run_id for one in answers} and len(rows) == 50
    assert all(
        row["fate"] == "answered_in" and row["fate_run"] == row["held_by"] and row["status"] == "succeeded" for row in rows
    )
    assert [row["of"] for row in rows] == sorted(row["of"] for row in rows), "answered in the order in which they were stored"
    unfinished = await pool.fetchval("SELECT count(*) FROM runs WHERE status IN ('pending', 'running')")
    assert unfinished == 0
    superseded = await pool.fetchval("SELECT count(*) FROM runs WHERE status = 'superseded'")
    assert superseded == sum(one.superseded is not None for one in answers) > 0


# ------------------------------------------------------------------------------------------------------------ against the rules

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "again", "claim", "finish", "fail", "effect", "cancel", "age"]),
        st.integers(0, 9),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policy=st.sampled_from(list(Policy)), steps=STEPS)
def test_postgres_decides_as_the_rules_say(database_url: str, policy: Policy, steps: list[tuple[str, int]]) -> None:
    asyncio.run(_compared(database_url, policy, steps))


async def _compared(database_url: str, policy: Policy, steps: list[tuple[str, int]]) -> None:
    """Plays the steps on Postgres and on a list of runs side by side."""
    pool = await create_pool(database_url, 2)
    try:
        await pool.execute("TRUNCATE sessions, runs, attempts, messages, inputs, ledger, effects, dead_letters CASCADE")
        model: list[dict[str, object]] = []  # id, state, effects, age, held
        sent: list[Submission] = []
        for what, number in steps:
            open_ = [run for run in model if run["state"] in ("pending", "running")]
            head = open_[0] if open_ else None
            if what == "send" or (what == "again" and not sent):
                item = submission(f"m{len(sent)}")
                now = datetime.now(UTC)
                last = open_[-1] if open_ else None
                wanted = decide(
                    policy,
                    LastRun(now - timedelta(seconds=float(str(last["age"]))), bool(last["effects"])) if last else None,
                    now=now,
                    window=timedelta(seconds=WINDOW),
                )
                answer = await send(pool, item, policy)
                assert answer.rejected is (wanted is Decision.REJECT)
                assert (answer.superseded is not None) is (wanted is Decision.MERGE)
                if answer.rejected:
                    continue
                sent.append(item)
                held, age = [item.input_id], 0.0
                if wanted is Decision.MERGE:
                    assert last is not None
                    last["state"] = "superseded"
                    held, age = [*last["held"], item.input_id], float(str(last["age"]))  # type: ignore[misc]
                    last["held"] = []
                model.append({"id": item.run_id, "state": "pending", "effects": False, "age": age, "held": held, "epoch": 0})
                assert answer.run.is_head is (not [run for run in open_ if run["state"] in ("pending", "running")])
            elif what == "again":
                item = sent[number % len(sent)]
                again = Submission(
                    **{name: getattr(item, name) for name in item.__slots__} | {"run_id": new_id(), "input_id": new_id()}
                )
                answer = await send(pool, again, policy)
                assert (
                    answer.run.run_id == item.run_id and answer.run.replayed and answer.superseded is None and not answer.rejected
                )
            elif head is not None and what == "claim" and head["state"] == "pending":
                await claimed(pool, head["id"])  # type: ignore[arg-type]
                head["state"], head["epoch"] = "running", 1
            elif head is not None and what in ("finish", "fail") and head["state"] == "running":
                state = RunStatus.SUCCEEDED if what == "finish" else RunStatus.FAILED
                await ended(pool, head["id"], 1, state)  # type: ignore[arg-type]
                head["state"] = state.value
            elif head is not None and what == "effect" and head["state"] == "running" and not head["effects"]:
                await has_effect(pool, head["id"], 1)  # type: ignore[arg-type]
                head["effects"] = True
            elif open_ and what == "cancel":
                run = open_[number % len(open_)]
                await transitions.take_over(pool, [TakeOver(run["id"], Reason.CANCELLED)])  # type: ignore[arg-type]
                run["state"] = "cancelled"
            elif open_ and what == "age":
                run = open_[number % len(open_)]
                run["age"] = float(number * 7)
                await aged(pool, run["id"], float(number * 7))  # type: ignore[arg-type]
        for run in model:
            assert await status(pool, run["id"]) == run["state"]  # type: ignore[arg-type]
            rows = await pool.fetch("SELECT id, fate FROM inputs WHERE held_by = $1 ORDER BY position", run["id"])
            assert [row["id"] for row in rows] == run["held"]
            fate = {"succeeded": "answered_in", "failed": "failed_in", "cancelled": "cancelled_in"}.get(str(run["state"]))
            assert {row["fate"] for row in rows} <= {fate}
        assert await pool.fetchval("SELECT count(*) FROM inputs") == len(sent), "no input is lost"
        assert await pool.fetchval("SELECT count(*) FROM runs WHERE agent = $1", AGENT) == len(model)
    finally:
        await pool.close()
