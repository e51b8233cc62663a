"""A tool that pays money back. However often its worker dies, each order is refunded once: the bank drops repetitions of an id."""

import asyncio
from typing import Any

from pydantic_ai import RunContext

from agentrun.agents.base import Context
from agentrun.agents.effects import EffectFailed, current_effect, effectful

BANK: dict[str, dict[str, Any]] = {}
"""What a bank would remember: the answer to each idempotency key. Here it lives as long as the worker."""


def order_total(order: int) -> str:
    """What an order cost, in cents. Only reads, so it is no effect."""
    return f"order {order} cost {order * 100} cents"


@effectful("refund", key="order", policy="retry")
async def refund(ctx: RunContext[Context], order: int) -> dict[str, Any]:
    """Gives the money of an order back."""
    if order <= 0:
        raise EffectFailed(f"there is no order {order}")
    await asyncio.sleep(0.1)
    return BANK.setdefault(current_effect().id, {"order": order, "refunded_cents": order * 100})
