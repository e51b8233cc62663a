"""The events of a run: their kinds and the shape of each kind's data.

An event is `{"seq", "epoch", "kind", "data"}`. `seq` counts 0, 1, 2… within the run without a hole; `epoch` is the number of the
attempt that wrote it. Kinds are fine-grained so that each becomes at most one event of the OpenAI Responses surface and `seq` can
serve as its `sequence_number`.

Data by kind (`item` is the index of an output item in the run, `part` the index of a part in that item):

    created              {run_id, session_id, agent}
    started              {attempt}
    item_added           {item, type: message | tool_call | reasoning, call_id?, name?}
    part_added           {item, part}
    text_delta           {item, part, text}
    text_done            {item, part, text}                  the whole text
    part_done            {item, part}
    tool_arguments_delta {item, text}
    tool_arguments_done  {item, arguments}                   the whole text, JSON as the model wrote it
    tool_result          {item, call_id, name, content, is_error}   item is the tool call's
    reasoning_delta      {item, text}
    reasoning_done       {item, text}                        the whole text
    item_done            {item}
    usage                {call, model, input_tokens, cached_tokens, cache_write_tokens, output_tokens, reasoning_tokens,
                          audio_input_tokens, audio_output_tokens, cost_usd: text | null, unmeasured}
    restart              {keep}                              drop all output with a seq above `keep`; -1: all of it
    void                 {}                                  a reserved number that was never stored
    completed            {output}
    failed               {error: {type, message}}
    cancelled            {}
    superseded           {by}

Sent to clients but never stored, without a seq: `gap {parts: [{through, text}]}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec


class Kind(StrEnum):
    """What an event says; see the module's table for the data of each."""

    CREATED = "created"
    STARTED = "started"
    ITEM_ADDED = "item_added"
    PART_ADDED = "part_added"
    TEXT_DELTA = "text_delta"
    TEXT_DONE = "text_done"
    PART_DONE = "part_done"
    TOOL_ARGUMENTS_DELTA = "tool_arguments_delta"
    TOOL_ARGUMENTS_DONE = "tool_arguments_done"
    TOOL_RESULT = "tool_result"
    REASONING_DELTA = "reasoning_delta"
    REASONING_DONE = "reasoning_done"
    ITEM_DONE = "item_done"
    USAGE = "usage"
    RESTART = "restart"
    VOID = "void"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


TERMINAL = frozenset({Kind.COMPLETED, Kind.FAILED, Kind.CANCELLED, Kind.SUPERSEDED})
GAP = "gap"


_TEXT_OF_ITEM: dict[str, type] = {"item": int, "text": str}
_MEMBERS: dict[Kind, dict[str, type]] = {
    Kind.ITEM_ADDED: {"item": int, "type": str},
    Kind.PART_ADDED: {"item": int},
    Kind.TEXT_DELTA: _TEXT_OF_ITEM,
    Kind.TEXT_DONE: _TEXT_OF_ITEM,
    Kind.PART_DONE: {"item": int},
    Kind.TOOL_ARGUMENTS_DELTA: _TEXT_OF_ITEM,
    Kind.TOOL_ARGUMENTS_DONE: {"item": int, "arguments": str},
    Kind.TOOL_RESULT: {"item": int},
    Kind.REASONING_DELTA: _TEXT_OF_ITEM,
    Kind.REASONING_DONE: _TEXT_OF_ITEM,
    Kind.ITEM_DONE: {"item": int},
}
"""What readers cannot do without."""
MOST_ITEMS = 1_000_000
ITEM_TYPES = ("message", "tool_call", "reasoning")


def flaw(kind: Kind, data: Mapping[str, Any]) -> str | None:
    """What a reader would stumble over in an agent's own event; None if it can be sent."""
    for name, wanted in _MEMBERS.get(kind, {}).items():
        if type(data.get(name)) is not wanted:
            return f"`{name}` is missing or no {'number' if wanted is int else 'text'}"
    if "item" in data and not (isinstance(data["item"], int) and 0 <= data["item"] < MOST_ITEMS):
        return f"`item` is a number from 0 to {MOST_ITEMS - 1}"
    if kind is Kind.ITEM_ADDED and data["type"] not in ITEM_TYPES:
        return f"`type` is one of {', '.join(ITEM_TYPES)}"
    return None


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `data` is its JSON text, encoded once by whoever made it, and stays byte-identical from there to the client."""

    seq: int
    epoch: int
    kind: Kind
    data: bytes

    def encode(self) -> bytes:
        """The event's JSON, one line: what travels on the bus and in the `data:` line of a frame."""
        return b'{"seq":%d,"epoch":%d,"kind":"%s","data":%s}' % (self.seq, self.epoch, self.kind.encode(), self.data)


class _Wire(msgspec.Struct):
    seq: int
    epoch: int
    kind: str
    data: msgspec.Raw


_decoder = msgspec.json.Decoder(_Wire)
_encoder = msgspec.json.Encoder()


def decode(encoded: bytes) -> Event:
    """Reads what `Event.encode` wrote. Raises msgspec.DecodeError or ValueError for anything else."""
    wire = _decoder.decode(encoded)
    return Event(wire.seq, wire.epoch, Kind(wire.kind), bytes(wire.data))


def encode_data(data: object) -> bytes:
    """JSON of an event's data, without line breaks and safe for Postgres: see `domain.text.clean`."""
    return _encoder.encode(data)
