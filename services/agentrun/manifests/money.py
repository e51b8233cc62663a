"""The parts of an AgentRun that are about money: budgets, and prices of one's own. Amounts are decimal text: a float would not be exact."""

from datetime import date
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from agentrun.domain.cron import zone_problem
from agentrun.manifests.base import Spec, refuse

Usd = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?$", max_length=19)]
TimeZone = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}$", max_length=64)]
PricedModel = Annotated[str, StringConstraints(pattern=r"^[!-~]+$", max_length=253)]


def _a_date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError:
        refuse((), f"{value} is no day", "write year, month and day, for example 2026-01-31")
    return value


Day = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$", max_length=10), AfterValidator(_a_date)]


class BudgetSpec(Spec):
    """What may be spent."""

    usd_per_day: Usd | None = Field(
        default=None, description="What all runs of a day may cost, in USD; above: 429 budget_exhausted. Needs usdPerRun."
    )
    usd_per_user_day: Usd | None = Field(
        default=None,
        description="What the runs of one user and day may cost, in USD; above: 429 budget_exhausted. Needs usdPerRun.",
    )
    usd_per_run: Usd | None = Field(
        default=None,
        description="What one run may cost, in USD, more than 0, all attempts together: it fails with budget_exceeded at its next step. "
        "Set aside for it in the limits of the day until it ends.",
    )
    time_zone: TimeZone = Field(
        default="Etc/UTC", description="The time zone whose midnight begins a day, by its IANA name, for example Europe/Berlin."
    )
    on_unknown_price: Literal["Allow", "Refuse"] = Field(
        default="Allow",
        description="A model without a known price. Allow: its calls count as nothing in the limits, and are reported as unpriced. "
        "Refuse: a run fails with price_unknown before its first call, or after the first such call.",
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> "BudgetSpec":
        if self.usd_per_run is not None and not Decimal(self.usd_per_run):
            refuse(("usdPerRun",), "0, with which every run fails at once", "set it to what one run may cost, or leave it out")
        for name, limit in (("usdPerDay", self.usd_per_day), ("usdPerUserDay", self.usd_per_user_day)):
            if limit is None:
                continue
            if self.usd_per_run is None:
                refuse(("usdPerRun",), f"{name} needs usdPerRun", "set it to what one run may cost: so much is set aside for it")
            if Decimal(self.usd_per_run) > Decimal(limit):
                refuse(("usdPerRun",), f"{self.usd_per_run} is above {name} ({limit})", "lower it: else no run fits into a day")
        if (problem := zone_problem(self.time_zone)) is not None:
            refuse(("timeZone",), problem, "use an IANA name, for example Europe/Berlin")
        return self


class PriceSpec(Spec):
    """The price of a model, instead of the one that is built in, or where none is."""

    model: PricedModel = Field(
        description="The model as its provider names it, or provider:name. Dated and regional names of it have the same price."
    )
    since: Day = Field(
        default="1970-01-01", description="The first day (UTC) on which calls cost that; until the next entry of the same model."
    )
    input_usd: Usd = Field(description="USD per million input tokens. 0 is a price.")
    output_usd: Usd = Field(description="USD per million output tokens, reasoning included.")
    cached_usd: Usd | None = Field(
        default=None, description="USD per million input tokens read from the cache; unless given, inputUsd."
    )
    cache_write_usd: Usd | None = Field(
        default=None, description="USD per million input tokens written to the cache; unless given, inputUsd."
    )
