"""Waiting on a condition with a deadline: the only way in which tests wait."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(condition: Callable[[], Awaitable[T]], *, within: float, what: str) -> T: ...


@overload
async def eventually(condition: Callable[[], T], *, within: float, what: str) -> T: ...


async def eventually(condition: Callable[[], Any], *, within: float, what: str) -> Any:
    """Polls condition until it is truthy and returns its value; an exception counts as not yet.

    Fails after `within` seconds with `what` and the last value or exception. An async condition is cancelled then.
    """
    deadline = time.monotonic() + within
    pause = 0.005
    last = "the condition never returned"
    while True:
        try:
            # The condition itself may hang: it is cut by the same deadline, but always gets a moment for its first try.
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.05)):
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
            if value:
                return value
            last = f"last value: {value!r}"
        except TimeoutError as error:
            last = f"last: no answer of the condition {error!r}; before: {last}"
        except Exception as error:
            last = f"last exception: {error!r}"
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}; {last}")
        await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(pause * 1.5, 0.1)


async def holds(
    condition: Callable[[], Awaitable[object]], *, until: Callable[[], Awaitable[object]], within: float, what: str
) -> None:
    """Polls condition, which must be truthy each time, until `until` is: a proof that something does not happen meanwhile.

    `until` is best an observable of whoever might do it, as its next turns. Fails at once with `what`, or after `within` seconds.
    """

    async def is_over() -> bool:
        over = await until()
        try:
            value = await condition()
        except Exception as error:
            broken.append(repr(error))
        else:
            if not value:
                broken.append(repr(value))
        return bool(over or broken)

    broken: list[str] = []
    await eventually(is_over, within=within, what=f"{what}, long enough")
    assert not broken, f"it does not hold: {what}; {broken[0]}"


async def rests(
    look: Callable[[], Awaitable[object]], *, turns: Callable[[], Awaitable[float]], count: int, within: float, what: str
) -> None:
    """Polls `look` until it has given the same value over `count` turns of whoever might change it. Fails after `within` seconds."""
    seen: object = None
    since = float("inf")

    async def is_at_rest() -> bool:
        nonlocal seen, since
        now, found = await turns(), await look()
        if found != seen or since == float("inf"):
            seen, since = found, await turns()
            return False
        return now - since >= count

    await eventually(is_at_rest, within=within, what=f"at rest over {count} turns: {what}")
