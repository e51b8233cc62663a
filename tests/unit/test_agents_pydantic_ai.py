"""A real pydantic-ai Agent, two tools, over HTTP against a provider that behaves as told."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_provider import BROKEN_TEXT, LANGUAGES, FakeProvider
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ModelMessage, RequestUsage, RunContext
from pydantic_ai.models import StreamedResponse
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from recording_context import Killed, RecordingContext, turn

from agentrun.agents.base import Context, Result, close
from agentrun.agents.failures import classify
from agentrun.agents.output import EVENT_BYTES
from agentrun.agents.pydantic_ai import PydanticAIExecutor
from agentrun.domain.errors import Fenced
from agentrun.domain.events import Kind, encode_data

OPEN: list[PydanticAIExecutor] = []
TWO_STEPS = '[[tool add {"a": 2, "b": 3}]] [[tool shout {"text": "five"}]]'


@pytest.fixture(autouse=True)
async def _connections_closed() -> AsyncIterator[None]:
    yield
    while OPEN:
        await close(OPEN.pop())


@pytest.fixture(scope="module")
def server() -> Iterator[FakeProvider]:
    with FakeProvider() as running:
        yield running


@pytest.fixture
def provider(server: FakeProvider) -> FakeProvider:
    server.reset()
    return server


class Bench:
    """An agent with two tools and what its tools were asked."""

    def __init__(self, provider: FakeProvider, **options: Any) -> None:
        upstream = OpenAIProvider(base_url=provider.url, api_key="none")
        upstream.client.max_retries = 0
        self.agent: Agent[Any, Any] = Agent(OpenAIChatModel("gpt-4o", provider=upstream), **options)
        self.executor = PydanticAIExecutor(self.agent)
        OPEN.append(self.executor)
        self.ran: list[str] = []
        self.threads: set[int] = set()

        @self.agent.tool
        async def add(ctx: RunContext[Context], a: int, b: int) -> int:
            self.ran.append(f"add for {ctx.deps.run.user_id}")
            return a + b

        @self.agent.tool_plain
        def shout(text: str) -> dict[str, Any]:
            self.ran.append("shout")
            self.threads.add(threading.get_ident())
            return {"loud": text.upper() + "!"}


def reader_text(context: RecordingContext) -> str:
    return context.journal.transcript.text


async def test_a_run_with_two_tools_sends_every_event_in_order(provider: FakeProvider) -> None:
    bench = Bench(provider, instructions="be brief")
    context = RecordingContext(f"compute {TWO_STEPS}")

    result = await bench.executor.execute(context)

    assert result.output == 'done: 5, {"loud":"FIVE!"}'
    assert reader_text(context) == result.output
    kinds = [kind for kind in context.kinds if kind not in (Kind.TEXT_DELTA, Kind.TOOL_ARGUMENTS_DELTA)]
    call = [Kind.ITEM_ADDED, Kind.TOOL_ARGUMENTS_DONE, Kind.USAGE, Kind.TOOL_RESULT, Kind.ITEM_DONE]
    message = [Kind.ITEM_ADDED, Kind.PART_ADDED, Kind.TEXT_DONE, Kind.PART_DONE, Kind.ITEM_DONE, Kind.USAGE]
    assert kinds == [*call, *call, *message]
    assert [item["item"] for item in context.data(Kind.ITEM_ADDED)] == [0, 1, 2]
    assert [item["arguments"] for item in context.data(Kind.TOOL_ARGUMENTS_DONE)] == ['{"a": 2, "b": 3}', '{"text": "five"}']
    assert "".join(d["text"] for d in context.data(Kind.TOOL_ARGUMENTS_DELTA)) == '{"a": 2, "b": 3}{"text": "five"}'
    assert [(d["item"], d["content"], d["is_error"]) for d in context.data(Kind.TOOL_RESULT)] == [
        (0, 5, False),
        (1, {"loud": "FIVE!"}, False),
    ]


async def test_each_call_is_booked_before_its_tools_run_and_allowed_before_it_starts(provider: FakeProvider) -> None:
    bench = Bench(provider)
    context = RecordingContext(f"compute {TWO_STEPS}")

    await bench.executor.execute(context)

    step = ["ready", "emit item_added", "emit tool_arguments_done", "book", "checkpoint", "ready", "emit tool_result"]
    seen = [act for act in context.acts if act in step]
    assert seen[:7] == step
    assert context.acts.count("checkpoint") == 5
    usage = context.booked
    assert sum(row.input_tokens for row in usage) == provider.counts["prompt_tokens"]
    assert sum(row.cached_tokens for row in usage) == provider.counts["cached_tokens"] > 0
    assert sum(row.output_tokens for row in usage) == provider.counts["completion_tokens"]
    assert sum(row.reasoning_tokens for row in usage) == provider.counts["reasoning_tokens"]
    assert {(row.model, row.provider, row.measured) for row in usage} == {("gpt-4o", "openai", True)}


async def test_synchronous_tools_run_off_the_loop_and_every_tool_sees_the_run(provider: FakeProvider) -> None:
    bench = Bench(provider)
    await bench.executor.execute(RecordingContext(f"compute {TWO_STEPS}"))
    assert bench.ran == ["add for user", "shout"]
    assert threading.get_ident() not in bench.threads


@pytest.mark.parametrize("options", [{}, {"instructions": "be brief"}, {"system_prompt": "be brief"}])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
async def test_killed_behind_any_checkpoint_nothing_finished_is_repeated(
    provider: FakeProvider, nth: int, options: dict[str, Any]
) -> None:
    bench = Bench(provider, **options)
    count = 0

    def kill(act: str) -> None:
        nonlocal count
        count += act == "checkpointed"
        if count == nth:
            raise Killed

    first = RecordingContext(f"compute {TWO_STEPS}", history=[turn("an unanswered question")], on=kill)
    with pytest.raises(Killed):
        await bench.executor.execute(first)
    second = first.next_attempt()
    result = await bench.executor.execute(second)

    assert provider.counts["calls"] == provider.counts["finished"] == 3
    assert bench.ran == ["add for user", "shout"]
    assert len(second.booked) == 3
    assert result.output == 'done: 5, {"loud":"FIVE!"}' == reader_text(second)
    assert [item["item"] for item in second.data(Kind.ITEM_ADDED)] == [0, 1, 2]
    assert [message["kind"] for message in result.messages] == ["request", "response"] * 3
    last = provider.requests[-1]["messages"]
    assert [message["role"] for message in last if message["role"] != "system"] == [
        *("user", "user", "assistant", "tool", "assistant", "tool"),
    ]
    assert [m["content"] for m in last if m["role"] == "system"] == (["be brief"] if options else [])


@pytest.mark.parametrize("act", ["ready", "book", "checkpoint", "emit tool_result", "emit text_done"])
async def test_killed_before_any_act_the_run_still_ends_right(provider: FakeProvider, act: str) -> None:
    bench = Bench(provider)
    context = RecordingContext(f"compute {TWO_STEPS}")
    for nth in range(1, 20):
        provider.reset()
        context = RecordingContext(f"compute {TWO_STEPS}", on=_killer(act, nth))
        try:
            await bench.executor.execute(context)
        except Killed:
            later = context.next_attempt()
            result = await bench.executor.execute(later)
            assert result.output == reader_text(later) == 'done: 5, {"loud":"FIVE!"}'
            assert provider.counts["calls"] <= 4
        else:
            assert nth > 1
            return
    pytest.fail("every attempt was killed")


def _killer(act: str, nth: int) -> Callable[[str], None]:
    seen = 0

    def kill(now: str) -> None:
        nonlocal seen
        seen += now == act
        if now == act and seen == nth:
            raise Killed

    return kill


async def test_three_attempts_each_killed_add_up_to_one_run(provider: FakeProvider) -> None:
    bench = Bench(provider, instructions="be brief")
    context = RecordingContext(f"compute {TWO_STEPS}", on=_killer("checkpointed", 1))
    for _ in range(4):
        with pytest.raises(Killed):
            await bench.executor.execute(context)
        context = context.next_attempt(on=_killer("checkpointed", 1))
    with pytest.raises(Killed):
        await bench.executor.execute(context)
    result = await bench.executor.execute(context.next_attempt())
    assert provider.counts["calls"] == 3
    assert bench.ran == ["add for user", "shout"]
    assert result.output == 'done: 5, {"loud":"FIVE!"}'


async def test_cancelled_in_mid_call_an_unmeasured_row_is_booked_and_the_connection_closed(provider: FakeProvider) -> None:
    bench = Bench(provider)
    context = RecordingContext("[[deltas n=100]] [[hang after=20]]")
    task = asyncio.create_task(bench.executor.execute(context))
    await _until(lambda: len(context.data(Kind.TEXT_DELTA)) >= 18)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    (row,) = context.booked
    assert (row.model, row.provider, row.measured) == ("gpt-4o", "openai", False)
    assert row.input_tokens > 0
    assert row.output_tokens > 5
    await _until(lambda: provider.counts["cut_by_client"] == 1)


async def test_cancelled_before_the_first_word_the_prompt_is_still_booked(provider: FakeProvider) -> None:
    bench = Bench(provider)
    context = RecordingContext("[[hang after=0]]")
    task = asyncio.create_task(bench.executor.execute(context))
    await _until(lambda: provider.counts["calls"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (row,) = context.booked
    assert (row.measured, row.input_tokens > 0, row.output_tokens) == (False, True, 0)


async def test_fenced_in_mid_call_the_attempt_ends_and_the_call_is_booked_as_cut(provider: FakeProvider) -> None:
    bench = Bench(provider)

    def fence(act: str) -> None:
        context.fenced = act == "emit text_delta"

    context = RecordingContext("[[deltas n=50]]", on=fence)
    with pytest.raises(Fenced):
        await bench.executor.execute(context)
    assert [row.measured for row in context.booked] == [False]


@pytest.mark.parametrize("act", ["emit text_done", "emit item_done", "emit tool_arguments_done"])
async def test_fenced_between_the_end_of_a_call_and_its_booking_its_real_usage_is_booked(
    provider: FakeProvider, act: str
) -> None:
    bench = Bench(provider)

    def fence(now: str) -> None:
        context.fenced = context.fenced or now == act

    context = RecordingContext("[[say hello you]]" if "tool" not in act else TWO_STEPS, on=fence)
    with pytest.raises(Fenced):
        await bench.executor.execute(context)
    assert context.acts[-1] == "book_cut"
    assert [row.input_tokens for row in context.booked] == [provider.counts["prompt_tokens"]]


async def test_cancelled_while_a_tool_runs_the_tool_is_cancelled_and_nothing_is_booked_twice(
    provider: FakeProvider,
) -> None:
    bench = Bench(provider)
    seen: list[str] = []

    @bench.agent.tool_plain
    async def wait() -> str:
        seen.append("started")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")
        return "never"

    context = RecordingContext("[[tool wait {}]]")
    task = asyncio.create_task(bench.executor.execute(context))
    await _until(lambda: seen == ["started"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["started", "ended"]
    assert [row.measured for row in context.booked] == [True]


async def test_an_answer_without_usage_is_booked_as_an_estimate(provider: FakeProvider) -> None:
    context = RecordingContext("[[nousage]] [[deltas n=40]]")
    await Bench(provider).executor.execute(context)
    (row,) = context.booked
    assert (row.measured, row.input_tokens > 0) == (False, True)
    assert row.output_tokens == -(-len(reader_text(context)) // 4)
    assert context.data(Kind.USAGE)[0]["unmeasured"]


@pytest.mark.parametrize(
    ("script", "kind", "retryable", "booked"),
    [
        ("[[fail status=429 after=7]]", "rate_limited", True, 0),
        ("[[fail status=500]]", "provider_unavailable", True, 0),
        ("[[fail status=503]]", "provider_unavailable", True, 0),
        ("[[fail status=408]]", "timeout", True, 0),
        ("[[fail status=409]]", "provider_unavailable", True, 0),
        ("[[fail status=400]]", "provider_error", False, 0),
        ("[[fail status=401]]", "provider_auth", False, 0),
        ("[[cut after=3]]", "provider_unavailable", True, 1),
        ("[[badjson after=3]]", "provider_error", True, 1),
    ],
)
async def test_a_provider_that_fails_fails_the_attempt_and_the_next_one_succeeds(
    provider: FakeProvider, script: str, kind: str, retryable: bool, booked: int
) -> None:
    bench = Bench(provider)
    context = RecordingContext(f'[[tool add {{"a": 1, "b": 1}}]] {script}')
    with pytest.raises(Exception) as caught:
        await bench.executor.execute(context)
    failure = classify(caught.value)
    assert (failure.type, failure.retryable) == (kind, retryable), failure
    assert failure.retry_after == (7 if "after=7" in script else None)
    assert len([row for row in context.booked if not row.measured]) == booked

    later = context.next_attempt()
    result = await bench.executor.execute(later)
    assert result.output == "done: 2" == reader_text(later)


async def test_an_unreachable_provider_can_be_retried_and_costs_nothing() -> None:
    upstream = OpenAIProvider(base_url="http://127.0.0.1:9/v1", api_key="none")
    upstream.client.max_retries = 0
    context = RecordingContext("hello")
    executor = PydanticAIExecutor(Agent(OpenAIChatModel("gpt-4o", provider=upstream)))
    with pytest.raises(Exception) as caught:
        await executor.execute(context)
    await close(executor)
    assert classify(caught.value).type == "provider_unavailable"
    assert classify(caught.value).retryable
    assert context.booked == []


async def test_the_second_turn_sees_the_first(provider: FakeProvider) -> None:
    bench = Bench(provider, instructions="be brief")
    first = await bench.executor.execute(RecordingContext("my name is Ada"))
    second = RecordingContext("what is my name?", history=[turn("my name is Ada", messages=first.messages)])

    result = await bench.executor.execute(second)

    sent = [(message["role"], message["content"]) for message in provider.requests[-1]["messages"]]
    assert sent == [
        ("system", "be brief"),
        ("user", "my name is Ada"),
        ("assistant", "You said: my name is Ada (message 1)"),
        ("user", "what is my name?"),
    ]
    assert [part["content"] for part in result.messages[0]["parts"]] == ["what is my name?"]
    assert len(result.messages) == 2


async def test_several_inputs_and_those_of_failed_turns_are_separate_messages_in_order(provider: FakeProvider) -> None:
    bench = Bench(provider, system_prompt="be brief")
    history = [turn("one", "two"), turn("three", output="from elsewhere"), turn("four")]
    result = await bench.executor.execute(RecordingContext("five", {"six": 6}, history=history))
    sent = [(message["role"], message["content"]) for message in provider.requests[-1]["messages"]]
    assert sent == [
        ("system", "be brief"),
        ("user", "one"),
        ("user", "two"),
        ("user", "three"),
        ("assistant", "from elsewhere"),
        ("user", "four"),
        ("user", "five"),
        ("user", '{"six":6}'),
    ]
    assert [part["content"] for part in result.messages[0]["parts"] if part["part_kind"] == "user-prompt"] == [
        *("five", '{"six":6}'),
    ]


async def test_many_small_pieces_arrive_one_by_one(provider: FakeProvider) -> None:
    context = RecordingContext("[[deltas n=5000]]")
    result = await Bench(provider).executor.execute(context)
    assert result.output == reader_text(context) == "".join(f"{number} " for number in range(5000))
    assert context.kinds.count(Kind.TEXT_DELTA) == 5000


@pytest.mark.parametrize("piece", [1000, 0])
async def test_long_text_is_kept_whole_in_small_events(provider: FakeProvider, piece: int) -> None:
    context = RecordingContext(f"[[size n=200000 piece={piece}]]")
    result = await Bench(provider).executor.execute(context)
    assert len(result.output) == 200_000
    assert result.output == reader_text(context)
    assert max(len(encode_data(data)) for _, _, _, data in context.journal.events) <= EVENT_BYTES


async def test_every_script_and_emoji_survives_bytes_cut_apart(provider: FakeProvider) -> None:
    context = RecordingContext("[[languages]]")
    result = await Bench(provider).executor.execute(context)
    assert result.output == LANGUAGES == reader_text(context)


async def test_what_cannot_be_stored_is_replaced_alike_in_stream_output_and_history(provider: FakeProvider) -> None:
    """PG-05 for the model's words."""
    bench = Bench(provider)
    context = RecordingContext("[[broken]]")
    result = await bench.executor.execute(context)
    assert result.output == BROKEN_TEXT == reader_text(context)
    assert result.messages[-1]["parts"][0]["content"] == BROKEN_TEXT
    await bench.executor.execute(RecordingContext("next", history=[turn("x", messages=result.messages)]))


