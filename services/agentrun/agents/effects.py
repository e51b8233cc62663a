"""Effects: calls that change the world, such as a refund. On record before they go out, so that the next attempt does not repeat them
blindly.

    async def refund(ctx: Context, order: str) -> Any:
        async with ctx.effect("refund", key=order, policy=EffectPolicy.RETRY) as effect:
            if effect.due:
                effect.response = await payments.refund(order, idempotency_key=effect.id)
        return effect.response

The key is the author's: what makes this very call the same call, such as an order's number. Never a count of calls: a model plans anew.
`@effectful` does the same around a tool or any other function whose first parameter is the run's context.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from agentrun.agents.failures import AgentFailure
from agentrun.domain.text import clean

UNKNOWN = "effect_unknown"
KEY_REUSED = "effect_key_reused"
NAME_CHARACTERS = 255


class EffectPolicy(StrEnum):
    """What the next attempt does about a call of which only the beginning is on record.

    retry: makes it again with the same id; for calls that may be repeated, or whose other side drops repetitions of an id.
    reconcile: asks the other side whether it happened. fail: marks it unknown and fails the run, for a person to look at.
    """

    RETRY = "retry"
    RECONCILE = "reconcile"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconciliation's answer: the call went through, with this response."""

    response: Any = None


class NotHappened:
    """A reconciliation's answer: the call never arrived and never will, so that it may be made."""


class EffectFailed(AgentFailure):
    """Raised within an effect by whoever knows that nothing has happened, such as a refusal by the other side. It may be tried again."""

    def __init__(self, message: str, *, type: str = "effect_failed", retryable: bool = False) -> None:
        super().__init__(message, type=type, retryable=retryable)


class EffectUnknown(AgentFailure):
    """Nobody knows whether a call went through. Fails the run: a person has to look."""

    def __init__(self, message: str) -> None:
        super().__init__(message, type=UNKNOWN)


class Effect(Protocol):
    """One call, within `async with`. `due`: make it now, and set `response` to what came of it, a JSON value. Not `due`: it was made by an
    earlier attempt, or earlier in this one, and `response` is what came of it then.
    """

    id: str
    """The same for this call in all attempts and redrives: to be passed on as an idempotency key."""
    name: str
    key: str
    due: bool
    tries: int
    """How often the call may have gone out, this time included."""
    response: Any

    async def __aenter__(self) -> "Effect":
        """Puts the call on record. Raises EffectUnknown, AgentFailure if the key was used for another request, Fenced."""
        ...

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Without an error: done. With EffectFailed: failed. With any other: nobody knows, and the policy decides the next time."""
        ...


Reconcile = Callable[[Effect], Awaitable[Happened | NotHappened | None]]
"""Asks the other side about a call of which only the beginning is on record. None: it cannot tell, so the effect is unknown."""

_current: ContextVar[Effect] = ContextVar("effect")


def current_effect() -> Effect:
    """The effect in whose function this is called. Raises LookupError outside of one."""
    return _current.get()


def effectful(
    name: str,
    *,
    key: str | Callable[..., str],
    policy: EffectPolicy | str = EffectPolicy.FAIL,
    reconcile: Reconcile | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Makes a function an effect: it is called as its policy allows, and what it returned, a JSON value, is what it returns from then on.

    The function's first parameter is the run's `Context`, or a RunContext whose `deps` is that; it may be a tool of a pydantic-ai agent.
    `key` is the name of the parameter that makes the call the same call, or a function of all the others. The other arguments are on
    record as the request: the same key with other arguments is refused. Functions that are not async run in threads.
    """
    policy = EffectPolicy(policy)
    _check(name, policy, reconcile)

    def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters), None)
        if first is None or (isinstance(key, str) and key not in list(signature.parameters)[1:]):
            raise TypeError(f"{function.__name__}: an effect takes the run's context first, and its key {key!r} after it")

        @functools.wraps(function)
        async def effect(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            context = given.pop(first)
            value = given[key] if isinstance(key, str) else key(**given)
            context = getattr(context, "deps", context)
            async with context.effect(name, key=str(value), policy=policy, request=given, reconcile=reconcile) as made:
                if made.due:
                    token = _current.set(made)
                    try:
                        made.response = await _call(function, args, kwargs)
                    finally:
                        _current.reset(token)
            return made.response

        return effect

    return decorate


async def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _check(name: str, policy: EffectPolicy, reconcile: Reconcile | None) -> None:
    if (policy is EffectPolicy.RECONCILE) != (reconcile is not None):
        raise ValueError(f"effect {name}: the policy reconcile, and no other, needs a function `reconcile`")


def check_effect(name: str, key: str, policy: EffectPolicy, reconcile: Reconcile | None) -> None:
    """Raises ValueError unless an effect may be called so."""
    _check(name, policy, reconcile)
    for what, text in (("name", name), ("key", key)):
        if not 1 <= len(text) <= NAME_CHARACTERS or clean(text) != text:
            raise ValueError(
                f"effect: its {what} has 1 to {NAME_CHARACTERS} characters that can be stored, and is {text[:300]!r}"
            )
