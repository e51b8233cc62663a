"""What an AgentRun's manifest says about money, as the parts that act on it want it."""

from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal

from agentrun.costs.pricing import Overrides, Rates
from agentrun.manifests import AgentRunSpec
from agentrun.store.budgets import Budget


@dataclass(frozen=True, slots=True)
class Rules:
    """How an attempt's calls are priced, and when it must stop. `run_usd` None: never. `model` is the one that the manifest names."""

    overrides: Overrides = field(default_factory=dict)
    run_usd: Decimal | None = None
    refuse_unknown: bool = False
    model: str | None = None


def rules_of(spec: AgentRunSpec) -> Rules:
    """Those of a manifest."""
    limit = spec.budget.usd_per_run
    return Rules(
        overrides_of(spec),
        None if limit is None else Decimal(limit),
        spec.budget.on_unknown_price == "Refuse",
        spec.agent.model,
    )


def overrides_of(spec: AgentRunSpec) -> Overrides:
    """The prices of a manifest."""
    found: dict[str, list[Rates]] = {}
    for one in spec.prices:
        cached, written = (None if usd is None else Decimal(usd) for usd in (one.cached_usd, one.cache_write_usd))
        since = date.min if one.since == "1970-01-01" else date.fromisoformat(one.since)
        found.setdefault(one.model, []).append(Rates(Decimal(one.input_usd), Decimal(one.output_usd), cached, written, since))
    return found


def budget_of(spec: AgentRunSpec) -> Budget | None:
    """What new runs reserve; None where no day has a limit."""
    budget = spec.budget
    if budget.usd_per_run is None or (budget.usd_per_day is None and budget.usd_per_user_day is None):
        return None
    day, user = (None if usd is None else Decimal(usd) for usd in (budget.usd_per_day, budget.usd_per_user_day))
    return Budget(Decimal(budget.usd_per_run), day, user, budget.time_zone)