async def test_what_a_tool_returns_is_made_storable_and_the_run_goes_on(provider: FakeProvider) -> None:
    """PG-05 for the results of tools: text, keys and values of JSON, NaN and infinity."""
    bench = Bench(provider)

    @bench.agent.tool_plain
    def broken() -> dict[str, Any]:
        return {"nul\x00": "a\ud800b", "pair": "\ud83d\ude00", "literal": "\\u0000", "n": float("nan"), "i": [-float("inf")]}

    context = RecordingContext("[[tool broken {}]]", on=_killer("checkpointed", 2))
    with pytest.raises(Killed):
        await bench.executor.execute(context)
    later = context.next_attempt()
    result = await bench.executor.execute(later)
    mended = {"nul\ufffd": "a\ufffdb", "pair": "😀", "literal": "\\u0000", "n": "nan", "i": ["-inf"]}
    assert later.data(Kind.TOOL_RESULT)[0]["content"] == mended
    assert result.messages[2]["parts"][0]["content"] == mended
    assert "done:" in result.output


class Report(BaseModel):
    text: str


async def test_objects_that_a_tool_returns_become_json_files_stay_files(provider: FakeProvider) -> None:
    bench = Bench(provider)

    @bench.agent.tool_plain
    def report(bad: bool) -> Report:
        return Report.model_construct(text="\x00 \ud800" if bad else "fine")

    @bench.agent.tool_plain
    def picture() -> BinaryContent:
        return BinaryContent(b"\x89PNG", media_type="image/png")

    context = RecordingContext('[[tool report {"bad": false}]] [[tool report {"bad": true}]] [[tool picture {}]]')
    result = await bench.executor.execute(context)
    assert context.data(Kind.TOOL_RESULT)[0]["content"] == {"text": "fine"}
    assert "\ufffd" in str(context.data(Kind.TOOL_RESULT)[1]["content"])
    assert result.messages[6]["parts"][0]["content"]["kind"] == "binary"


