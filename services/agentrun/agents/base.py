"""What executes a run, seen from the worker: the protocol that every kind of agent fulfils, and the context it is given.

An executor must not know Postgres or Redis. Whatever it wants to be seen, stored or paid goes through its `Context`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from uuid import UUID

import msgspec

from agentrun.costs.usage import Usage as Usage
from agentrun.domain.events import Kind

if TYPE_CHECKING:
    from agentrun.agents.effects import Effect, EffectPolicy, Reconcile


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Which run is executed, for whom, and the how-manieth attempt this is (1, 2, 3…)."""

    id: UUID
    session_id: UUID
    agent: str
    user_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class UserInput:
    """One user message: text, or a JSON value if the client sent one."""

    id: UUID
    content: Any

    @property
    def text(self) -> str:
        """The message as text; a JSON value as its JSON."""
        return self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier run of the session: its inputs, and the new model messages of its result (empty if it failed or was cancelled)."""

    inputs: Sequence[UserInput]
    messages: Sequence[Mapping[str, Any]] = ()
    output: Any = None


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended well: its output (text or JSON), and its new model messages as JSON values, for the session's history."""

    output: Any
    messages: Sequence[Mapping[str, Any]] = field(default=())


class Context(Protocol):
    """The attempt, seen by the agent. Every method may wait: for room in the reserved numbers, or while the lease is in doubt."""

    run: RunInfo
    inputs: Sequence[UserInput]
    history: Sequence[Turn]
    state: Any
    """What the last checkpoint of this run saved, also by an earlier attempt; None if there is none."""

    @property
    def deadline(self) -> float:
        """`time.monotonic()` at which this attempt is stopped."""
        ...

    @property
    def cancelled(self) -> bool:
        """Whether the attempt has been asked to end."""
        ...

    async def emit(self, kind: Kind, data: Mapping[str, Any]) -> int:
        """Sends one event to the run's readers and log; returns its seq. Data is cleaned of what cannot be stored.

        Raises Fenced when the attempt no longer owns the run.
        """
        ...

    async def ready(self) -> None:
        """Waits while the lease is in doubt. To be called before a model call or anything else that costs or acts.

        Raises Fenced when the attempt no longer owns the run.
        """
        ...

    async def book(self, usage: Usage) -> None:
        """Books one finished model call, before its tools run: a ledger row and a `usage` event, durable with the next checkpoint.

        The row is kept before the first wait, so a cancellation that arrives here does not lose it.
        """
        ...

    def book_cut(self, usage: Usage) -> None:
        """Books a model call that was cut: a ledger row only, stored however the attempt ends. Never waits, so it fits in `except`."""
        ...

    async def checkpoint(self, state: Any) -> None:
        """Stores everything emitted so far together with `state` (a JSON value): the next attempt goes on from here.

        Raises Fenced when the attempt no longer owns the run.
        """
        ...

    def effect(
        self,
        name: str,
        *,
        key: str,
        policy: "EffectPolicy | str" = "fail",
        request: Any = None,
        reconcile: "Reconcile | None" = None,
    ) -> "Effect":
        """A call that changes the world, on record before it goes out: `async with ctx.effect("refund", key=order) as effect`, see
        `agents.effects`. `request` is a JSON value to compare; `reconcile` goes with the policy reconcile.
        """
        ...


@runtime_checkable
class Executor(Protocol):
    """Something that can execute runs: made once per worker process, used for many runs at a time.

    If it has an `async def aclose()`, that is called when the process has no runs any more, see `close`.
    """

    async def execute(self, context: Context) -> Result:
        """Executes the run. An exception fails or retries it, see `agents.failures`; cancellation must be let through."""
        ...


async def close(executor: Executor) -> None:
    """Lets go of what an executor holds, such as connections to a model's provider."""
    aclose = getattr(executor, "aclose", None)
    if aclose is not None:
        await aclose()
