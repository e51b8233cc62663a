"""The agent under chaos, as the workers load it: a pydantic-ai Agent in sessions `p…`, a plain function in sessions `g…`.

Both forget earlier turns: what a message asks for is done for the run that holds it, and for no other.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentrun.agents.base import Context, Result
from agentrun.agents.effects import Effect, EffectPolicy, Happened, NotHappened, current_effect, effectful
from agentrun.agents.generator import GeneratorExecutor
from agentrun.agents.pydantic_ai import PydanticAIExecutor

WORLD = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
POLICIES = {"charge": EffectPolicy.RECONCILE, "refund": EffectPolicy.RETRY, "notify": EffectPolicy.FAIL}
_COUNT = re.compile(r"\[\[count n=(\d+) of=(\w+)\]\]")
_EFFECT = re.compile(r'\[\[tool (\w+) \{"order": "(\w+)"\}\]\]')


async def act(name: str, order: str, effect: Effect) -> str:
    """The call that changes the world."""
    return str((await _post(f"/effects/{name}/{order}", {"id": effect.id, "try": effect.tries}))["answer"])


async def ask(effect: Effect) -> Happened | NotHappened:
    """Whether it happened; if not, the world refuses all tries so far, should one of them still be on its way."""
    answer = (await _post(f"/asked/{effect.id}", {"try": effect.tries}))["answer"]
    return NotHappened() if answer is None else Happened(answer)


async def _post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=WORLD, timeout=30, trust_env=False) as http:
        response = await http.post(path, json=body)
        response.raise_for_status()
        return dict(response.json())


class Forgetful:
    """A context without history."""

    history = ()

    def __init__(self, inner: Context) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


agent = Agent(OpenAIChatModel("gpt-4.1-nano", provider=OpenAIProvider()), deps_type=Forgetful)
agent.model.client.max_retries = 0  # type: ignore[union-attr]


@agent.instructions
def who(ctx: RunContext[Forgetful]) -> str:
    """So that the provider knows which attempt each call is from."""
    return f"run={ctx.deps.run.id} attempt={ctx.deps.run.attempt}"


@agent.tool
@effectful("charge", key="order", policy="reconcile", reconcile=ask)
async def charge(ctx: RunContext[Context], order: str) -> str:
    return await act("charge", order, current_effect())


@agent.tool
@effectful("refund", key="order", policy="retry")
async def refund(ctx: RunContext[Context], order: str) -> str:
    return await act("refund", order, current_effect())


@agent.tool
@effectful("notify", key="order", policy="fail")
async def notify(ctx: RunContext[Context], order: str) -> str:
    return await act("notify", order, current_effect())


async def count(ctx: Context) -> AsyncIterator[str]:
    """Does the effects of all messages, then counts for each, with a checkpoint after every ten numbers."""
    text = " ".join(entry.text for entry in ctx.inputs)
    wanted = [f"{number}-{name} " for most, name in _COUNT.findall(text) for number in range(int(most))]
    for name, order in _EFFECT.findall(text):
        reconcile = ask if POLICIES[name] is EffectPolicy.RECONCILE else None
        async with ctx.effect(name, key=order, policy=POLICIES[name], request={"order": order}, reconcile=reconcile) as effect:
            if effect.due:
                effect.response = await act(name, order, effect)
    for at in range(ctx.state or 0, len(wanted)):
        yield wanted[at]
        await asyncio.sleep(0.04)
        if at % 10 == 9:
            await ctx.checkpoint(at + 1)


class ChaosAgent:
    """One of the two, by the run's messages."""

    def __init__(self) -> None:
        self._asks, self._counts = PydanticAIExecutor(agent), GeneratorExecutor(count)

    async def execute(self, context: Context) -> Result:
        counts = any(_COUNT.search(entry.text) for entry in context.inputs)
        return await (self._counts if counts else self._asks).execute(Forgetful(context))  # type: ignore[arg-type]

    async def aclose(self) -> None:
        await self._asks.aclose()


run = ChaosAgent()