async def test_a_huge_result_of_a_tool_is_cut_in_its_event_and_whole_in_the_history(provider: FakeProvider) -> None:
    bench = Bench(provider)

    @bench.agent.tool_plain
    def huge() -> str:
        return "ж" * 1_000_000

    context = RecordingContext("[[tool huge {}]]")
    result = await bench.executor.execute(context)
    shown = context.data(Kind.TOOL_RESULT)[0]["content"]
    assert shown.endswith("more characters]")
    assert len(encode_data(shown)) <= EVENT_BYTES
    assert result.messages[2]["parts"][0]["content"] == "ж" * 1_000_000


async def test_reasoning_is_an_item_of_its_own(provider: FakeProvider) -> None:
    context = RecordingContext("[[reasoning first I think]] [[say then I talk]]")
    result = await Bench(provider).executor.execute(context)
    assert result.output == "then I talk" == reader_text(context)
    assert [item["type"] for item in context.data(Kind.ITEM_ADDED)] == ["reasoning", "message"]
    assert context.data(Kind.REASONING_DONE) == [{"item": 0, "text": "first I think"}]


async def test_parallel_tool_calls_each_get_their_own_item_and_result(provider: FakeProvider) -> None:
    bench = Bench(provider)
    context = RecordingContext('[[tools add {"a": 1, "b": 1} | add {"a": 2, "b": 2} | shout {"text": "x"}]]')
    result = await bench.executor.execute(context)
    assert result.output == 'done: 2, 4, {"loud":"X!"}'
    results = {data["item"]: data["content"] for data in context.data(Kind.TOOL_RESULT)}
    assert results == {0: 2, 1: 4, 2: {"loud": "X!"}}
    assert sorted(data["item"] for data in context.data(Kind.ITEM_DONE)) == [0, 1, 2, 3]


