"""Drives a pydantic-ai Agent node by node, so that a run can be watched, paid and resumed.

One node is one step: a model call, or the tools that its answer asked for. After each the run's own messages are checkpointed; the
next attempt goes on behind the last finished step:

    messages end with        the next attempt
    nothing                  starts from the run's inputs
    a model's answer         handles it: runs the tools that it asked for, or takes it as the output; no new call
    a request (tool results) sends it: no tool runs again
    and there is a result    returns it

The run's own messages are those saved and those stamped by this attempt; the history of earlier turns is never saved again.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    AgentRun,
    CallToolsNode,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelRequestNode,
    ModelResponse,
    ModelSettings,
    RequestUsage,
    RunUsage,
    TextPart,
    ThinkingPart,
    UserPromptPart,
)
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import ReinjectSystemPrompt
from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError
from pydantic_ai.messages import (
    BaseToolCallPart,
    BaseToolReturnPart,
    FunctionToolResultEvent,
    NativeToolReturnPart,
    OutputToolResultEvent,
    PartDeltaEvent,
    PartEndEvent,
    PartStartEvent,
    RetryFeedbackPart,
    TextPartDelta,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
    is_multi_modal_content,
    repair_messages,
)
from pydantic_ai.models import Model
from pydantic_core import to_jsonable_python
from pydantic_graph import End

from agentrun.agents.base import Context, Result, Turn, Usage
from agentrun.agents.output import OutputWriter, TextItem, ToolCallItem, mend, mended
from agentrun.costs.usage import whole

CHARACTERS_PER_TOKEN = 4
"""How tokens of a call are guessed if its usage never came."""

_FAILED = frozenset({"failed", "denied", "retried", "interrupted"})


class PydanticAIExecutor:
    """Executes runs with one Agent. Tools find the run's `Context` as `deps`; synchronous tools run in threads."""

    def __init__(self, agent: AbstractAgent[Any, Any], *, model_settings: Mapping[str, Any] | None = None) -> None:
        self.agent = agent
        self.model_settings = ModelSettings(**dict(model_settings)) if model_settings else None  # type: ignore[typeddict-item]
        self._held = AsyncExitStack()
        self._holds = False
        self._entering = asyncio.Lock()

    async def execute(self, context: Context) -> Result:
        """Executes the run, or what is left of it after its last checkpoint."""
        await self._hold_connections()
        return await _Attempt(self, context).run()

    async def aclose(self) -> None:
        """Closes the connections to the model's provider."""
        self._holds = False
        await self._held.aclose()

    async def _hold_connections(self) -> None:
        """Keeps the provider's connections open between runs; a model given by name makes and closes its own in each run."""
        if self._holds or not isinstance(self.agent.model, Model):
            return
        async with self._entering:
            if not self._holds:
                await self._held.enter_async_context(self.agent.model)
                self._holds = True


@dataclass
class _Progress:
    """What a checkpoint holds."""

    messages: list[ModelMessage] = field(default_factory=list)
    next_item: int = 0
    open_calls: dict[str, int] = field(default_factory=dict)
    has_result: bool = False
    output: Any = None

    @classmethod
    def load(cls, state: Any) -> "_Progress":
        if not state:
            return cls()
        messages = ModelMessagesTypeAdapter.validate_python(state["messages"])
        return cls(messages, state["next_item"], state["open_calls"], "output" in state, state.get("output"))

    def dump(self) -> dict[str, Any]:
        state = {"messages": _dump(self.messages), "next_item": self.next_item, "open_calls": self.open_calls}
        return {**state, "output": self.output} if self.has_result else state


