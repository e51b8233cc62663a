"""Turns what an agent says and does into native events: numbers items and parts, keeps every event small, mends broken text.

It knows nothing of models or frameworks: drivers tell it "a piece of text", "a tool call started", "its result". Numbering is
restored from a checkpoint by `next_item` and `open_calls`, so that items of one run never share a number.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from agentrun.agents.base import Context
from agentrun.domain.events import Kind
from agentrun.domain.text import clean

EVENT_BYTES = 64 * 1024
"""What an event's data may weigh, roughly. Longer text goes on in another item; a tool's result is cut in its event, not in the
model's history; a tool call's arguments are JSON and stay whole."""

_ITEM_BYTES = EVENT_BYTES - 1024
_PIECE_CHARS = 8 * 1024  # at most 48 KiB: a character takes up to 6 bytes of JSON
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH = ("\ud800", "\udbff")


def mend(text: str) -> str:
    """`text` with surrogate pairs joined to the character they mean, and with what cannot be stored replaced visibly."""
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str(clean(text))


def mended(value: Any) -> Any:
    """The same for every string within JSON-like data; NaN and infinities become strings. Anything else is left alone."""
    if isinstance(value, str):
        return mend(value)
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mended(item) for item in value]
    return clean(value)


class _Mender:
    """Mends a text that comes in pieces: half a pair at the end of one waits for the next."""

    def __init__(self) -> None:
        self._waiting = ""

    def feed(self, piece: str) -> str:
        text = self._waiting + piece
        self._waiting = ""
        if text and _HIGH[0] <= text[-1] <= _HIGH[1]:
            text, self._waiting = text[:-1], text[-1]
        return mend(text)

    def flush(self) -> str:
        left, self._waiting = self._waiting, ""
        return mend(left)


class OutputWriter:
    """Writes one run's output. Items are numbered in the order in which they first have something to show."""

    def __init__(self, context: Context, *, next_item: int = 0, open_calls: Mapping[str, int] | None = None) -> None:
        self._context = context
        self.next_item = next_item
        self.open_calls: dict[str, int] = dict(open_calls or {})
        """Tool calls without a result yet: their items by call id. Belongs into a checkpoint, as `next_item` does."""

    def message(self) -> "TextItem":
        """A new message of the agent."""
        return TextItem(self, Kind.TEXT_DELTA)

    def reasoning(self) -> "TextItem":
        """A new piece of reasoning."""
        return TextItem(self, Kind.REASONING_DELTA)

    async def tool_call(self, call_id: str, name: str) -> "ToolCallItem":
        """A new tool call; it stays open until its result comes."""
        item = await self.add("tool_call", call_id=call_id, name=name)
        self.open_calls[call_id] = item
        return ToolCallItem(self, item)

    async def tool_result(self, call_id: str, name: str, content: Any, *, is_error: bool = False) -> None:
        """The result of a tool call, which closes the call's item. A call never announced gets an item here."""
        if call_id not in self.open_calls:
            await (await self.tool_call(call_id, name)).done("")
        item = self.open_calls.pop(call_id)
        data = {"item": item, "call_id": call_id, "name": name, "content": _shown(content), "is_error": is_error}
        await self.emit(Kind.TOOL_RESULT, data)
        await self.emit(Kind.ITEM_DONE, {"item": item})

    async def close_calls(self) -> None:
        """Closes tool calls that will get no result."""
        for call_id in list(self.open_calls):
            await self.emit(Kind.ITEM_DONE, {"item": self.open_calls.pop(call_id)})

    async def add(self, kind: str, **more: str) -> int:
        """Announces an item and returns its number."""
        item, self.next_item = self.next_item, self.next_item + 1
        await self.emit(Kind.ITEM_ADDED, {"item": item, "type": kind, **more})
        return item

    async def emit(self, kind: Kind, data: Mapping[str, Any]) -> None:
        """Sends one event."""
        await self._context.emit(kind, data)


class TextItem:
    """A message or reasoning that grows by pieces. Without a single character it is never announced."""

    def __init__(self, writer: OutputWriter, kind: Kind) -> None:
        self._writer = writer
        self._delta = kind
        self._is_message = kind is Kind.TEXT_DELTA
        self._mender = _Mender()
        self._item: int | None = None
        self._pieces: list[str] = []
        self._weight = 0
        self._closed: list[str] = []

    @property
    def told(self) -> str:
        """The whole text, also if it took several items."""
        return "".join([*self._closed, *self._pieces])

    async def piece(self, text: str) -> None:
        """Adds text."""
        await self._add(self._mender.feed(text))

    async def done(self) -> None:
        """Closes the item."""
        await self._add(self._mender.flush())
        await self._close()

    async def _add(self, text: str) -> None:
        for start in range(0, len(text), _PIECE_CHARS):
            await self._add_small(text[start : start + _PIECE_CHARS])

    async def _add_small(self, text: str) -> None:
        weight = len(msgspec.json.encode(text))
        if self._weight + weight > _ITEM_BYTES:
            await self._close()
        if self._item is None:
            self._item = await self._writer.add("message" if self._is_message else "reasoning")
            if self._is_message:
                await self._writer.emit(Kind.PART_ADDED, {"item": self._item, "part": 0})
        self._weight += weight
        self._pieces.append(text)
        await self._writer.emit(self._delta, {**self._place, "text": text})

    async def _close(self) -> None:
        if self._item is None:
            return
        done = Kind.TEXT_DONE if self._is_message else Kind.REASONING_DONE
        text = "".join(self._pieces)
        await self._writer.emit(done, {**self._place, "text": text})
        if self._is_message:
            await self._writer.emit(Kind.PART_DONE, self._place)
        await self._writer.emit(Kind.ITEM_DONE, {"item": self._item})
        self._closed.append(text)
        self._item, self._pieces, self._weight = None, [], 0

    @property
    def _place(self) -> dict[str, Any]:
        return {"item": self._item, "part": 0} if self._is_message else {"item": self._item}


class ToolCallItem:
    """A tool call whose arguments come by pieces."""

    def __init__(self, writer: OutputWriter, item: int) -> None:
        self._writer = writer
        self._item = item
        self._mender = _Mender()

    async def piece(self, text: str) -> None:
        """Adds a piece of the arguments' JSON."""
        text = self._mender.feed(text)
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            await self._writer.emit(Kind.TOOL_ARGUMENTS_DELTA, {"item": self._item, "text": piece})

    async def done(self, arguments: str) -> None:
        """The whole arguments, as the model wrote them."""
        await self._writer.emit(Kind.TOOL_ARGUMENTS_DONE, {"item": self._item, "arguments": mend(arguments)})


def _shown(content: Any) -> Any:
    """A tool's result as its event shows it: JSON data, or text cut at a visible mark if it is too long."""
    content = mended(content)
    encoded = msgspec.json.encode(content)
    if len(encoded) <= _ITEM_BYTES:
        return content
    text = content if isinstance(content, str) else encoded.decode()
    kept = _ITEM_BYTES // 6
    return f"{text[:kept]}… [{len(text) - kept} more characters]"
