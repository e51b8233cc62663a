"""Counts down from the number in the message, a second a step. Kill its worker: another one goes on where it stopped."""

import asyncio
import re
from collections.abc import AsyncIterator

from agentrun.agents.base import Context

STEP_SECONDS = 1.0


async def run(ctx: Context) -> AsyncIterator[str]:
    """Yields the numbers; `ctx.state` is the next one, saved after each step."""
    found = re.search(r"\d+", ctx.inputs[-1].text)
    left = ctx.state if ctx.state is not None else min(int(found[0]), 1000) if found else 10
    while left > 0:
        yield f"{left}… "
        left -= 1
        await asyncio.sleep(STEP_SECONDS)
        await ctx.checkpoint(left)
    yield "lift-off!"