async def test_a_tool_asked_wrongly_is_an_error_result_and_asked_again(provider: FakeProvider) -> None:
    context = RecordingContext('[[tool add {"a": "no"}]] [[tool add {"a": 1, "b": 2}]]')
    result = await Bench(provider).executor.execute(context)
    assert [data["is_error"] for data in context.data(Kind.TOOL_RESULT)] == [True, False]
    assert result.output.endswith(", 3")


async def test_a_tool_that_raises_fails_the_run_and_is_run_again_by_the_next_attempt(provider: FakeProvider) -> None:
    bench = Bench(provider)
    tries: list[int] = []

    @bench.agent.tool_plain
    async def flaky() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not today")
        return "fine"

    context = RecordingContext("[[tool flaky {}]]")
    with pytest.raises(ValueError, match="not today") as caught:
        await bench.executor.execute(context)
    assert (classify(caught.value).type, classify(caught.value).retryable) == ("agent_error", False)
    result = await bench.executor.execute(context.next_attempt())
    assert result.output == "done: fine"
    assert provider.counts["calls"] == 2


class Sum(BaseModel):
    total: int


async def test_structured_output_is_json_and_survives_a_crash_behind_its_tools(provider: FakeProvider) -> None:
    bench = Bench(provider, output_type=Sum)
    script = '[[tools final_result {"total": 5}]]'
    context = RecordingContext(script, on=_killer("checkpointed", 2))
    with pytest.raises(Killed):
        await bench.executor.execute(context)
    result: Result = await bench.executor.execute(context.next_attempt())
    assert result.output == {"total": 5}
    assert provider.counts["calls"] == 1
    assert [message["kind"] for message in result.messages] == ["request", "response", "request"]


