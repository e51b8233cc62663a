"""Groups of submissions: counted once, bounded in bytes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import Mock, patch

import pytest

from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.gateway import submissions
from agentrun.gateway.bodies import MessageBody
from agentrun.gateway.problems import OVERLOADED, Problem
from agentrun.gateway.submissions import FollowUpRules, Message, Submissions
from agentrun.store import follow_ups
from agentrun.store.group import MOST_WEIGHT
from agentrun.store.transitions import Submission, Submitted
from agentrun.telemetry import REGISTRY


class Store:
    """Takes submissions; may be held up."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.open = asyncio.Event()
        self.open.set()

    async def submit(self, pool: Any, group: Sequence[Submission], policy: Policy, budget: None) -> list[Submitted]:
        self.groups.append(len(group))
        await self.open.wait()
        return [Submitted(one.run_id, one.session_id, RunStatus.PENDING, False, False, True) for one in group]


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = Store()
    with patch.object(follow_ups, "submit", made.submit):
        yield made


@pytest.fixture
async def taken(store: Store) -> Submissions:
    return Submissions(Mock(), Mock(), agent="test/agent", dedupe_seconds=10, rules=FollowUpRules(Policy.MERGE, 30, 1))


def message(text: str, key: str = "k") -> Message:
    return Message("ann", "s", key, MessageBody(input=text))


def groups() -> float:
    return REGISTRY.get_sample_value("agentrun_group_size_count", {"stage": "submit"}) or 0.0


async def test_a_group_is_counted_once(taken: Submissions) -> None:
    before = groups()
    await taken.accept(message("x"))
    assert groups() == before + 1


async def test_large_submissions_share_no_more_than_a_statement_can_hold(store: Store, taken: Submissions) -> None:
    text = "x" * 1_000_000
    await asyncio.gather(*(taken.accept(message(text, str(n))) for n in range(20)))
    assert sum(store.groups) == 20 and max(store.groups) <= MOST_WEIGHT // 2_000_000


async def test_so_many_bytes_wait_at_most(store: Store, taken: Submissions) -> None:
    store.open.clear()
    with patch.object(submissions, "MOST_WAITING_BYTES", 1_000):
        tasks = [asyncio.create_task(taken.accept(message("x" * 400, str(n)))) for n in range(3)]
        await asyncio.sleep(0.01)  # the first group is on its way
        waiting = [asyncio.create_task(taken.accept(message("x" * 400, f"w{n}"))) for n in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Problem) as refused:
            await taken.accept(message("x", "late"))
        assert refused.value.kind is OVERLOADED
        store.open.set()
        await asyncio.gather(*tasks, *waiting, return_exceptions=True)
