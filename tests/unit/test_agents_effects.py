"""Effects as agents see them: who is called when, by which policy, and what a later attempt gets."""

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.test import TestModel
from recording_context import Killed, RecordingContext

from agentrun.agents.base import Context
from agentrun.agents.effects import (
    EffectFailed,
    EffectPolicy,
    EffectUnknown,
    Happened,
    NotHappened,
    current_effect,
    effectful,
)
from agentrun.agents.failures import AgentFailure, classify
from agentrun.agents.generator import GeneratorExecutor
from agentrun.agents.pydantic_ai import PydanticAIExecutor
from agentrun.store.effects import EffectState


class Bank:
    """The other side: what arrived, by the id that came with it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def refund(self, what: Any, id_: str) -> dict[str, Any]:
        self.calls.append((id_, what))
        return {"refunded": what, "number": len(self.calls)}


async def once(context: Any, bank: Bank, key: str = "o-1", policy: str = "fail", **options: Any) -> Any:
    async with context.effect("refund", key=key, policy=policy, **options) as effect:
        if effect.due:
            effect.response = await bank.refund(key, effect.id)
    return effect.response


def killed_at(act: str) -> Any:
    def kill(done: str) -> None:
        if done == act:
            raise Killed

    return kill


@pytest.mark.parametrize("policy", ["retry", "fail"])
async def test_done_is_done_in_this_attempt_and_all_later_ones(policy: str) -> None:
    bank, context = Bank(), RecordingContext("x")
    first = await once(context, bank, policy=policy)
    assert await once(context, bank, policy=policy) == first
    assert await once(context.next_attempt(), bank, policy=policy) == first == {"refunded": "o-1", "number": 1}
    assert len(bank.calls) == 1
    await once(context, bank, key="o-2", policy=policy)
    assert len(bank.calls) == 2 and bank.calls[0][0] != bank.calls[1][0], "another key is another call with another id"


async def test_retry_calls_again_with_the_same_id() -> None:
    bank, context = Bank(), RecordingContext("x", on=killed_at("settle refund done"))
    with pytest.raises(Killed):
        await once(context, bank, policy="retry")
    later = context.next_attempt()
    await once(later, bank, policy="retry")
    assert len(bank.calls) == 2 and bank.calls[0] == bank.calls[1], "the other side can drop the second by its id"
    assert later.journal.effects["refund", "o-1"][3] == 2


async def test_fail_marks_it_unknown_and_fails_the_run_for_a_person() -> None:
    bank, context = Bank(), RecordingContext("x", on=killed_at("settle refund done"))
    with pytest.raises(Killed):
        await once(context, bank)
    later = context.next_attempt()
    for _ in range(2):
        with pytest.raises(EffectUnknown) as raised:
            await once(later, bank)
    verdict = classify(raised.value)
    assert (verdict.type, verdict.retryable) == ("effect_unknown", False) and "o-1" in verdict.message
    assert len(bank.calls) == 1 and later.journal.effects["refund", "o-1"][0] is EffectState.UNKNOWN


@pytest.mark.parametrize(
    ("found", "calls", "state"),
    [
        (Happened({"number": 9}), 1, EffectState.DONE),
        (NotHappened(), 2, EffectState.DONE),
        (None, 1, EffectState.UNKNOWN),
    ],
)
async def test_reconcile_asks_the_other_side(found: Any, calls: int, state: EffectState) -> None:
    bank, context = Bank(), RecordingContext("x", on=killed_at("settle refund done"))
    asked = []

    async def reconcile(effect: Any) -> Any:
        asked.append((effect.id, effect.key, effect.tries))
        return found

    with pytest.raises(Killed):
        await once(context, bank, policy="reconcile", reconcile=reconcile)
    assert asked == [], "nobody is asked about a first call"
    later = context.next_attempt()
    if found is None:
        with pytest.raises(EffectUnknown):
            await once(later, bank, policy="reconcile", reconcile=reconcile)
    else:
        answer = await once(later, bank, policy="reconcile", reconcile=reconcile)
        assert answer["number"] == (9 if calls == 1 else 2)
    assert asked == [(bank.calls[0][0], "o-1", 1)] and len(bank.calls) == calls
    assert later.journal.effects["refund", "o-1"][0] is state


async def test_what_is_known_to_have_failed_may_be_tried_again_under_any_policy() -> None:
    bank, context = Bank(), RecordingContext("x")
    with pytest.raises(EffectFailed):
        async with context.effect("refund", key="o-1") as effect:
            raise EffectFailed("no funds")
    assert context.journal.effects["refund", "o-1"][0] is EffectState.FAILED
    assert (await once(context.next_attempt(), bank))["number"] == 1
    assert effect.due


async def test_any_other_error_leaves_it_in_doubt() -> None:
    bank, context = Bank(), RecordingContext("x")
    with pytest.raises(ConnectionError):
        async with context.effect("refund", key="o-1"):
            raise ConnectionError("reset by peer")
    assert context.journal.effects["refund", "o-1"][0] is EffectState.INITIATED
    with pytest.raises(EffectUnknown):
        await once(context, bank)
    assert bank.calls == []


async def test_two_calls_at_once_are_one() -> None:
    """A model may ask for the same tool twice in one answer; the second waits and gets the first's response."""
    bank, context = Bank(), RecordingContext("x")
    answers = await asyncio.gather(*(once(context, bank, policy="retry") for _ in range(5)))
    assert len(bank.calls) == 1 and answers == [answers[0]] * 5