async def test_limits_of_an_agent_count_over_all_attempts(provider: FakeProvider) -> None:
    bench = Bench(provider)
    context = RecordingContext(f"compute {TWO_STEPS}", on=_killer("checkpointed", 3))
    with pytest.raises(Killed):
        await bench.executor.execute(context)
    seen: list[int] = []

    @bench.agent.instructions
    def note(ctx: RunContext[Context]) -> str:
        seen.append(ctx.usage.requests)
        return "be brief"

    await bench.executor.execute(context.next_attempt())
    assert seen[0] == 2


async def test_a_call_that_never_went_out_costs_nothing(provider: FakeProvider) -> None:
    bench = Bench(provider)

    @bench.agent.instructions
    def broken() -> str:
        raise ValueError("no instructions today")

    context = RecordingContext("hello")
    with pytest.raises(ValueError, match="no instructions today"):
        await bench.executor.execute(context)
    assert (context.booked, provider.counts["calls"]) == ([], 0)


async def test_many_runs_of_one_executor_do_not_mix(provider: FakeProvider) -> None:
    bench = Bench(provider)
    contexts = [RecordingContext(f'[[tool add {{"a": {n}, "b": 0}}]]') for n in range(20)]
    results = await asyncio.gather(*(bench.executor.execute(context) for context in contexts))
    assert [result.output for result in results] == [f"done: {n}" for n in range(20)]
    assert [reader_text(context) for context in contexts] == [f"done: {n}" for n in range(20)]


