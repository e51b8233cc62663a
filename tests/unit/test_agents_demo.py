"""Demo models run offline through the same driver as real ones."""

from typing import Any

import pytest
from pydantic_ai import models
from recording_context import RecordingContext, turn

from agentrun.agents.base import Executor
from agentrun.agents.demo import NAMES
from agentrun.agents.loading import load
from agentrun.domain.events import Kind
from agentrun.manifests import AgentSpec


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ALLOW_MODEL_REQUESTS", False)


def demo(name: str, **more: Any) -> Executor:
    return load(AgentSpec(model=f"demo:{name}", model_settings={"delay_ms": 0, **more}))


@pytest.mark.parametrize("name", NAMES)
async def test_every_demo_model_answers_the_same_twice_says_what_it_is_and_books_its_tokens(name: str) -> None:
    texts = []
    for _ in range(2):
        context = RecordingContext("Hello there, how are you?")
        result = await demo(name).execute(context)
        assert result.output == context.journal.transcript.text
        texts.append(result.output)
        assert {(row.model, row.provider, row.measured) for row in context.booked} == {(f"demo:{name}", "demo", True)}
        assert all(row.input_tokens > 0 and row.output_tokens > 0 for row in context.booked)
    assert texts[0] == texts[1]
    assert "demo model" in texts[0]


async def test_tokens_are_words() -> None:
    context = RecordingContext("one two, three")
    await demo("echo").execute(context)
    assert context.booked[0].input_tokens == 4


async def test_chat_streams_word_by_word_and_knows_the_first_message() -> None:
    first = await demo("chat").execute(RecordingContext("I am Ada"))
    context = RecordingContext("who am I?", history=[turn("I am Ada", messages=first.messages)])
    second = await demo("chat").execute(context)
    assert 'You said: "who am I?". This is message 2' in second.output
    assert 'The first one was: "I am Ada"' in second.output
    assert context.kinds.count(Kind.TEXT_DELTA) > 10


async def test_tools_calls_a_tool_and_then_answers() -> None:
    context = RecordingContext("how many words are these")
    result = await demo("tools").execute(context)
    assert [data["content"] for data in context.data(Kind.TOOL_RESULT)] == [5]
    assert "word_count said 5" in result.output
    assert len(context.booked) == 2


async def test_slow_says_as_many_words_as_it_is_told() -> None:
    context = RecordingContext("x")
    result = await demo("slow", words=20).execute(context)
    assert "word 20" in result.output
    assert "word 30" not in result.output