class _Attempt:
    """One attempt at one run."""

    def __init__(self, executor: PydanticAIExecutor, context: Context) -> None:
        self._agent = executor.agent
        self._settings = executor.model_settings
        self._context = context
        self._saved = _Progress.load(context.state)
        self._writer = OutputWriter(context, next_item=self._saved.next_item, open_calls=self._saved.open_calls)
        self._stamp = f"{context.run.id}/{context.run.attempt}"

    async def run(self) -> Result:
        saved = self._saved
        if saved.has_result:
            return Result(saved.output, _dump(saved.messages))
        prompts = [] if saved.messages else [mend(entry.text) for entry in self._context.inputs]
        async with self._agent.iter(
            prompts[0] if prompts else None,
            message_history=[*_history(self._context.history), *saved.messages],
            run_id=self._stamp,
            conversation_id=str(self._context.run.session_id),
            deps=self._context,
            model_settings=self._settings,
            usage=_spent(saved.messages),
            capabilities=[ReinjectSystemPrompt()],
        ) as run:
            node = run.next_node
            while not isinstance(node, End):
                node = await self._step(run, node, prompts)
            await self._writer.close_calls()
            return Result(_output(node.data.output), _dump(self._own(run)))

    async def _step(self, run: AgentRun[Any, Any], node: Any, prompts: Sequence[str]) -> Any:
        if Agent.is_model_request_node(node):
            return await self._call_model(run, node)
        if Agent.is_call_tools_node(node):
            return await self._handle_answer(run, node)
        following = await run.next(node)
        if not isinstance(following, ModelRequestNode):
            return following
        if prompts:  # each input stays a message of its own, in order
            more = [UserPromptPart(prompt) for prompt in prompts[1:]]
            following.request.parts = [*following.request.parts, *more]
        elif self._saved.messages and isinstance(self._saved.messages[-1], ModelResponse):
            # With instructions but no tool calls, pydantic-ai would ask the model again; the answer is already here and paid.
            answer = run.all_messages()[-1]
            assert isinstance(answer, ModelResponse)
            return CallToolsNode(answer)
        return following

    async def _call_model(self, run: AgentRun[Any, Any], node: ModelRequestNode[Any, Any]) -> Any:
        await self._context.ready()
        before = {id(message) for message in run.all_messages()}
        parts = _Parts(self._writer)
        prompt = [*run.all_messages(), node.request]
        partial: ModelResponse | None = None
        whole = False
        try:
            async with node.stream(run.ctx) as stream:
                try:
                    async for event in stream:
                        await parts.feed(event)
                    whole = True
                finally:
                    partial = stream.response
            following = await run.next(node)
        except BaseException as error:
            if parts.received or _may_have_cost(error):
                partial = partial or _nothing_from(run)
                self._context.book_cut(_usage(run, partial, prompt=prompt, received=parts.received, cut=not whole))
            raise
        answers = [m for m in run.all_messages() if isinstance(m, ModelResponse) and id(m) not in before]
        unbooked = [_usage(run, answer, prompt=prompt, received=parts.received) for answer in answers]
        for answer in answers:
            _mend_response(answer)
        try:
            await parts.finish([part for answer in answers for part in answer.parts])
            while unbooked:
                await self._context.book(unbooked.pop())
        except BaseException:
            for usage in unbooked:
                self._context.book_cut(usage)
            raise
        await self._checkpoint(run, following)
        return following

    async def _handle_answer(self, run: AgentRun[Any, Any], node: CallToolsNode[Any, Any]) -> Any:
        acts = bool(node.model_response.tool_calls)
        if acts:
            await self._context.ready()
        async with node.stream(run.ctx) as stream:
            async for event in stream:
                if isinstance(event, FunctionToolResultEvent | OutputToolResultEvent):
                    await self._tool_result(event.part)
        following = await run.next(node)
        if isinstance(following, End):
            for message in run.all_messages():
                _mend_results(message)
        if acts or not isinstance(following, End):
            await self._checkpoint(run, following)
        return following

    async def _tool_result(self, part: BaseToolReturnPart[Any]) -> None:
        part.content = _plain(part.content)
        content = part.content if isinstance(part.content, str) else _jsonable(part.content)
        failed = part.outcome in _FAILED
        await self._writer.tool_result(part.tool_call_id, part.tool_name, content, is_error=failed)

    async def _checkpoint(self, run: AgentRun[Any, Any], following: Any) -> None:
        progress = _Progress(self._own(run), self._writer.next_item, self._writer.open_calls)
        if isinstance(following, ModelRequestNode):  # its request joins the history only when it is sent
            following.request.run_id = self._stamp
            following.request.conversation_id = following.request.conversation_id or str(self._context.run.session_id)
            _mend_results(following.request)
            progress.messages.append(following.request)
        elif isinstance(following, End):
            await self._writer.close_calls()
            progress.has_result, progress.output = True, _output(following.data.output)
        await self._context.checkpoint(progress.dump())

    def _own(self, run: AgentRun[Any, Any]) -> list[ModelMessage]:
        new = [message for message in run.all_messages() if message.run_id == self._stamp]
        return [*self._saved.messages, *new]