async def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


class Door(FunctionModel):
    """A model whose client takes a while to open, and may fail to."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(stream_function=self._say, model_name="door")
        self.failures = failures
        self.entered = self.left = 0
        self.is_open = False

    async def _say(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        assert self.is_open
        yield "hello"

    async def __aenter__(self) -> "Door":
        await asyncio.sleep(0.3)
        self.entered += 1
        if self.entered <= self.failures:
            raise OSError("no route")
        self.is_open = True
        return self

    async def __aexit__(self, *args: Any) -> None:
        self.left += 1


async def test_runs_wait_for_the_providers_client_which_is_opened_once_and_closed_once() -> None:
    model = Door()
    executor = PydanticAIExecutor(Agent(model))
    await asyncio.gather(*(executor.execute(RecordingContext("hi")) for _ in range(3)))
    assert model.entered == 1
    await close(executor)
    assert model.left == 1


async def test_a_client_that_could_not_be_opened_is_opened_by_the_next_run() -> None:
    model = Door(failures=1)
    executor = PydanticAIExecutor(Agent(model))
    with pytest.raises(OSError, match="no route"):
        await executor.execute(RecordingContext("hi"))
    assert (await executor.execute(RecordingContext("hi"))).output == "hello"
    assert model.entered == 2
    await close(executor)


@pytest.mark.parametrize("count", [1.5, 10**25, -3, None, float("nan")], ids=str)
async def test_usage_that_makes_no_sense_is_estimated_and_spoils_no_history(count: Any) -> None:
    class Odd(FunctionModel):
        @asynccontextmanager
        async def request_stream(self, *args: Any, **options: Any) -> AsyncIterator[StreamedResponse]:
            async with super().request_stream(*args, **options) as stream:
                stream._usage = RequestUsage(input_tokens=count, output_tokens=count, details={"odd": count})
                yield stream

    async def say(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        yield "hello"

    executor = PydanticAIExecutor(Agent(Odd(stream_function=say)))
    context = RecordingContext("hi")
    result = await executor.execute(context)
    assert result.output == "hello"
    (usage,) = context.booked
    assert not usage.measured and usage == usage.counted()
    assert usage.input_tokens >= 1 and usage.output_tokens >= 1
    later = RecordingContext("and now?", history=[turn("hi", messages=result.messages, output="hello")])
    assert (await executor.execute(later)).output == "hello"
    assert (await executor.execute(context.next_attempt())).output == "hello"
