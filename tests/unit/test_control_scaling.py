"""How many workers are wanted: up at once, down slowly, never on a guess."""

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun.control.scaling import Bounds, Decision, Memory, Why, desired_workers

BOUNDS = Bounds(min_replicas=0, max_replicas=10, target_per_worker=1, scale_down_stabilization_seconds=60, cooldown_seconds=300)


def bounds(**changes: int) -> Bounds:
    return dataclasses.replace(BOUNDS, **changes)


def play(demands: Iterable[int | None], *, bounds: Bounds, current: int = 0, every: float = 2.0) -> list[Decision]:
    """Decides once per demand, each decision becoming the number of workers."""
    memory, decisions = Memory(), []
    for turn, demand in enumerate(demands):
        decision = desired_workers(demand, current=current, bounds=bounds, now=turn * every, memory=memory)
        current, memory = decision.workers, decision.memory
        decisions.append(decision)
    return decisions


def counts(decisions: Iterable[Decision]) -> list[int]:
    return [decision.workers for decision in decisions]


@pytest.mark.parametrize(
    ("demand", "target", "wanted"), [(1, 1, 1), (1, 10, 1), (10, 10, 1), (11, 10, 2), (20, 1, 10), (0, 1, 0), (7, 3, 3)]
)
def test_sc_01_one_run_wakes_a_worker_and_the_rest_is_rounded_up(demand: int, target: int, wanted: int) -> None:
    (decision,) = play([demand], bounds=bounds(target_per_worker=target))

    assert decision.workers == wanted


def test_sc_02_work_that_nobody_has_read_yet_counts() -> None:
    assert counts(play([20], bounds=bounds(target_per_worker=10), current=0)) == [2]


def test_sc_02_busy_workers_with_nothing_waiting_stay() -> None:
    assert set(counts(play([4] * 500, bounds=BOUNDS, current=4))) == {4}


def test_sc_06_a_demand_that_sits_on_the_threshold_changes_the_count_once() -> None:
    seen = counts(play([9, 11] * 10, bounds=bounds(target_per_worker=10), current=1))

    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 1
    assert seen[-1] == 2


@pytest.mark.parametrize("changes", [{"min_replicas": 5, "max_replicas": 4}, {"min_replicas": -1}, {"target_per_worker": 0}])
def test_sc_06_bounds_that_contradict_each_other_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        bounds(**changes)


def test_more_workers_are_wanted_at_once() -> None:
    assert counts(play([1, 8, 10], bounds=BOUNDS)) == [1, 8, 10]


def test_fewer_are_wanted_only_after_the_whole_window() -> None:
    decisions = play([8] + [2] * 40, bounds=BOUNDS)

    assert counts(decisions)[:30] == [8] * 30
    assert decisions[5].why is Why.STABILIZING
    assert counts(decisions)[31:] == [2] * 10


def test_a_peak_within_the_window_starts_it_anew() -> None:
    assert set(counts(play([8, *[2] * 20, 8, *[2] * 20], bounds=BOUNDS))) == {8}


def test_the_last_worker_goes_only_after_the_cooldown() -> None:
    decisions = play([3] + [0] * 200, bounds=BOUNDS)

    assert counts(decisions)[31:150] == [1] * 119
    assert decisions[100].why is Why.COOLING_DOWN
    assert counts(decisions)[151:] == [0] * 50


def test_nothing_is_started_for_a_cooldown() -> None:
    assert set(counts(play([0] * 5, bounds=BOUNDS, current=0))) == {0}


def test_unknown_demand_holds_the_count() -> None:
    decisions = play([5, *[None] * 500, 1], bounds=BOUNDS)

    assert set(counts(decisions)) == {5}
    assert decisions[10].why is Why.UNKNOWN
    assert decisions[-1].why is Why.STABILIZING  # the blind time is no evidence of low demand


def test_unknown_demand_still_keeps_the_bounds() -> None:
    assert counts(play([None], bounds=bounds(min_replicas=2), current=0)) == [2]
    assert counts(play([None], bounds=BOUNDS, current=50)) == [10]


def test_sc_08_a_restarted_scaler_takes_nothing_away_at_once() -> None:
    assert set(counts(play([1] * 30, bounds=BOUNDS, current=6))) == {6}


def test_a_lowered_maximum_holds_at_once() -> None:
    (before,) = play([10], bounds=BOUNDS)
    after = desired_workers(10, current=10, bounds=bounds(max_replicas=3), now=2, memory=before.memory)
    falling = desired_workers(0, current=10, bounds=bounds(max_replicas=3), now=2, memory=before.memory)

    assert (after.workers, falling.workers) == (3, 3)


demands = st.lists(st.none() | st.integers(0, 200), min_size=1, max_size=120)
any_bounds = st.builds(
    lambda low, more, target, window, cooldown: Bounds(low, low + more, target, window, cooldown),
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(1, 20),
    st.integers(0, 100),
    st.integers(0, 200),
)


@given(demands, any_bounds, st.integers(0, 30))
def test_the_count_keeps_its_bounds_and_is_never_too_small(demands: list[int | None], bounds: Bounds, current: int) -> None:
    for demand, decision in zip(demands, play(demands, bounds=bounds, current=current), strict=True):
        assert bounds.min_replicas <= decision.workers <= bounds.max_replicas
        if demand is not None:
            assert decision.workers >= min(-(-demand // bounds.target_per_worker), bounds.max_replicas)


@given(demands, any_bounds, st.integers(0, 25))
def test_the_count_falls_only_to_what_the_whole_window_needed(demands: list[int | None], bounds: Bounds, current: int) -> None:
    counted = counts(play(demands, bounds=bounds, current=current, every=7))
    for turn in range(1, len(counted)):
        if counted[turn] < counted[turn - 1]:
            window = [i for i in range(turn + 1) if i == turn or (turn - i) * 7 < bounds.scale_down_stabilization_seconds]
            needed = [bounds.clamp(-(-d // bounds.target_per_worker)) for i in window if (d := demands[i]) is not None]
            assert counted[turn] >= max(needed)


@given(st.integers(0, 200), any_bounds, st.integers(0, 25))
def test_a_steady_demand_is_reached_and_kept(demand: int, bounds: Bounds, current: int) -> None:
    seen = counts(play([demand] * 80, bounds=bounds, current=current, every=10))

    assert set(seen[31:]) == {bounds.clamp(-(-demand // bounds.target_per_worker))}


@given(demands, any_bounds)
def test_the_memory_stays_small_and_falling(demands: list[int | None], bounds: Bounds) -> None:
    wants = [workers for _, workers in play(demands, bounds=bounds)[-1].memory.wants]

    assert wants == sorted(set(wants), reverse=True)
