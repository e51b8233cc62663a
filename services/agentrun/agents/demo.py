"""Models that need no network, no key and no money, for trying things out: `demo:chat`, `demo:echo`, `demo:tools`, `demo:slow`.

They are deterministic, say that they are demos, and run under the same driver as real models. `modelSettings`: `words` (how many
words `demo:slow` says, default 60) and `delay_ms` (pause before each word; default 15, for `demo:slow` 100).

Usage, by rule: one token per word (a run of letters and digits, or another sign) of everything sent, and of everything answered. The
price is pretended, see `costs.pricing.DEMO_RATES`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic_ai import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    RequestUsage,
    RunContext,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters, StreamedResponse
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.tools import ToolDefinition

Answer = AsyncIterator[str | dict[int, DeltaToolCall]]

SETTINGS = frozenset({"words", "delay_ms"})
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"\S+\s*")


class DemoModel(FunctionModel):
    """A scripted model; see the module for what each name does."""

    def __init__(self, name: str) -> None:
        super().__init__(stream_function=_ANSWERS[name], model_name=f"demo:{name}")

    @property
    def system(self) -> str:
        """The provider, as the ledger names it."""
        return "demo"

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        """Streams the answer, with the prompt's tokens counted by the module's rule."""
        async with super().request_stream(messages, model_settings, model_request_parameters, run_context) as stream:
            stream._usage = RequestUsage(input_tokens=_tokens(messages))
            yield stream


def word_count(text: str) -> int:
    """Counts the words of a text. `demo:tools` calls it if its agent has no tools of its own."""
    return len(text.split())


async def _chat(messages: list[ModelMessage], info: AgentInfo) -> Answer:
    asked = _asked(messages)
    turn = f"This is message {len(asked)} of our conversation."
    if len(asked) > 1:
        turn += f' The first one was: "{asked[0]}".'
    async for word in _spoken(f'You said: "{_latest(messages)}". {turn} {_LABEL}', info):
        yield word


async def _echo(messages: list[ModelMessage], info: AgentInfo) -> Answer:
    async for word in _spoken(f"You said: {_latest(messages)} {_LABEL}", info):
        yield word


async def _slow(messages: list[ModelMessage], info: AgentInfo) -> Answer:
    words = max(1, int(_setting(info, "words", 60)))
    counted = " ".join(f"word {number}" if number % 10 == 0 else "tick" for number in range(1, words + 1))
    async for word in _spoken(f"{_LABEL} {counted}", info, delay_ms=100):
        yield word


async def _tools(messages: list[ModelMessage], info: AgentInfo) -> Answer:
    last = messages[-1]
    results = [part for part in last.parts if isinstance(part, ToolReturnPart)]
    if results or not info.function_tools:
        told = "; ".join(f"{part.tool_name} said {part.model_response_str()}" for part in results) or "there are no tools"
        async for word in _spoken(f"I looked it up: {told}. {_LABEL}", info):
            yield word
        return
    earlier = sum(isinstance(part, ToolCallPart) for message in messages for part in message.parts)
    for number, tool in enumerate(info.function_tools):
        arguments = json.dumps(_arguments(tool, _latest(messages)))
        call_id = f"demo-call-{earlier + number + 1}"
        yield {number: DeltaToolCall(name=tool.name, json_args="", tool_call_id=call_id)}
        for start in range(0, len(arguments), 8):
            await _pause(info, 15)
            yield {number: DeltaToolCall(json_args=arguments[start : start + 8])}


_LABEL = "(I am a demo model: I work offline and understand nothing.)"
_ANSWERS = {"chat": _chat, "echo": _echo, "slow": _slow, "tools": _tools}
NAMES = tuple(sorted(_ANSWERS))


async def _spoken(text: str, info: AgentInfo, *, delay_ms: float = 15) -> AsyncIterator[str]:
    for word in _WORD.findall(text):
        await _pause(info, delay_ms)
        yield word


async def _pause(info: AgentInfo, delay_ms: float) -> None:
    await asyncio.sleep(max(0.0, float(_setting(info, "delay_ms", delay_ms))) / 1000)


def _setting(info: AgentInfo, name: str, default: float) -> float:
    settings: Mapping[str, Any] = info.model_settings or {}
    value: float = settings.get(name, default)
    return value


def _asked(messages: Sequence[ModelMessage]) -> list[str]:
    """Every user message of the conversation, in order."""
    requests = (message for message in messages if isinstance(message, ModelRequest))
    parts = (part for request in requests for part in request.parts if isinstance(part, UserPromptPart))
    return [part.content if isinstance(part.content, str) else "" for part in parts]


def _latest(messages: Sequence[ModelMessage]) -> str:
    """The user messages since the last answer in words, joined."""
    recent: list[str] = []
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            if recent or not any(isinstance(part, ToolCallPart) for part in message.parts):
                break
            continue
        recent = [*_asked([message]), *recent]
    return " ".join(recent)


def _arguments(tool: ToolDefinition, text: str) -> dict[str, Any]:
    """Arguments that fit the tool's schema: numbers found in the message, else the message itself."""
    schema = tool.parameters_json_schema
    numbers = iter(re.findall(r"\d+", text))
    return {
        name: _value(field, text, numbers)
        for name, field in schema.get("properties", {}).items()
        if name in schema.get("required", [])
    }


def _value(field: Mapping[str, Any], text: str, numbers: Any) -> Any:
    if "enum" in field:
        return field["enum"][0]
    kind = field.get("type")
    if kind in ("integer", "number"):
        return int(next(numbers, "1"))
    return {"boolean": True, "array": [], "object": {}}.get(str(kind), text)


def _tokens(messages: Sequence[ModelMessage]) -> int:
    total = 0
    for message in messages:
        total += len(_TOKEN.findall(getattr(message, "instructions", None) or ""))
        for part in message.parts:
            content = part.args_as_json_str() if isinstance(part, ToolCallPart) else getattr(part, "content", "")
            total += len(_TOKEN.findall(content if isinstance(content, str) else str(content)))
    return total