class _Parts:
    """The parts of one model answer while they stream.

    Parts of the same answer may be interleaved, so a piece for a text already closed opens a new item, and the arguments of tool
    calls are finished only with the answer.
    """

    def __init__(self, writer: OutputWriter) -> None:
        self._writer = writer
        self._texts: dict[int, TextItem] = {}
        self._calls: dict[int, ToolCallItem] = {}
        self.received = 0
        """Characters so far."""

    async def feed(self, event: Any) -> None:
        if isinstance(event, PartStartEvent):
            await self._start(event.index, event.part)
        elif isinstance(event, PartDeltaEvent):
            await self._delta(event.index, event.delta)
        elif isinstance(event, PartEndEvent) and event.index in self._texts:
            await self._texts.pop(event.index).done()

    async def finish(self, parts: Sequence[Any]) -> None:
        """Closes what is open. `parts` are the answer's."""
        for index in list(self._texts):
            await self._texts.pop(index).done()
        for index, call in self._calls.items():
            part = parts[index] if index < len(parts) else None
            await call.done(_written(part) if isinstance(part, BaseToolCallPart) else "")
        for part in parts:
            if isinstance(part, NativeToolReturnPart):
                await self._writer.tool_result(part.tool_call_id, part.tool_name, _jsonable(part.content))

    async def _start(self, index: int, part: Any) -> None:
        if index in self._texts:
            await self._texts.pop(index).done()
        if isinstance(part, TextPart | ThinkingPart):
            await self._text(index, part.content, reasoning=isinstance(part, ThinkingPart))
        elif isinstance(part, BaseToolCallPart) and index not in self._calls:
            self._calls[index] = await self._writer.tool_call(part.tool_call_id, part.tool_name)
            if part.args:
                await self._arguments(index, _written(part))

    async def _delta(self, index: int, delta: Any) -> None:
        if isinstance(delta, TextPartDelta):
            await self._text(index, delta.content_delta, reasoning=False)
        elif isinstance(delta, ThinkingPartDelta) and delta.content_delta:
            await self._text(index, delta.content_delta, reasoning=True)
        elif isinstance(delta, ToolCallPartDelta) and isinstance(delta.args_delta, str):
            await self._arguments(index, delta.args_delta)

    async def _text(self, index: int, piece: str, *, reasoning: bool) -> None:
        self.received += len(piece)
        if index not in self._texts:
            self._texts[index] = self._writer.reasoning() if reasoning else self._writer.message()
        await self._texts[index].piece(piece)

    async def _arguments(self, index: int, piece: str) -> None:
        self.received += len(piece)
        if index in self._calls:
            await self._calls[index].piece(piece)


def _written(part: BaseToolCallPart[Any]) -> str:
    """The arguments of a call as the model wrote them."""
    return part.args if isinstance(part.args, str) else part.args_as_json_str()


def _history(turns: Sequence[Turn]) -> list[ModelMessage]:
    """The session so far. A turn without model messages counts with its inputs, and with its output if it has one."""
    messages: list[ModelMessage] = []
    for turn in turns:
        if turn.messages:
            messages.extend(ModelMessagesTypeAdapter.validate_python(list(turn.messages)))
            continue
        messages.append(ModelRequest(parts=[UserPromptPart(mend(entry.text)) for entry in turn.inputs]))
        if turn.output is not None:
            text = turn.output if isinstance(turn.output, str) else msgspec.json.encode(_jsonable(turn.output)).decode()
            messages.append(ModelResponse(parts=[TextPart(text)]))
    return repair_messages(messages)


def _spent(messages: Iterable[ModelMessage]) -> RunUsage:
    """The usage of earlier attempts, so that an agent's usage limits hold over all of them."""
    usage = RunUsage()
    for message in messages:
        if isinstance(message, ModelResponse):
            usage.requests += 1
            usage.incr(message.usage)
    return usage


