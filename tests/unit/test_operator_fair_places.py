"""Places for which groups take turns."""

import asyncio
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from agentrun_operator.fair_places import FairPlaces


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Hall:
    """Who has had a place, in that order. A name begins with its group."""

    def __init__(self, places: int) -> None:
        self.places = FairPlaces(places)
        self.order: list[str] = []
        self.most = 0
        self._there = 0
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
        await some_turns()

    async def go(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await some_turns()

    async def lose(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await some_turns()

    async def _stay(self, name: str) -> None:
        async with self.places.place(name[0]):
            self.order.append(name)
            self._there += 1
            self.most = max(self.most, self._there)
            try:
                await self._ends[name].wait()
            finally:
                self._there -= 1


async def test_one_of_another_group_waits_for_one_place_behind_a_crowd() -> None:
    hall = Hall(2)
    await hall.come(*(f"a{number}" for number in range(10)), "b0")
    assert hall.places.full()
    await hall.go("a0")
    await hall.go("a1")
    assert hall.order == ["a0", "a1", "a2", "b0"]
    await hall.go(*hall.tasks)
    assert hall.order[4:] == [f"a{number}" for number in range(3, 10)]
    assert not hall.places.full()


async def test_who_gives_up_takes_no_place() -> None:
    hall = Hall(1)
    await hall.come("a0", "a1", "b0", "a2")
    await hall.lose("a1", "b0")
    await hall.go("a0")
    assert hall.order == ["a0", "a2"]
    await hall.lose("a2")
    await hall.come("c0")
    assert hall.order[-1] == "c0"


async def test_who_gives_up_in_the_moment_of_its_turn_passes_it_on() -> None:
    hall = Hall(1)
    await hall.come("a0", "a1", "a2")
    hall._ends["a0"].set()
    await asyncio.sleep(0)  # a0 ends, and its place is given
    await hall.lose("a1")
    await hall.go("a0")
    assert hall.order[-1] == "a2"


@example(places=1, steps=[("come", 0, "a")] * 9)
@given(
    places=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["come", "go", "lose"]), st.integers(0, 30), st.sampled_from("abc")), max_size=60),
)
def test_no_place_is_lost_or_given_twice(places: int, steps: Sequence[tuple[str, int, str]]) -> None:
    async def run() -> None:
        hall = Hall(places)
        for what, number, group in steps:
            known = list(hall.tasks)
            if what == "come":
                await hall.come(f"{group}{len(known)}")
            elif known:
                await (hall.go if what == "go" else hall.lose)(known[number % len(known)])
        await hall.go(*hall.tasks)
        if hall.tasks:  # a long queue takes more than some turns
            await asyncio.wait(hall.tasks.values(), timeout=10)
        assert hall.most <= places
        assert all(task.done() for task in hall.tasks.values())
        before = len(hall.order)
        await hall.come(*(f"z{number}" for number in range(places)))
        assert len(hall.order) == before + places, "all places are there again"
        await hall.go(*hall.tasks)

    asyncio.run(run())