async def test_a_key_names_one_request() -> None:
    bank, context = Bank(), RecordingContext("x")
    await once(context, bank, request={"amount": 5, "to": "ann"})
    await once(context, bank, request={"to": "ann", "amount": 5})
    with pytest.raises(AgentFailure) as raised:
        await once(context, bank, request={"amount": 500, "to": "ann"})
    assert raised.value.type == "effect_key_reused" and len(bank.calls) == 1


async def test_the_record_comes_before_the_call_and_never_while_the_lease_is_in_doubt() -> None:
    bank, context = Bank(), RecordingContext("x")
    await once(context, bank)
    assert context.acts == ["ready", "begin refund", "ready", "settle refund done"]
    context.fenced = True
    with pytest.raises(Exception, match="somebody else"):
        await once(context, bank, key="o-2")
    assert len(bank.calls) == 1


async def test_an_attempt_that_is_ended_before_the_call_leaves_nothing_in_doubt() -> None:
    """A worker that stops hands its run back: the next attempt may make a call that never went out, whatever the policy."""
    bank, context = Bank(), RecordingContext("x")
    reached = asyncio.Event()
    ready, calls = context._effects.ready, 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        await ready()
        if calls == 2:
            reached.set()
            await asyncio.Event().wait()

    context._effects.ready = slow
    task = asyncio.create_task(once(context, bank))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert context.journal.effects["refund", "o-1"][0] is EffectState.FAILED
    assert (await once(context.next_attempt(), bank))["number"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"policy": "reconcile"}, "needs a function"),
        ({"policy": "retry", "reconcile": once}, "needs a function"),
        ({"key": ""}, "its key has"),
        ({"key": "k" * 256}, "its key has"),
        ({"key": "a\0b"}, "its key has"),
        ({"policy": "hope"}, "hope"),
    ],
)
def test_what_cannot_be_an_effect_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RecordingContext("x").effect("refund", **{"key": "k", **options})


@pytest.mark.parametrize("response", [object(), "x" * 1_000_001])
async def test_a_response_that_cannot_be_kept_fails_and_stays_in_doubt(response: Any) -> None:
    context = RecordingContext("x")
    with pytest.raises(AgentFailure):
        async with context.effect("refund", key="o") as effect:
            effect.response = response
    assert context.journal.effects["refund", "o"][0] is EffectState.INITIATED


# ------------------------------------------------------------------------------------------------------------ @effectful

BANK = Bank()


@effectful("refund", key="order", policy=EffectPolicy.RETRY)
async def refund(ctx: RunContext[Context], order: str, cents: int = 100) -> dict[str, Any]:
    """Gives the money back."""
    return await BANK.refund((order, cents), current_effect().id)


@effectful("note", key=lambda text: f"note/{text}", policy="retry")
def note(ctx: Context, text: str) -> str:
    """Not async: runs in a thread."""
    BANK.calls.append((current_effect().id, text))
    return text.upper()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    BANK.calls.clear()


async def test_a_tool_of_a_pydantic_ai_agent() -> None:
    agent = Agent(TestModel(custom_output_text="done"), tools=[refund])
    context = RecordingContext("refund it", on=killed_at("settle refund done"))
    with pytest.raises(Killed):
        await PydanticAIExecutor(agent).execute(context)
    later = context.next_attempt()
    assert (await PydanticAIExecutor(agent).execute(later)).output == "done"
    assert len(BANK.calls) == 2 and BANK.calls[0] == BANK.calls[1]
    tool = agent._function_toolset.tools["refund"].function_schema
    assert set(tool.json_schema["properties"]) == {"order", "cents"} and tool.json_schema["required"] == ["order"]


async def test_a_function_called_by_a_generator() -> None:
    async def run(ctx: Context) -> Any:
        yield await note(ctx, "a")
        yield await note(ctx, text="a")

    result = await GeneratorExecutor(run).execute(RecordingContext("x"))
    assert result.output == "AA" and [text for _, text in BANK.calls] == ["a"]


def test_a_function_without_context_or_key_is_refused() -> None:
    for bad in (lambda: 1, lambda ctx: 1, lambda order: 1):
        with pytest.raises(TypeError, match="context first"):
            effectful("x", key="order")(bad)