def _usage(
    run: AgentRun[Any, Any],
    answer: ModelResponse,
    *,
    prompt: Sequence[ModelMessage],
    received: int,
    cut: bool = False,
) -> Usage:
    """What a call used: as the provider reported it, else guessed from the characters that went out and came in."""
    reported = answer.usage
    usage = Usage(
        model=answer.model_name or run.ctx.deps.model.model_name,
        provider=answer.provider_name or run.ctx.deps.model.system,
        input_tokens=reported.input_tokens,
        cached_tokens=reported.cache_read_tokens,
        cache_write_tokens=reported.cache_write_tokens,
        output_tokens=reported.output_tokens,
        reasoning_tokens=reported.output_reasoning_tokens,
        audio_input_tokens=reported.input_audio_tokens,
        audio_output_tokens=reported.output_audio_tokens,
        measured=not cut and not reported.unmeasured_requests,
    ).counted()
    if usage.measured:
        return usage
    guess_in, guess_out = (-(-characters // CHARACTERS_PER_TOKEN) for characters in (_size(prompt), received))
    return replace(usage, input_tokens=usage.input_tokens or guess_in, output_tokens=max(usage.output_tokens, guess_out))


def _nothing_from(run: AgentRun[Any, Any]) -> ModelResponse:
    """The answer of a model that has not begun to speak."""
    model = run.ctx.deps.model
    return ModelResponse(parts=[], model_name=model.model_name, provider_name=model.system)


def _may_have_cost(error: BaseException) -> bool:
    """Whether the provider may have worked on a call that ended with `error` before its first word."""
    if isinstance(error, ModelHTTPError):
        return error.in_stream
    if isinstance(error, ModelConnectionError):
        return error.phase not in ("pool", "connect")
    # Any other error came up here, before the call went out; a cancellation is not an Exception.
    return isinstance(error, ModelAPIError | TimeoutError) or not isinstance(error, Exception)


def _size(messages: Iterable[ModelMessage]) -> int:
    """Characters of what is sent to the model, at least 1."""
    total = 1
    for message in messages:
        if isinstance(message, ModelRequest):
            total += len(message.instructions or "")
        for part in message.parts:
            content = _written(part) if isinstance(part, BaseToolCallPart) else getattr(part, "content", None)
            total += len(content) if isinstance(content, str) else len(str(content or ""))
    return total


def _mend_response(message: ModelResponse) -> None:
    """Makes an answer storable, in place: it is part of the run's history."""
    _mend_usage(message.usage)
    for part in message.parts:
        if isinstance(part, TextPart | ThinkingPart):
            part.content = mend(part.content)
        elif isinstance(part, ToolCallPart) and part.args:
            part.args = mended(part.args)


def _mend_usage(usage: RequestUsage) -> None:
    """Figures that are none would keep the history from being read again."""
    for one in fields(usage):
        if one.name.endswith(("_tokens", "_requests")):
            setattr(usage, one.name, whole(getattr(usage, one.name)))
    if not isinstance(usage.audio_seconds, int | float) or not math.isfinite(usage.audio_seconds):
        usage.audio_seconds = 0
    usage.details = {str(name): whole(count) for name, count in (usage.details or {}).items()}


def _mend_results(message: ModelMessage) -> None:
    """Makes the results of tools storable, in place."""
    for part in message.parts if isinstance(message, ModelRequest) else ():
        if isinstance(part, BaseToolReturnPart | RetryFeedbackPart):
            part.content = _plain(part.content)


def _dump(messages: Sequence[ModelMessage]) -> list[dict[str, Any]]:
    dumped: list[dict[str, Any]] = mended(ModelMessagesTypeAdapter.dump_python(list(messages), mode="json"))
    return dumped


def _output(value: Any) -> Any:
    return mend(value) if isinstance(value, str) else _jsonable(value)


def _plain(content: Any) -> Any:
    """A tool's result as history keeps it: files as they are, other objects as the JSON that the model is sent anyway."""
    if is_multi_modal_content(content) or not (isinstance(content, BaseModel) or is_dataclass(content)):
        return mended(content)
    return _jsonable(content)


def _jsonable(value: Any) -> Any:
    """A JSON value of whatever a tool or an output is; what has none becomes its text."""
    try:
        return mended(to_jsonable_python(mended(value), fallback=str))
    except ValueError:
        return mend(str(value))
