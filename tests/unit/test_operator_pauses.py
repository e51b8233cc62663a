"""Pauses that grow while something goes on."""

from agentrun_operator.pauses import Pauses


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_they_grow_to_the_longest_and_begin_anew_after_a_calm_time() -> None:
    clock = Clock()
    pauses = Pauses(1.0, 60.0, calm=120.0, clock=clock, jitter=lambda: 0.0)
    given = []
    for _ in range(4):
        given.append(pauses.next())
        clock.now += given[-1] + 0.1
    assert given == [1.0, 8.0, 60.0, 60.0]
    clock.now += 121
    assert pauses.next() == 1.0


def test_watches_that_lose_their_place_together_have_one_pause() -> None:
    clock = Clock()
    pauses = Pauses(1.0, 60.0, clock=clock, jitter=lambda: 0.0)
    for expected in (1.0, 8.0, 60.0):
        assert {pauses.next() for _ in range(9)} == {expected}
        clock.now += expected


def test_those_that_are_not_in_step_grow_all_the_same() -> None:
    clock = Clock()
    pauses = Pauses(1.0, 60.0, clock=clock, jitter=lambda: 0.0)
    due = {number: clock.now + number * 0.3 for number in range(9)}
    asked = 0
    while clock.now < 1600.0:
        number = min(due, key=lambda one: due[one])
        clock.now = due[number]
        due[number] += pauses.next()
        asked += 1
    assert asked < 9 * 15, "in ten minutes"


def test_they_differ_by_chance_and_are_never_shorter() -> None:
    assert Pauses(1.0, 60.0, jitter=lambda: 1.0).next() == 1.25
