"""The agents of the scenarios. What they do is counted by the provider, which no crash of a worker makes forget."""

import asyncio
import os
import re
from collections.abc import AsyncIterator

import httpx2

from agentrun.agents.base import Context


def _provider() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), timeout=10)


async def _mark(name: str) -> None:
    async with _provider() as client:
        (await client.post(f"/marks/{name}")).raise_for_status()


async def _marked(name: str) -> None:
    """Returns when somebody has marked it."""
    async with _provider() as client:
        while True:
            if (await client.get("/counts")).json().get(name):
                return
            await asyncio.sleep(0.3)


async def charge(order: str) -> str:
    """Charges an order."""
    await _mark(f"charge-{order}")
    return f"charged {order}"


async def work(ctx: Context) -> AsyncIterator[str]:
    """Works for as many seconds as the message says, or `until NAME` is marked at the provider, and is counted when it is done.

    `env NAME` is answered with what the variable holds.
    """
    text = ctx.inputs[-1].text
    yield "working "
    if text.startswith("until "):
        await _marked(text.removeprefix("until "))
    elif text.startswith("env "):
        yield os.environ.get(text.removeprefix("env "), "nothing")
    else:
        await asyncio.sleep(float(re.findall(r"[\d.]+", text)[0]))
    await _mark(f"done-{ctx.run.id}")
    yield " done"
