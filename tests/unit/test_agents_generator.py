"""Runs executed by a plain async function."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from recording_context import Killed, RecordingContext

from agentrun.agents.base import Context, Usage
from agentrun.agents.failures import AgentFailure, classify
from agentrun.agents.generator import GeneratorExecutor, is_run_function
from agentrun.agents.output import EVENT_BYTES
from agentrun.domain.events import Kind, encode_data


async def test_pieces_of_text_make_one_message_and_the_output() -> None:
    async def run(ctx: Context) -> AsyncIterator[str]:
        yield "Hello, "
        yield ctx.inputs[0].text

    context = RecordingContext("Ada")
    result = await GeneratorExecutor(run).execute(context)

    assert result.output == "Hello, Ada" == context.journal.transcript.text
    assert context.kinds == [
        *(Kind.ITEM_ADDED, Kind.PART_ADDED, Kind.TEXT_DELTA, Kind.TEXT_DELTA),
        *(Kind.TEXT_DONE, Kind.PART_DONE, Kind.ITEM_DONE),
    ]


async def test_events_of_its_own_take_their_place_between_messages() -> None:
    async def run(ctx: Context) -> AsyncIterator[Any]:
        yield "before "
        yield Kind.ITEM_ADDED, {"item": 1, "type": "reasoning"}
        yield "reasoning_done", {"item": 1, "text": "hm"}
        yield "after"

    context = RecordingContext("x")
    result = await GeneratorExecutor(run).execute(context)
    assert result.output == "before after" == context.journal.transcript.text
    assert [(data["item"], data["type"]) for data in context.data(Kind.ITEM_ADDED)] == [
        *((0, "message"), (1, "reasoning"), (2, "message")),
    ]


async def test_behind_a_checkpoint_it_goes_on_with_its_state_and_its_text_is_whole() -> None:
    started: list[int] = []

    async def run(ctx: Context) -> AsyncIterator[str]:
        begin = ctx.state or 0
        started.append(begin)
        for number in range(begin, 4):
            await ctx.ready()
            yield f"{number} "
            if number == 2 and ctx.run.attempt == 1:
                raise Killed
            await ctx.checkpoint(number + 1)

    first = RecordingContext("x")
    with pytest.raises(Killed):
        await GeneratorExecutor(run).execute(first)
    second = first.next_attempt()
    result = await GeneratorExecutor(run).execute(second)

    assert started == [0, 2]
    assert result.output == "0 1 2 3 " == second.journal.transcript.text


async def test_without_a_checkpoint_it_starts_over() -> None:
    async def run(ctx: Context) -> AsyncIterator[str]:
        yield "one "
        if ctx.run.attempt == 1:
            raise Killed
        yield "two"

    first = RecordingContext("x")
    with pytest.raises(Killed):
        await GeneratorExecutor(run).execute(first)
    second = first.next_attempt()
    assert (await GeneratorExecutor(run).execute(second)).output == "one two" == second.journal.transcript.text


async def test_a_coroutine_returns_text_or_json() -> None:
    async def text(ctx: Context) -> str:
        await ctx.book(Usage(model="mine", input_tokens=3))
        return "done\x00"

    async def data(ctx: Context) -> dict[str, Any]:
        return {"total": 5, "bad": "\ud800"}

    context = RecordingContext("x")
    assert (await GeneratorExecutor(text).execute(context)).output == "done\ufffd" == context.journal.transcript.text
    assert [row.model for row in context.booked] == ["mine"]
    assert (await GeneratorExecutor(data).execute(RecordingContext("x"))).output == {"total": 5, "bad": "\ufffd"}


async def test_a_pair_of_surrogates_over_two_pieces_is_joined_and_long_text_stays_in_small_events() -> None:
    async def run(ctx: Context) -> AsyncIterator[str]:
        yield "a \ud83d"
        yield "\ude00 b \ud83d"
        yield "\x01" * 200_000

    context = RecordingContext("x")
    result = await GeneratorExecutor(run).execute(context)
    assert result.output == "a 😀 b \ufffd" + "\x01" * 200_000 == context.journal.transcript.text
    assert max(len(encode_data(data)) for _, _, _, data in context.journal.events) <= EVENT_BYTES


@pytest.mark.parametrize("piece", [5, None, ("text", 1), (Kind.COMPLETED, {"output": 1}), (Kind.RESTART, {"keep": 0})])
async def test_what_cannot_be_sent_fails_the_run_with_a_remedy(piece: Any) -> None:
    async def run(ctx: Context) -> AsyncIterator[Any]:
        yield piece

    with pytest.raises(AgentFailure, match=r"run\(ctx\) (yielded|sent)") as caught:
        await GeneratorExecutor(run).execute(RecordingContext("x"))
    assert classify(caught.value).type == "agent_error"


async def test_the_function_is_closed_when_the_run_ends_early() -> None:
    closed: list[bool] = []

    async def run(ctx: Context) -> AsyncIterator[str]:
        try:
            yield "a"
            yield "b"
        finally:
            closed.append(True)

    def kill(act: str) -> None:
        if act == "emit text_delta":
            raise Killed

    with pytest.raises(Killed):
        await GeneratorExecutor(run).execute(RecordingContext("x", on=kill))
    assert closed == [True]


def test_only_async_functions_of_one_argument_can_execute_a_run() -> None:
    async def two(a: object, b: object) -> None: ...
    async def one(a: object) -> None: ...
    def plain(a: object) -> None: ...

    assert [is_run_function(value) for value in (one, two, plain, 5)] == [True, False, False, False]
