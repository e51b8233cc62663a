"""The record of effects in Postgres: fenced, found again after a lost reply, and never moved by who does not own the run."""

from collections.abc import AsyncIterator
from uuid import UUID

import pytest
from run_factory import claimed, submitted

from agentrun.store import effects, transitions
from agentrun.store.effects import Begin, Begun, EffectState, Settle, Settled
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool, create_pool
from agentrun.store.transitions import Reason, TakeOver


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    made = await create_pool(database_url, 5)
    yield made
    await made.close()


async def running(pool: Pool, session: str = "s") -> UUID:
    run_id = (await submitted(pool, session=session)).run_id
    await claimed(pool, run_id)
    return run_id


async def begin(pool: Pool, run_id: UUID, epoch: int = 1, *, again: bool = False, token: UUID | None = None) -> Begun:
    return (await effects.begin(pool, [Begin(run_id, epoch, token or new_id(), "refund", "o", '{"a": 1}', again)]))[0]


async def settle(pool: Pool, run_id: UUID, state: EffectState, epoch: int = 1, response: str | None = None) -> Settled:
    return (await effects.settle(pool, [Settle(run_id, epoch, "refund", "o", state, response)]))[0]


async def next_attempt(pool: Pool, run_id: UUID, epoch: int) -> None:
    """The attempt is handed back, and the next one runs."""
    wish = TakeOver(run_id, Reason.HANDED_BACK, epoch=epoch, last_seq=-1)
    assert (await transitions.take_over(pool, [wish]))[0].ok
    await claimed(pool, run_id)


async def test_a_lost_reply_is_found_by_its_token(pool: Pool) -> None:
    run_id, token = await running(pool), new_id()
    answers = [await begin(pool, run_id, token=token) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2] and answers[0].mine and answers[0].tries == 1
    other = await begin(pool, run_id)
    assert other.held and not other.mine and other.state is EffectState.INITIATED
    for _ in range(2):
        assert (await settle(pool, run_id, EffectState.DONE, response='"ok"')) == Settled(held=True, ok=True)
    assert not (await settle(pool, run_id, EffectState.FAILED)).ok, "what is settled stays so"
    done = await begin(pool, run_id, again=True)
    assert not done.mine and done.state is EffectState.DONE and done.response == '"ok"'


async def test_an_ended_attempt_is_fenced_also_in_one_group_with_the_attempt_that_followed_it(pool: Pool) -> None:
    run_id = await running(pool)
    await begin(pool, run_id)
    await next_attempt(pool, run_id, 1)

    late = Begin(run_id, 1, new_id(), "refund", "o", '{"a": 1}', again=True)
    begun = await effects.begin(pool, [late, Begin(run_id, 2, new_id(), "refund", "p", None, again=False)])
    assert [(one.held, one.mine) for one in begun] == [(False, False), (True, True)]
    states = [EffectState.DONE, EffectState.FAILED]
    wishes = [Settle(run_id, epoch, "refund", key, state, None) for epoch, key, state in zip((1, 2), "op", states, strict=True)]
    assert await effects.settle(pool, wishes) == [Settled(held=False, ok=False), Settled(held=True, ok=True)]
    found = {one.key: (one.state, one.epoch, one.tries) for one in await effects.of_run(pool, run_id)}
    assert found == {"o": (EffectState.INITIATED, 1, 1), "p": (EffectState.FAILED, 2, 1)}


async def test_an_attempt_that_has_ended_puts_nothing_on_record(pool: Pool) -> None:
    run_id = await running(pool)
    await begin(pool, run_id)
    await next_attempt(pool, run_id, 1)
    assert await settle(pool, run_id, EffectState.DONE, epoch=1) == Settled(held=False, ok=False)
    assert not (await begin(pool, run_id, epoch=1, again=True)).held
    late = (await effects.begin(pool, [Begin(run_id, 1, new_id(), "refund", "another", None, again=False)]))[0]
    assert not late.held and late.state is None, "nor is a new one made"
    assert await pool.fetchval("SELECT state FROM effects") == "initiated"
    now = await begin(pool, run_id, epoch=2, again=True)
    assert now.mine and now.tries == 2
    assert (await effects.of_run(pool, run_id))[0].epoch == 2


async def test_failed_may_be_begun_again_but_not_with_another_request(pool: Pool) -> None:
    run_id = await running(pool)
    await begin(pool, run_id)
    await settle(pool, run_id, EffectState.FAILED, response='{"type": "declined"}')
    other = (await effects.begin(pool, [Begin(run_id, 1, new_id(), "refund", "o", '{"a": 2}', again=True)]))[0]
    assert not other.mine and other.state is EffectState.FAILED
    again = await begin(pool, run_id)
    assert again.mine and again.tries == 2 and again.response is None
    await settle(pool, run_id, EffectState.UNKNOWN)
    assert not (await begin(pool, run_id, again=True)).mine, "unknown is for a person"


async def test_a_redrive_finds_the_effects_of_its_chain(pool: Pool) -> None:
    first = await running(pool, "a")
    begun = await begin(pool, first)
    await settle(pool, first, EffectState.DONE, response='"ok"')
    second, third = await running(pool, "b"), await running(pool, "c")
    await pool.execute("UPDATE runs SET redrive_of = $2 WHERE id = $1", second, first)
    await pool.execute("UPDATE runs SET redrive_of = $2 WHERE id = $1", third, second)
    for run_id in (second, third):
        found = await begin(pool, run_id, again=True)
        assert (found.mine, found.state, found.response, found.chain_id) == (False, EffectState.DONE, '"ok"', begun.chain_id)
    assert begun.chain_id == first


async def test_a_group_answers_member_by_member(pool: Pool) -> None:
    """One is fenced, one begins, one has been done: in the order asked."""
    ended, fresh, done = await running(pool, "a"), await running(pool, "b"), await running(pool, "c")
    await begin(pool, done)
    await settle(pool, done, EffectState.DONE)
    await transitions.take_over(pool, [TakeOver(ended, Reason.CANCELLED)])
    wishes = [Begin(run_id, 1, new_id(), "refund", "o", '{"a": 1}', again=False) for run_id in (ended, fresh, done)]
    found = await effects.begin(pool, wishes)
    assert [(one.held, one.mine) for one in found] == [(False, False), (True, True), (True, False)]
    settled = await effects.settle(pool, [Settle(one.run_id, 1, "refund", "o", EffectState.DONE, None) for one in wishes])
    assert [(one.held, one.ok) for one in settled] == [(False, False), (True, True), (True, True)]
