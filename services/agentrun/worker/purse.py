"""What one run may spend: prices its calls, counts them, and says when the run must stop."""

from datetime import UTC, datetime

from agentrun.agents.failures import AgentFailure
from agentrun.costs.amounts import usd
from agentrun.costs.pricing import UNKNOWN, Price, is_known, price
from agentrun.costs.rules import Rules
from agentrun.costs.usage import Usage
from agentrun.store.budgets import Purse as Spent
from agentrun.telemetry import BUDGET_STOPS
from agentrun.worker.patience import log

EXCEEDED = "budget_exceeded"
UNPRICED = "price_unknown"


class Purse:
    """The money of one run, seen by one attempt. The limit is the one that was set aside when the run was admitted, else the manifest's."""

    def __init__(self, rules: Rules, found: Spent) -> None:
        self._rules = rules
        self._limit = None if rules.run_usd is None else rules.run_usd if found.reserved_usd is None else found.reserved_usd
        self._spent = found.booked_usd
        self._unpriced = _unknown(rules)
        self._stopped = False

    def pay(self, usage: Usage) -> Price:
        """The price of a call that was made; it counts from now on. Unknown rather than a booking that is lost."""
        if (
            max(usage.cached_tokens + usage.cache_write_tokens, usage.audio_input_tokens) > usage.input_tokens
            or usage.reasoning_tokens + usage.audio_output_tokens > usage.output_tokens
        ):
            log.warning(
                "a provider's counts contradict each other: a part is more than the whole, and is paid as it is",
                usage=repr(usage),
            )
        try:
            found = price(usage, datetime.now(UTC), overrides=self._rules.overrides)
        except Exception:
            log.exception("a model call could not be priced", model=usage.model)
            found = UNKNOWN
        if found.cost_usd is not None:
            self._spent += found.cost_usd
        elif usage.measured:
            self._unpriced = usage.model
        return found

    def check(self) -> None:
        """Before anything that may cost. Raises AgentFailure, never to be retried, if the run may not spend any more."""
        if self._limit is not None and self._spent >= self._limit:
            what = (
                f"the run has spent {usd(self._spent)} USD of the {usd(self._limit)} USD that it may cost (spec.budget.usdPerRun)"
            )
            raise self._stop(what, EXCEEDED)
        if self._rules.refuse_unknown and self._unpriced is not None:
            what = f"the model {self._unpriced} has no known price and spec.budget.onUnknownPrice is Refuse; add its price to spec.prices"
            raise self._stop(what, UNPRICED)

    def _stop(self, what: str, kind: str) -> AgentFailure:
        if not self._stopped:
            BUDGET_STOPS.labels(kind).inc()
        self._stopped = True
        return AgentFailure(what, type=kind)


def _unknown(rules: Rules) -> str | None:
    """The manifest's model, if it has no price: known before the first call."""
    if not rules.refuse_unknown or rules.model is None or is_known(rules.model, datetime.now(UTC), overrides=rules.overrides):
        return None
    return rules.model
