"""What stands for a run's events where they are not sent one by one: its text in parts, for the event `gap`.

A reader puts the parts in the place of everything so far and goes on after the last one. So a gap ends where no message is open: a
`text_done` after it would bring the first half of its message a second time. And one part ends at the last checkpoint, so that a later
`restart {keep}`, which goes back to it, can take back exactly what came after. Pure.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentrun.domain.events import TERMINAL, Event, Kind
from agentrun.domain.reducer import Transcript

OUTLINE = (Kind.ITEM_ADDED, Kind.TEXT_DELTA, Kind.TEXT_DONE, Kind.ITEM_DONE, Kind.RESTART, *sorted(TERMINAL))
"""The kinds that say where messages begin and end."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of these kinds, without its text: `item` (as JSON text) and `type` of output, `keep` of a restart."""

    seq: int
    kind: Kind
    item: str | None = None
    type: str | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Which events are folded: up to `through`, in two parts if `split` is given. `loose`: items whose text is in their deltas alone."""

    through: int
    split: int | None
    loose: frozenset[str]


@dataclass(frozen=True, slots=True)
class Part:
    """The text of the events after the part before, up to `through`."""

    through: int
    text: str


def fold(marks: Sequence[Mark], *, checkpoint: int) -> Fold | None:
    """What can be folded of a log with these marks, in their order; None: nothing. `checkpoint` is its seq, -1 if there is none."""
    if not marks:
        return None
    if marks[-1].kind in TERMINAL:
        through: int | None = marks[-1].seq - 1
        split = None
    else:
        through, at_checkpoint = _quiet(marks, checkpoint)
        if through is not None and checkpoint < through and not at_checkpoint:
            through, _ = _quiet([mark for mark in marks if mark.seq <= checkpoint], checkpoint)
        split = checkpoint if through is not None and 0 <= checkpoint < through else None
    if through is None or through < 0:
        return None
    return Fold(through, split, _loose([mark for mark in marks if mark.seq <= through]))


def parts_of(wanted: Fold, events: Sequence[Event]) -> list[Part] | None:
    """The parts, from the events up to `through` that carry text, and restarts; None if they cannot be told apart."""
    transcript = Transcript()
    first: str | None = None
    for event in events:
        if first is None and wanted.split is not None and event.seq > wanted.split:
            first = transcript.text
        with contextlib.suppress(KeyError, TypeError, ValueError):  # what an agent made up says nothing
            transcript.feed(event.seq, event.kind, msgspec.json.decode(event.data))
    whole = transcript.text
    if wanted.split is None:
        return [Part(wanted.through, whole)]
    first = whole if first is None else first
    return [Part(wanted.split, first), Part(wanted.through, whole[len(first) :])] if whole.startswith(first) else None


def _quiet(marks: Sequence[Mark], checkpoint: int) -> tuple[int | None, bool]:
    """The last event after which no message was open, and whether none was open at the checkpoint."""
    opened: dict[str, int] = {}
    quiet: int | None = None
    at_checkpoint = True
    for mark in marks:
        if mark.kind is Kind.RESTART and mark.keep is not None:
            opened = {item: since for item, since in opened.items() if since <= mark.keep}
        elif mark.item is not None:
            if mark.kind is Kind.TEXT_DELTA or (mark.kind is Kind.ITEM_ADDED and mark.type == "message"):
                opened.setdefault(mark.item, mark.seq)
            elif mark.kind in (Kind.TEXT_DONE, Kind.ITEM_DONE):
                opened.pop(mark.item, None)
        if not opened:
            quiet = mark.seq
        if mark.seq <= checkpoint:
            at_checkpoint = not opened
    return quiet, at_checkpoint


def _loose(marks: Sequence[Mark]) -> frozenset[str]:
    """Items with deltas that count and no whole text after them that does."""
    spoken: dict[str, tuple[list[int], list[int]]] = {}
    for mark in marks:
        if mark.kind is Kind.RESTART and mark.keep is not None:
            for deltas, wholes in spoken.values():
                deltas[:] = [seq for seq in deltas if seq <= mark.keep]
                wholes[:] = [seq for seq in wholes if seq <= mark.keep]
        elif mark.item is not None and mark.kind in (Kind.TEXT_DELTA, Kind.TEXT_DONE):
            deltas, wholes = spoken.setdefault(mark.item, ([], []))
            (deltas if mark.kind is Kind.TEXT_DELTA else wholes).append(mark.seq)
    return frozenset(item for item, (deltas, wholes) in spoken.items() if deltas and not wholes)
