"""The condition BudgetExhausted: there while a day's spending leaves no room for one more run, in the budget's own time zone."""

from datetime import date, datetime, timedelta
from decimal import Decimal

import pytest
from operator_world import World

from agentrun_operator.conditions import find
from agentrun_operator.facts import BudgetFact, SpendingFact

BUDGET = {"usdPerDay": "1", "usdPerRun": "0.1", "timeZone": "Pacific/Auckland"}


@pytest.fixture
def world() -> World:
    made = World()
    made.edit(budget=BUDGET)
    made.now = datetime.fromisoformat("2026-03-09T12:30:00+00:00")  # the 10th in Auckland
    made.reconcile()
    made.come_up()
    return made


def told(world: World) -> str | None:
    world.reconcile()
    found = find(world.observed.raw["status"]["conditions"], "BudgetExhausted")
    if found is None:
        return None
    assert (found["status"], found["reason"]) == ("True", "DaySpent")
    return str(found["message"])


def spent(world: World, **days: str) -> None:
    known = tuple(BudgetFact(date(2026, 3, int(day[1:])), Decimal(usd)) for day, usd in days.items())
    world.change(spending=SpendingFact(known))


def test_it_comes_when_one_more_run_does_not_fit_and_goes_at_midnight_of_the_zone(world: World) -> None:
    spent(world, d9="5", d10="0.9")
    assert told(world) is None
    spent(world, d9="5", d10="0.900001")
    assert "429 budget_exhausted until midnight" in str(told(world))
    world.now += timedelta(hours=22)
    assert told(world) is not None, "still the 10th"
    world.now += timedelta(hours=1)
    assert told(world) is None


def test_it_goes_when_the_limit_is_raised_or_taken_away(world: World) -> None:
    spent(world, d10="1")
    assert told(world)
    world.edit(budget={**BUDGET, "usdPerDay": "1.1"})
    assert told(world) is None
    world.edit(budget={**BUDGET, "usdPerDay": "1"})
    assert told(world)
    world.edit(budget={"usdPerRun": "0.1"})
    assert told(world) is None


def test_the_status_says_what_the_day_has_spent_to_the_micro_dollar(world: World) -> None:
    def usage() -> object:
        world.reconcile()
        return world.observed.raw["status"].get("usage")

    spent(world, d9="7", d10="0.1234567")
    assert usage() == {"todayUsd": "0.123457"}
    spent(world, d10="0.12345674")
    world.reconcile()
    spent(world, d10="0.12345673")
    assert world.reconcile().status is None, "less than that is no news"
    spent(world)
    assert usage() == {"todayUsd": "0"}
    world.edit(budget={"usdPerRun": "0.1"})
    assert usage() is None


def test_co_06_calls_without_a_price_are_a_condition_that_names_their_models_and_goes(world: World) -> None:
    def condition() -> dict[str, object] | None:
        world.reconcile()
        return find(world.observed.raw["status"]["conditions"], "CallsUnpriced")

    assert condition() is None
    world.change(spending=SpendingFact(unpriced=("ours", "theirs")))
    found = condition()
    assert found is not None and (found["status"], found["reason"]) == ("True", "PriceUnknown")
    assert "calls of ours, theirs have no price" in str(found["message"])
    world.change(spending=SpendingFact())
    assert condition() is None
