"""Whether the day's budget is spent: then the gateway refuses messages until midnight. Whether calls have no price. Pure."""

from decimal import Decimal
from zoneinfo import ZoneInfo

from agentrun_operator.checks import Finding
from agentrun_operator.conditions import Status
from agentrun_operator.reasons import Reason
from agentrun_operator.situation import Situation


def spent_today(situation: Situation) -> Decimal | None:
    """What the runs of this day have spent, in USD; None where no day has a limit: then nobody counts."""
    if situation.observed.manifest is None:
        return None
    budget = situation.manifest.spec.budget
    if budget.usd_per_day is None and budget.usd_per_user_day is None:
        return None
    today = situation.now.astimezone(ZoneInfo(budget.time_zone)).date()
    return next((one.spent for one in situation.observed.spending.days if one.day == today), Decimal(0))


def exhausted(situation: Situation) -> Finding | None:
    """The condition, while what was spent leaves no room for one more run. What is only set aside comes back, and is not told."""
    spent = spent_today(situation)
    if spent is None:
        return None
    budget = situation.manifest.spec.budget
    if budget.usd_per_day is None or budget.usd_per_run is None:
        return None
    if spent + Decimal(budget.usd_per_run) <= Decimal(budget.usd_per_day):
        return None
    return Finding(
        Status.TRUE,
        Reason.DAY_SPENT,
        "what the day has spent leaves no room for one more run: messages get 429 budget_exhausted until midnight; raise "
        "spec.budget.usdPerDay, or wait",
    )


def unpriced(situation: Situation) -> Finding | None:
    """The condition, while there were such calls in the last day."""
    models = situation.observed.spending.unpriced
    if not models:
        return None
    return Finding(
        Status.TRUE,
        Reason.PRICE_UNKNOWN,
        f"calls of {', '.join(models)} have no price, so what they cost is unknown and no limit of a day sees it; add spec.prices, and run "
        "`agentrun costs reprice`",
    )
