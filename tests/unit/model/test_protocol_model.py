"""The protocol model: all rules together hold, each rule is needed, each planted bug is found.

A trace of a failure is in the assertion's message. Larger graphs and walks: protocol_run.py.
"""

import pytest
from protocol_checker import Result, explore, walk
from protocol_model import Model
from protocol_scenarios import BASE, BUGS, HARMLESS, WALKS, WITHOUT
from protocol_state import RULES, Scenario

LIMIT = 150_000
SLOW = {
    "groups: one session",
    "groups: two sessions",
    "merge: effect, any fault",
    "queue: two runs, retry or drain",
    "stream: any fault",
    "stream: cancel",
    "stream: checkpoint, give-back",
    "stream: two workers",
}
"""Graphs of many states."""


def _explored(name: str, scenario: Scenario) -> tuple[Result, str]:
    result = explore(Model(scenario), name, LIMIT)
    return result, "\n".join([result.line(), *result.trace])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BASE])
def test_no_property_fails_and_every_run_can_end(name: str) -> None:
    result, shown = _explored(name, BASE[name])

    assert result.complete, shown
    assert result.violated == "", shown


@pytest.mark.parametrize("name", WITHOUT)
def test_without_one_rule_a_property_fails(name: str) -> None:
    result, shown = _explored(name, WITHOUT[name].scenario)

    assert result.violated.startswith(WITHOUT[name].property), shown


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    result, shown = _explored(name, BUGS[name].scenario)

    assert result.violated.startswith(BUGS[name].property), shown


@pytest.mark.parametrize("name", HARMLESS)
def test_an_earlier_acknowledgement_is_harmless(name: str) -> None:
    result, shown = _explored(name, HARMLESS[name])

    assert result.complete, shown
    assert result.violated == "", shown


def test_the_slow_ones_are_there() -> None:
    assert set(BASE) > SLOW


def test_each_rule_is_taken_away_once() -> None:
    assert {rule for proof in WITHOUT.values() for rule in proof.scenario.without} == RULES


@pytest.mark.parametrize("name", WALKS)
def test_random_behaviours_at_full_size_end(name: str) -> None:
    for seed in range(25):
        result = walk(Model(WALKS[name]), seed)

        assert result.violated == "", "\n".join([result.name, *result.trace])
