"""Turns at a limited rate: first come, first served, also when somebody gives up waiting."""

import asyncio

from agentrun_operator.turns import Turns


class Guest:
    """One that takes a turn and keeps it until it is told to go."""

    def __init__(self, turns: Turns, cost: float = 1.0) -> None:
        self.served = False
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._stay(turns, cost))

    async def _stay(self, turns: Turns, cost: float) -> None:
        async with turns.turn(cost):
            self.served = True
            await self.go.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_so_many_as_the_budget_allows_and_then_in_their_order() -> None:
    turns = Turns(2.5)
    guests = [Guest(turns) for _ in range(4)]
    await settle()
    assert [guest.served for guest in guests] == [True, True, False, False]
    assert (turns.active, turns.waiting) == (2, 2)
    guests[0].go.set()
    await settle()
    assert [guest.served for guest in guests] == [True, True, True, False]
    for guest in guests:
        guest.go.set()
    await asyncio.gather(*(guest.task for guest in guests))
    assert (turns.active, turns.waiting) == (0, 0)


async def test_one_that_costs_too_much_has_its_turn_alone_and_is_not_overtaken() -> None:
    turns = Turns(2)
    first, large, small = Guest(turns), Guest(turns, 5), Guest(turns)
    await settle()
    assert (first.served, large.served, small.served) == (True, False, False)
    first.go.set()
    await settle()
    assert (large.served, small.served) == (True, False)
    large.go.set()
    await settle()
    assert small.served
    small.go.set()
    await small.task


async def test_who_gives_up_takes_no_turn_along() -> None:
    turns = Turns(1)
    first, second, third = (Guest(turns) for _ in range(3))
    await settle()
    second.task.cancel()
    await settle()
    first.go.set()
    await settle()
    assert (second.served, third.served) == (False, True)
    fourth = Guest(turns)
    await settle()
    third.go.set()
    await third.task
    fourth.task.cancel()  # it was admitted in this moment
    await settle()
    assert (turns.active, turns.waiting) == (0, 0)


async def test_several_that_end_and_give_up_in_one_moment_leave_nothing_behind() -> None:
    turns = Turns(1)
    guests = [Guest(turns) for _ in range(4)]
    await settle()
    for guest in guests[:3]:
        guest.task.cancel()
    await settle()
    assert (guests[3].served, turns.active, turns.waiting) == (True, 1, 0)
    guests[3].go.set()
    await guests[3].task
    assert turns.active == 0
