"""Executes a run with a plain async function: `async def run(ctx)` that yields text or events, or returns its output.

    async def run(ctx: Context) -> AsyncIterator[str]:
        done = ctx.state or 0
        for number in range(done, 10):
            yield f"{number} "
            await ctx.checkpoint(number + 1)

Yielded text makes up messages, and all of it is the output. `yield (Kind.ITEM_ADDED, {...})` sends an event as it is; kinds that
belong to the run itself are refused. After a checkpoint a later attempt goes on with its `state`; without one the run starts over.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from agentrun.agents.base import Context, Result, Usage
from agentrun.agents.effects import Effect, EffectPolicy, Reconcile
from agentrun.agents.failures import AgentFailure
from agentrun.agents.output import OutputWriter, TextItem, mended
from agentrun.domain.events import TERMINAL, Kind

RunFunction = Callable[[Context], AsyncIterator[Any] | Coroutine[Any, Any, Any]]

_RESERVED = TERMINAL | {Kind.CREATED, Kind.STARTED, Kind.RESTART, Kind.VOID, Kind.USAGE}


def is_run_function(value: object) -> bool:
    """Whether `value` is an async generator function or a coroutine function of one argument."""
    if not (inspect.isasyncgenfunction(value) or inspect.iscoroutinefunction(value)):
        return False
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    return True


class GeneratorExecutor:
    """Executes runs with one function."""

    def __init__(self, function: RunFunction) -> None:
        self.function = function

    async def execute(self, context: Context) -> Result:
        """Executes the run from the start, or from the state of its last checkpoint."""
        own = _OwnContext(context)
        made = self.function(own)
        if isinstance(made, AsyncIterator):
            async with aclosing(made) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    await own.take(piece)
            await own.close()
            return Result(own.text)
        output = await made
        if isinstance(output, str):
            await own.take(output)
            await own.close()
            return Result(own.text)
        await own.close()
        return Result(own.text if output is None else mended(output))


class _OwnContext:
    """The context that the function sees: its state is its own; item numbers and text so far are saved beside it."""

    def __init__(self, inner: Context) -> None:
        self._inner = inner
        self.run = inner.run
        self.inputs = inner.inputs
        self.history = inner.history
        saved: Mapping[str, Any] = inner.state or {}
        self.state: Any = saved.get("state")
        self._told: list[str] = [saved["text"]] if "text" in saved else []
        self._writer = OutputWriter(inner, next_item=saved.get("next_item", 0))
        self._message: TextItem | None = None

    @property
    def deadline(self) -> float:
        return self._inner.deadline

    @property
    def cancelled(self) -> bool:
        return self._inner.cancelled

    @property
    def text(self) -> str:
        return "".join(self._told)

    async def take(self, piece: Any) -> None:
        """One thing that the function yielded."""
        if isinstance(piece, str):
            if self._message is None:
                self._message = self._writer.message()
            await self._message.piece(piece)
        elif isinstance(piece, tuple) and len(piece) == 2 and isinstance(piece[1], Mapping):
            await self.emit(Kind(piece[0]), piece[1])
        else:
            raise AgentFailure(f"run(ctx) yielded {type(piece).__name__}; yield str, or a pair of Kind and its data")

    async def close(self) -> None:
        """Ends the message that is open."""
        if self._message is not None:
            message, self._message = self._message, None
            await message.done()
            self._told.append(message.told)

    async def emit(self, kind: Kind, data: Mapping[str, Any]) -> int:
        if kind in _RESERVED:
            raise AgentFailure(f"run(ctx) sent the event {kind}, which only the run itself sends; remove it")
        await self.close()
        if isinstance(item := data.get("item"), int):
            self._writer.next_item = max(self._writer.next_item, item + 1)
        return await self._inner.emit(kind, data)

    async def ready(self) -> None:
        await self._inner.ready()

    async def book(self, usage: Usage) -> None:
        await self._inner.book(usage)

    def book_cut(self, usage: Usage) -> None:
        self._inner.book_cut(usage)

    async def checkpoint(self, state: Any) -> None:
        await self.close()
        await self._inner.checkpoint({"state": state, "next_item": self._writer.next_item, "text": self.text})

    def effect(
        self,
        name: str,
        *,
        key: str,
        policy: EffectPolicy | str = EffectPolicy.FAIL,
        request: Any = None,
        reconcile: Reconcile | None = None,
    ) -> Effect:
        return self._inner.effect(name, key=key, policy=policy, request=request, reconcile=reconcile)
