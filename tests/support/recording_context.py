"""A Context in memory: what an executor sends, books and saves, in the order in which it does, and attempts after a crash.

It stores what the worker would store: events as cleaned JSON with numbers without a hole, the checkpoint's state through JSON.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import msgspec

from agentrun.agents.base import RunInfo, Turn, Usage, UserInput
from agentrun.agents.effects import EffectPolicy
from agentrun.domain.errors import Fenced
from agentrun.domain.events import Kind, encode_data
from agentrun.domain.reducer import Transcript
from agentrun.domain.text import clean
from agentrun.store.effects import Begin, Begun, EffectState, Settle, Settled
from agentrun.worker.effects import Effects


class Killed(BaseException):
    """The process died here."""


@dataclass
class Journal:
    """What outlives an attempt: the log, the ledger, the checkpoint."""

    events: list[tuple[int, int, Kind, Any]] = field(default_factory=list)  # seq, epoch, kind, data
    ledger: list[tuple[int, Usage]] = field(default_factory=list)  # epoch, usage
    checkpoints: list[Any] = field(default_factory=list)
    checkpoint_seq: int = -1
    effects: dict[tuple[str, str], tuple[EffectState, str | None, str | None, int]] = field(default_factory=dict)
    """By name and key: state, request, response, tries."""

    @property
    def transcript(self) -> Transcript:
        """What a reader of the whole log sees."""
        seen = Transcript()
        for seq, _, kind, data in self.events:
            seen.feed(seq, kind, data)
        return seen


class RecordingContext:
    """One attempt. `on` is called with each act's name before it happens, and may raise."""

    def __init__(
        self,
        *inputs: Any,
        history: Sequence[Turn] = (),
        journal: Journal | None = None,
        run: RunInfo | None = None,
        on: Callable[[str], None] | None = None,
    ) -> None:
        self.run = run or RunInfo(id=uuid4(), session_id=uuid4(), agent="test/agent", user_id="user", attempt=1)
        self.inputs: Sequence[UserInput] = [UserInput(id=uuid4(), content=content) for content in inputs]
        self.history: Sequence[Turn] = history
        self.journal = journal or Journal()
        self.state: Any = _through_json(self.journal.checkpoints[-1]) if self.journal.checkpoints else None
        self.acts: list[str] = []
        self.fenced = False
        self._on = on or (lambda act: None)
        self._effects = Effects(self.run, self, self.ready)  # type: ignore[arg-type]

    @property
    def deadline(self) -> float:
        return time.monotonic() + 60

    @property
    def cancelled(self) -> bool:
        return False

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of all events, of earlier attempts too."""
        return [kind for _, _, kind, _ in self.journal.events]

    def data(self, kind: Kind) -> list[Any]:
        """The data of all events of one kind."""
        return [data for _, _, found, data in self.journal.events if found is kind]

    @property
    def booked(self) -> list[Usage]:
        """The ledger of all attempts."""
        return [usage for _, usage in self.journal.ledger]

    def next_attempt(self, on: Callable[[str], None] | None = None) -> "RecordingContext":
        """The attempt after this one: goes on from the last checkpoint, and tells readers to drop what came after it."""
        run = RunInfo(self.run.id, self.run.session_id, self.run.agent, self.run.user_id, self.run.attempt + 1)
        later = RecordingContext(history=self.history, journal=self.journal, run=run, on=on)
        later.inputs = self.inputs
        later._add(Kind.RESTART, {"keep": self.journal.checkpoint_seq})
        return later

    async def emit(self, kind: Kind, data: Mapping[str, Any]) -> int:
        self._act(f"emit {kind}")
        return self._add(kind, data)

    async def ready(self) -> None:
        self._act("ready")

    async def book(self, usage: Usage) -> None:
        self._on("book")
        self.journal.ledger.append((self.run.attempt, usage))
        self._act("book", told=True)
        self._add(Kind.USAGE, {"call": len(self.journal.ledger), "model": usage.model, "unmeasured": not usage.measured})

    def book_cut(self, usage: Usage) -> None:
        self.acts.append("book_cut")
        self.journal.ledger.append((self.run.attempt, usage))

    async def checkpoint(self, state: Any) -> None:
        self._act("checkpoint")
        self.journal.checkpoints.append(_through_json(state))
        self.journal.checkpoint_seq = len(self.journal.events) - 1
        self._on("checkpointed")

    def effect(self, name: str, *, key: str, policy: Any = "fail", request: Any = None, reconcile: Any = None) -> Any:
        return self._effects.one(name, key, EffectPolicy(policy), request, reconcile)

    async def begin_effect(self, item: Begin) -> Begun:
        """What Postgres does, for one attempt at a time."""
        self._act(f"begin {item.name}")
        found = self.journal.effects.get((item.name, item.key))
        mine = found is None or found[0] is EffectState.FAILED or (found[0] is EffectState.INITIATED and item.again)
        if mine:
            tries = found[3] + 1 if found else 1
            found = self.journal.effects[item.name, item.key] = (EffectState.INITIATED, item.request, None, tries)
        assert found is not None
        state, asked, response, tries = found
        return Begun(True, mine, self.run.id, state, tries, asked, response)

    async def settle_effect(self, item: Settle) -> Settled:
        self._act(f"settle {item.name} {item.state}")
        found = self.journal.effects[item.name, item.key]
        self.journal.effects[item.name, item.key] = (item.state, found[1], item.response, found[3])
        return Settled(held=True, ok=True)

    def _act(self, name: str, *, told: bool = False) -> None:
        if not told:
            self._on(name)
        if self.fenced:
            raise Fenced("somebody else has the run")
        self.acts.append(name)

    def _add(self, kind: Kind, data: Mapping[str, Any]) -> int:
        seq = len(self.journal.events)
        self.journal.events.append((seq, self.run.attempt, kind, msgspec.json.decode(encode_data(clean(dict(data))))))
        return seq


def turn(*texts: str, messages: Sequence[Mapping[str, Any]] = (), output: Any = None) -> Turn:
    """An earlier turn."""
    return Turn([UserInput(id=UUID(int=number), content=text) for number, text in enumerate(texts)], messages, output)


def _through_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
