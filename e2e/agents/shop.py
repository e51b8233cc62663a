"""The agents of the scenarios. What they do is counted by the provider, which no crash of a worker makes forget."""

import asyncio
import os
import re
from collections.abc import AsyncIterator

import httpx2

from agentrun.agents.base import Context


async def _mark(name: str) -> None:
    base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    async with httpx2.AsyncClient(timeout=10) as client:
        (await client.post(f"{base}/marks/{name}")).raise_for_status()


async def charge(order: str) -> str:
    """Charges an order."""
    await _mark(f"charge-{order}")
    return f"charged {order}"


async def work(ctx: Context) -> AsyncIterator[str]:
    """Works for as many seconds as the message says, and is counted when it is done."""
    seconds = float(re.findall(r"[\d.]+", ctx.inputs[-1].text)[0])
    yield "working "
    await asyncio.sleep(seconds)
    await _mark(f"done-{ctx.run.id}")
    yield "done"
