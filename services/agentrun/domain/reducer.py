"""From a run's events to what a reader sees: its text, its items and its end.

Pure and small on purpose: clients copy it. The rules are those of docs/architecture.md, "Streaming": `restart {keep}` drops output with
a higher seq, `void` is nothing, `gap` replaces everything so far, a `_done` event replaces its deltas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrun.domain.events import GAP, TERMINAL, Kind


@dataclass
class Item:
    """One output item; every piece remembers its seq, so that a restart can take it back."""

    seq: int
    type: str
    call_id: str | None = None
    name: str | None = None
    pieces: list[tuple[int, str]] = field(default_factory=list)
    whole: tuple[int, str] | None = None
    result: tuple[int, Mapping[str, Any]] | None = None
    done: int | None = None

    @property
    def text(self) -> str:
        """The item's text: the whole one if it came, else its pieces."""
        return self.whole[1] if self.whole else "".join(text for _, text in self.pieces)

    def keep(self, top: int) -> None:
        """Forgets what came after seq `top`."""
        self.pieces = [piece for piece in self.pieces if piece[0] <= top]
        if self.whole and self.whole[0] > top:
            self.whole = None
        if self.result and self.result[0] > top:
            self.result = None
        if self.done is not None and self.done > top:
            self.done = None


@dataclass
class Transcript:
    """The state of the reducer. Feed events in the order of their seq; an event at or below `cursor` changes nothing."""

    cursor: int = -1
    items: dict[int, Item] = field(default_factory=dict)
    before: list[tuple[int, str]] = field(default_factory=list)  # parts of a gap: (through, text)
    restarts: int = 0
    end: Kind | None = None
    end_data: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """Everything that the agent said, in order."""
        spoken = (item for _, item in sorted(self.items.items()) if item.type == "message")
        return "".join(text for _, text in self.before) + "".join(item.text for item in spoken)

    @property
    def ended(self) -> bool:
        """Whether the terminal event has come."""
        return self.end is not None

    def feed(self, seq: int | None, kind: str, data: Mapping[str, Any]) -> None:
        """Takes one event. `seq` is None only for a gap."""
        if kind == GAP:
            self._gap(data["parts"])
            return
        if seq is None or seq <= self.cursor:
            return
        self.cursor = seq
        self._apply(seq, Kind(kind), data)

    def _gap(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self.items.clear()
        self.before = [(part["through"], part["text"]) for part in parts]
        self.cursor = max([self.cursor, *(through for through, _ in self.before)])

    def _apply(self, seq: int, kind: Kind, data: Mapping[str, Any]) -> None:
        if kind in TERMINAL:
            self.end, self.end_data = kind, data
        elif kind is Kind.RESTART:
            self.restarts += 1
            self._keep(data["keep"])
        elif kind is Kind.ITEM_ADDED:
            self.items[data["item"]] = Item(seq, data["type"], data.get("call_id"), data.get("name"))
        elif kind in (Kind.TEXT_DELTA, Kind.TOOL_ARGUMENTS_DELTA, Kind.REASONING_DELTA):
            self._item(seq, data, kind).pieces.append((seq, data["text"]))
        elif kind in (Kind.TEXT_DONE, Kind.REASONING_DONE):
            self._item(seq, data, kind).whole = (seq, data["text"])
        elif kind is Kind.TOOL_ARGUMENTS_DONE:
            self._item(seq, data, kind).whole = (seq, data["arguments"])
        elif kind is Kind.TOOL_RESULT:
            self._item(seq, data, kind).result = (seq, data)
        elif kind is Kind.ITEM_DONE:
            self._item(seq, data, kind).done = seq

    def _item(self, seq: int, data: Mapping[str, Any], kind: Kind) -> Item:
        """The event's item; after a gap its `item_added` may never have been seen."""
        if data["item"] not in self.items:
            guess = "message" if kind in (Kind.TEXT_DELTA, Kind.TEXT_DONE) else "tool_call"
            guess = "reasoning" if kind in (Kind.REASONING_DELTA, Kind.REASONING_DONE) else guess
            self.items[data["item"]] = Item(seq, guess)
        return self.items[data["item"]]

    def _keep(self, top: int) -> None:
        self.before = [part for part in self.before if part[0] <= top]
        self.items = {index: item for index, item in self.items.items() if item.seq <= top}
        for item in self.items.values():
            item.keep(top)
