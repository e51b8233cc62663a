"""Dead letters: a run that was put aside is done again in exactly one new run, or never; nothing of its evidence is lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest
from commands import command
from processes import ProductProcesses
from run_factory import AGENT, claimed, event, submission, submitted
from waiting import eventually
from whole_path import System, system

from agentrun.domain.events import Kind
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.store import dead_letters, effects, follow_ups, migrations, runs, transitions
from agentrun.store.budgets import Budget, Refused
from agentrun.store.dead_letters import LetterState, Redriven
from agentrun.store.effects import Begin, EffectState, Settle
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Finish, Reason, TakeOver


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 20)
    yield made
    await made.close()


async def put_aside(pool: Pool, text: str = "poison", *, session: str = "s1", lost: int = 3) -> UUID:
    """A run of which every attempt was lost."""
    run = (await submitted(pool, text, session=session)).run_id
    await lose(pool, run, lost)
    return run


async def lose(pool: Pool, run: UUID, times: int) -> None:
    for number in range(times):
        attempt = await claimed(pool, run, owner=f"pod-{number}/n")
        await pool.execute("UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE run_id = $1", run)
        wish = TakeOver(run, Reason.LOST, epoch=attempt.epoch)
        assert (await transitions.take_over(pool, [wish], max_lost_attempts=times))[0].ok


async def redrive(pool: Pool, letter: UUID) -> Redriven:
    held = await runs.held_inputs(pool, [letter])
    done = await dead_letters.redrive(pool, letter, run_id=new_id(), inputs=[new_id() for _ in held])
    assert isinstance(done, Redriven)
    return done


async def texts(pool: Pool, run: UUID) -> list[str]:
    return [json.loads(one.content) for one in await runs.held_inputs(pool, [run])]


async def status(pool: Pool, run: UUID) -> str:
    found: str = await pool.fetchval("SELECT status FROM runs WHERE id = $1", run)
    return found


async def test_a_redrive_asked_for_by_many_at_once_makes_one_run(pool: Pool) -> None:
    poison = await put_aside(pool)
    behind = (await submitted(pool, "behind")).run_id
    done = await asyncio.gather(*(redrive(pool, poison) for _ in range(16)))
    (new,) = {one.run_id for one in done}
    assert [one.replayed for one in done].count(False) == 1
    assert await pool.fetchval("SELECT count(*) FROM runs") == 3
    assert await status(pool, poison) == "failed"
    assert await texts(pool, new) == ["poison"] and await texts(pool, poison) == ["poison"]
    fates = {row["held_by"]: row["fate"] for row in await pool.fetch("SELECT held_by, fate FROM inputs")}
    assert fates == {poison: "failed_in", behind: None, new: None}
    places = dict(await pool.fetch("SELECT id, session_position FROM runs"))
    assert places[poison] < places[behind] < places[new], "it is the last of its session"
    assert not any(one.is_head for one in done)
    row = await pool.fetchrow("SELECT idempotency_key, redrive_of, epoch FROM runs WHERE id = $1", new)
    assert tuple(row or ()) == (f"redrive:{poison}", poison, 0)
    letter = await dead_letters.get(pool, poison, agent=AGENT)
    assert letter is not None and (letter.state, letter.redriven_run_id) == (LetterState.REDRIVEN, new)
    again = await redrive(pool, poison)
    assert (again.run_id, again.replayed) == (new, True)


async def test_no_path_makes_a_second_redrive(pool: Pool) -> None:
    poison = await put_aside(pool)
    await redrive(pool, poison)
    other = (await submitted(pool, "other", session="s2")).run_id
    with pytest.raises(asyncpg.UniqueViolationError):
        await pool.execute("UPDATE runs SET redrive_of = $1 WHERE id = $2", poison, other)


async def test_a_redrive_asked_for_again_with_the_same_ids_is_found_as_its_own(pool: Pool) -> None:
    poison, run, given = await put_aside(pool), new_id(), [new_id()]
    first = await dead_letters.redrive(pool, poison, run_id=run, inputs=given)
    second = await dead_letters.redrive(pool, poison, run_id=run, inputs=given)
    assert first == second and first is not None and not first.replayed and first.is_head


async def test_a_redrive_holds_all_messages_of_a_merged_run_in_their_order(pool: Pool) -> None:
    last = None
    for text in ("one", "two", "three"):
        item = submission(text)
        found = (await follow_ups.submit(pool, [item], Policy.MERGE))[0]
        last = found or (await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=30)).run
    assert last is not None
    await lose(pool, last.run_id, 3)
    assert await texts(pool, (await redrive(pool, last.run_id)).run_id) == ["one", "two", "three"]


async def test_a_redrive_that_is_lost_again_can_be_redriven_and_stays_in_its_chain(pool: Pool) -> None:
    first = await put_aside(pool)
    second = (await redrive(pool, first)).run_id
    await lose(pool, second, 3)
    third = (await redrive(pool, second)).run_id
    assert await pool.fetchval("SELECT agentrun_1.chain_of($1)", third) == first
    letters = await dead_letters.list_letters(pool, agent=AGENT, user_id=None, state=None)
    assert [(one.run_id, one.redriven_run_id) for one in letters] == [(second, third), (first, second)]


async def test_a_new_message_is_not_merged_into_a_redrive(pool: Pool) -> None:
    redriven = (await redrive(pool, await put_aside(pool))).run_id
    item = submission("a fresh message")
    assert (await follow_ups.submit(pool, [item], Policy.MERGE))[0] is None
    done = await follow_ups.follow_up(pool, item, Policy.MERGE, window_seconds=3600)
    assert done.superseded is None
    assert await texts(pool, redriven) == ["poison"] and await texts(pool, done.run.run_id) == ["a fresh message"]


async def test_of_a_redrive_and_a_discard_at_once_one_wins(pool: Pool) -> None:
    for number in range(20):
        poison = await put_aside(pool, session=f"s{number}", lost=1)
        done, discarded = await asyncio.gather(redrive(pool, poison), dead_letters.discard(pool, poison))
        made = await pool.fetchval("SELECT count(*) FROM runs WHERE redrive_of = $1", poison)
        assert (made == 1) == (not done.discarded) == (not discarded)


async def test_what_is_discarded_stays_known_and_is_not_redriven(pool: Pool) -> None:
    poison = await put_aside(pool)
    assert await dead_letters.count_open(pool) == 1
    assert await dead_letters.discard(pool, poison) and await dead_letters.discard(pool, poison)
    assert (await redrive(pool, poison)).discarded
    assert await pool.fetchval("SELECT count(*) FROM runs") == 1
    assert await dead_letters.count_open(pool) == 0
    assert await dead_letters.list_letters(pool, agent=AGENT, user_id="ann") == []
    (letter,) = await dead_letters.list_letters(pool, agent=AGENT, user_id="ann", state=LetterState.DISCARDED)
    assert json.loads(letter.payload) == {"input": "poison"}
    other = await put_aside(pool, session="s2")
    await redrive(pool, other)
    assert not await dead_letters.discard(pool, other)
    assert await dead_letters.redrive(pool, uuid4(), run_id=new_id(), inputs=[]) is None


async def test_a_redrive_reserves_what_it_may_cost_once_or_is_refused_whole(pool: Pool) -> None:
    first, second = await put_aside(pool, session="s1"), await put_aside(pool, session="s2")
    budget = Budget(Decimal("0.25"), Decimal("0.40"), None, "Etc/UTC")

    async def wish(letter: UUID) -> Redriven | Refused | None:
        return await dead_letters.redrive(pool, letter, run_id=new_id(), inputs=[new_id()], budget=budget)

    done = [one for one in await asyncio.gather(*(wish(first) for _ in range(5))) if isinstance(one, Redriven)]
    assert len({one.run_id for one in done}) == 1 and len(done) == 5
    assert await pool.fetchval("SELECT sum(reserved) FROM budget_counters WHERE scope = 'agent'") == Decimal("0.25")
    refused = await wish(second)
    assert isinstance(refused, Refused) and refused.scope == "agent"
    assert await pool.fetchval("SELECT count(*) FROM runs WHERE redrive_of = $1", second) == 0
    letter = await dead_letters.get(pool, second, agent=AGENT)
    assert letter is not None and letter.state is LetterState.OPEN
    assert await texts(pool, second) == ["poison"]
    await transitions.take_over(pool, [TakeOver(done[0].run_id, Reason.CANCELLED)])
    assert isinstance(await wish(second), Redriven), "what the first gave back is there"


async def test_open_letters_are_counted_on_a_database_of_before_discarding(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "MIGRATIONS", [one for one in migrations.MIGRATIONS if one.version < 4])
    monkeypatch.setattr(migrations, "TRANSITIONS", "")
    await migrations.migrate(empty_database_url)
    older = await create_pool(empty_database_url, 1)
    assert await dead_letters.count_open(older) == 0
    await older.close()


async def unknown_effect(pool: Pool, session: str = "s1") -> UUID:
    """A run that failed since nobody knows what came of its effect."""
    run = (await submitted(pool, "refund it", session=session)).run_id
    await claimed(pool, run)
    assert (await effects.begin(pool, [Begin(run, 1, new_id(), "refund", "o-1", '{"cents": 5}', again=False)]))[0].mine
    await effects.settle(pool, [Settle(run, 1, "refund", "o-1", EffectState.UNKNOWN, None)])
    error = json.dumps({"type": "effect_unknown", "message": "look"})
    wish = Finish(run, 1, RunStatus.FAILED, error=error, events=[event(0, Kind.FAILED, error={})])
    assert (await transitions.finish(pool, [wish]))[0].ok
    return run


async def test_a_run_whose_effect_is_unknown_is_put_aside_and_others_that_fail_are_not(pool: Pool) -> None:
    run = await unknown_effect(pool)
    other = (await submitted(pool, "x", session="s2")).run_id
    await claimed(pool, other)
    wish = Finish(other, 1, RunStatus.FAILED, error='{"type": "bad", "message": ""}', events=[event(0, Kind.FAILED, error={})])
    assert (await transitions.finish(pool, [wish]))[0].ok
    (letter,) = await dead_letters.list_letters(pool, agent=AGENT, user_id=None)
    assert (letter.run_id, letter.reason, letter.attempts) == (run, "effect_unknown", 1)
    assert json.loads(letter.last_error or "")["message"] == "look"


async def test_a_settled_effect_is_what_the_redrive_finds(pool: Pool) -> None:
    run = await unknown_effect(pool)
    (open_one,) = await effects.unsettled(pool, agent=AGENT, user_id="ann")
    assert (open_one.run_id, open_one.name, open_one.state) == (run, "refund", EffectState.UNKNOWN)

    async def settle(state: EffectState, response: str | None) -> tuple[bool, EffectState | None]:
        return await effects.settle_by_hand(pool, run, name="refund", key="o-1", state=state, response=response)

    assert await settle(EffectState.DONE, '"refund 4711"') == (True, EffectState.DONE)
    assert await settle(EffectState.DONE, '"refund 4711"') == (True, EffectState.DONE), "asked again after a lost reply"
    assert await settle(EffectState.FAILED, None) == (False, EffectState.DONE)
    assert await effects.unsettled(pool, agent=AGENT, user_id=None) == []
    again = (await redrive(pool, run)).run_id
    await claimed(pool, again)
    (begun,) = await effects.begin(pool, [Begin(again, 1, new_id(), "refund", "o-1", '{"cents": 5}', again=False)])
    assert (begun.mine, begun.state, begun.response) == (False, EffectState.DONE, '"refund 4711"')


async def test_an_effect_of_a_run_that_goes_on_is_its_own_business(pool: Pool) -> None:
    run = (await submitted(pool, "x")).run_id
    await claimed(pool, run)
    await effects.begin(pool, [Begin(run, 1, new_id(), "refund", "o-1", None, again=False)])
    assert await effects.unsettled(pool, agent=AGENT, user_id=None) == []
    done = await effects.settle_by_hand(pool, run, name="refund", key="o-1", state=EffectState.FAILED, response=None)
    assert done == (False, EffectState.INITIATED)


# The whole: processes, HTTP and the command line

AGENT_CODE = '''
"""One message makes the process take memory until it is killed, as the kernel does it, unless a file says that this was mended."""
import asyncio, os, pathlib, signal

MENDED = pathlib.Path(__file__).with_name("mended")

async def run(ctx):
    text = ctx.inputs[-1].text
    if text.startswith("grow") and not MENDED.exists():
        taken = []
        while len(taken) < 16:
            taken.append(bytearray(os.urandom(1 << 20)) * 4)
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.2)
    yield "heard " + text
'''
MANIFEST = """
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: agent, namespace: default}
spec:
  agent: {entrypoint: "grows_agent:run"}
  workers: {leaseSeconds: 2, drainSeconds: 1, concurrency: 4}
  reaper: {idleSeconds: 2, intervalSeconds: 1, maxLostAttempts: 2}
  followUps: {policy: Enqueue}
