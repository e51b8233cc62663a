"""The plan of a chaos run: the same for the same seed, with every fault in it, and time for the reaper in between."""

from collections import Counter
from itertools import pairwise

import pytest
from chaos_plan import LEASE_SECONDS, SHIELDED_LEASES, Fault, plan


def test_the_same_seed_is_the_same_plan_and_another_is_another() -> None:
    assert plan(7, 200) == plan(7, 200)
    assert plan(7, 200).steps != plan(8, 200).steps
    assert plan(7, 200).submissions != plan(8, 200).submissions


@pytest.mark.parametrize("seed", range(20))
def test_a_short_run_has_every_fault_and_one_each_second(seed: int) -> None:
    made = plan(seed, 200)
    assert Counter(int(step.at) for step in made.steps).most_common(1)[0][1] == 1
    assert len(made.steps) == 49
    assert {step.fault for step in made.steps} == set(Fault)
    assert len(made.submissions) == 200 and len({one.key for one in made.submissions}) == 200
    texts = [one.text for one in made.submissions]
    assert len(set(texts)) == len(texts), "the judge finds a message by its text"


@pytest.mark.parametrize("seed", range(20))
def test_what_makes_reapers_wait_leaves_them_time(seed: int) -> None:
    shields = [step for step in plan(seed, 2000).steps if step.shields]
    assert len(shields) > 10
    for one, following in pairwise(shields):
        assert following.at - one.at - one.seconds > SHIELDED_LEASES * LEASE_SECONDS
