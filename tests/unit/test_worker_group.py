"""Group commit: who shares a round trip, and whose fault is whose."""

import asyncio
from collections.abc import Sequence

import pytest

from agentrun.domain.errors import StoreUnavailable
from agentrun.store.group import Group


class Work:
    """Doubles numbers; remembers its groups; 13 is a bad member, and it may be held up or away."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.away = False

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.groups.append(list(items))
        await self.open.wait()
        if self.away:
            raise StoreUnavailable("away")
        if 13 in items:
            raise ValueError("bad member")
        return [2 * item for item in items]


async def test_whoever_waits_shares_a_group_in_the_order_of_arrival() -> None:
    work = Work()
    group = Group(work, stage="test")
    assert await asyncio.gather(*(group.submit(n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert work.groups == [[0, 1, 2, 3, 4]]


async def test_a_lone_item_does_not_wait_for_company() -> None:
    work = Work()
    group = Group(work, stage="test")
    assert await group.submit(1) == 2
    assert await group.submit(2) == 4
    assert work.groups == [[1], [2]]


async def test_a_group_holds_at_most_so_many() -> None:
    work = Work()
    group = Group(work, most=2, stage="test")
    await asyncio.gather(*(group.submit(n) for n in range(5)))
    assert work.groups == [[0, 1], [2, 3], [4]]


async def test_a_bad_member_fails_alone() -> None:
    work = Work()
    group = Group(work, stage="test")
    results = await asyncio.gather(*(group.submit(n) for n in (1, 13, 3, 4)), return_exceptions=True)
    assert [results[0], *results[2:]] == [2, 6, 8]
    assert isinstance(results[1], ValueError)


async def test_an_outage_fails_everybody_at_once() -> None:
    work = Work()
    work.away = True
    group = Group(work, stage="test")
    results = await asyncio.gather(*(group.submit(n) for n in range(4)), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert len(work.groups) == 1


async def test_a_cancelled_waiter_takes_its_item_back_and_harms_nobody() -> None:
    work = Work()
    work.open.clear()
    group = Group(work, stage="test")
    first = asyncio.create_task(group.submit(1))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(group.submit(n)) for n in (2, 3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.cancel()
    await asyncio.sleep(0)
    work.open.set()
    assert await waiting[1] == 6
    assert work.groups == [[1], [3]]


async def test_no_item_is_left_behind_when_it_comes_as_the_committer_ends() -> None:
    work = Work()
    group = Group(work, stage="test")

    async def one_after_the_other(start: int) -> None:
        for n in range(start, start + 50):
            await group.submit(100 + n)
            if n % 3 == 0:
                await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await asyncio.gather(*(one_after_the_other(start) for start in (0, 100, 200)))


async def test_close_waits_for_what_was_submitted_and_refuses_the_rest() -> None:
    work = Work()
    work.open.clear()
    group = Group(work, stage="test")
    waiting = asyncio.create_task(group.submit(1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(group.close())
    await asyncio.sleep(0)
    assert not closing.done()
    work.open.set()
    await closing
    assert waiting.done() and await waiting == 2
    with pytest.raises(RuntimeError, match="closed"):
        await group.submit(2)


async def test_work_that_answers_too_little_is_an_error_of_all_its_members() -> None:
    async def forgetful(items: Sequence[int]) -> list[int]:
        return []

    group: Group[int, int] = Group(forgetful, stage="test")
    with pytest.raises(RuntimeError, match="0 results for 1 items"):
        await group.submit(1)


async def test_a_group_weighs_no_more_than_it_may_and_a_heavy_item_goes_alone() -> None:
    work = Work()
    group = Group(work, weigh=lambda item: item, most_weight=10, stage="test")
    asked = asyncio.gather(*(group.submit(n) for n in (4, 6, 1, 99, 5, 5)))
    await asyncio.sleep(0)
    assert group.weight in (0, 120)
    await asked
    assert work.groups == [[4, 6], [1], [99], [5, 5]]
    assert group.weight == 0


async def test_the_weight_of_what_waits_is_known_and_a_cancelled_item_weighs_nothing_later() -> None:
    work = Work()
    work.open.clear()
    group = Group(work, weigh=lambda item: item, stage="test")
    tasks = [asyncio.create_task(group.submit(n)) for n in (1, 20, 300)]
    await asyncio.sleep(0.01)
    assert group.weight == 0  # all of them are on their way
    tasks += [asyncio.create_task(group.submit(n)) for n in (20, 300)]
    await asyncio.sleep(0.01)
    assert group.weight == 320
    tasks[-1].cancel()
    work.open.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert group.weight == 0


async def test_a_member_that_looks_like_an_outage_is_got_rid_of_by_smaller_groups() -> None:
    """One item makes every statement that holds it take too long; those who ask again get through without it."""
    sizes: list[int] = []

    async def slow_with_13(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        if 13 in items:
            raise StoreUnavailable("no answer in time")
        return list(items)

    group: Group[int, int] = Group(slow_with_13, stage="test")

    async def until_answered(item: int) -> int:
        while True:
            try:
                return await group.submit(item)
            except StoreUnavailable:
                await asyncio.sleep(0)

    tasks = {n: asyncio.create_task(until_answered(n)) for n in (*range(10), 13)}
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(tasks[n] for n in range(10))) == list(range(10))
    assert sizes[:3] == [11, 11, 11]  # an outage as such splits no group
    assert not tasks[13].done()
    tasks[13].cancel()
    await asyncio.gather(tasks[13], return_exceptions=True)


async def test_groups_grow_again_after_an_outage() -> None:
    work = Work()
    work.away = True
    group = Group(work, stage="test")
    for _ in range(12):
        await asyncio.gather(*(group.submit(n) for n in range(4)), return_exceptions=True)
    assert [len(one) for one in work.groups[-4:]] == [1, 1, 1, 1]
    work.away = False
    work.groups.clear()
    await asyncio.gather(*(group.submit(n) for n in range(14, 29)))
    assert [len(one) for one in work.groups] == [1, 2, 4, 8]