"""


@pytest.fixture
async def whole(database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, redis_url, product_processes, tmp_path) as made:
        (tmp_path / "grows_agent.py").write_text(AGENT_CODE)
        (tmp_path / "agentrun.yaml").write_text(MANIFEST)
        yield made


async def test_a_payload_that_takes_all_memory_is_put_aside_and_done_again_once_when_that_is_mended(
    whole: System, tmp_path: Path
) -> None:
    await whole.gateway()
    await whole.gateway()
    await whole.scheduler()

    async def keep_a_worker() -> None:
        while True:
            one = await whole.worker(ready=False)
            await one.wait(within=300)

    async def ended(run: UUID) -> str:
        async def is_final() -> str:
            found = await whole.status(run)
            return found if found in ("succeeded", "failed") else ""

        return await eventually(is_final, within=60, what=f"the end of {run}")

    keeping = asyncio.create_task(keep_a_worker())
    try:
        poison = await whole.submit("grow and grow", session="bad")
        behind = await whole.submit("behind it", session="bad")
        neighbours = [await whole.submit(f"hello {n}", session=f"good-{n}") for n in range(6)]
        assert [await ended(run) for run in neighbours] == ["succeeded"] * 6
        assert await ended(poison) == "failed"
        assert await ended(behind) == "succeeded", "its session is free"
        assert await whole.outcomes(poison) == ["lost", "lost"]

        url, key = whole.gateways[0].base_url, whole.key
        code, out, err = await command(url, key, "dlq", "list", "--json")
        (letter,) = [json.loads(line) for line in out.splitlines()]
        assert (code, err, letter["run_id"], letter["reason"]) == (0, "", str(poison), "lost_too_often")
        code, out, err = await command(url, key, "dlq", "show", str(poison))
        assert code == 0 and '"grow and grow"' in out and out.count("lost  worker-") == 2, out + err

        (tmp_path / "mended").touch()
        clicks: list[Awaitable[str]] = []
        for number in range(24):
            gateway = whole.gateways[number % 2]
            address = f"{gateway.base_url}/v1/dead-letters/{poison}/redrive"
            clicks.append(_run_of(whole, address))
        (new,) = set(await asyncio.gather(*clicks))
        code, out, _ = await command(url, key, "dlq", "redrive", str(poison))
        assert (code, out) == (0, f"{poison}  was redriven before as {new}\n")
        assert await ended(UUID(new)) == "succeeded"
        assert await whole.pool.fetchval("SELECT count(*) FROM runs WHERE session_position > 1 AND redrive_of IS NOT NULL") == 1
        assert await whole.log_text(UUID(new)) == "heard grow and grow"
        code, out, err = await command(url, key, "dlq", "discard", str(poison))
        assert code == 2 and "409" in err and "redriven" in err
    finally:
        keeping.cancel()


async def _run_of(whole: System, address: str) -> str:
    response = await whole.http.post(address, headers=whole.headers)
    assert response.status_code == 202, response.text
    assert response.headers["location"] == f"/v1/runs/{response.json()['run_id']}"
    return str(response.json()["run_id"])
