"""The lease keeper: a thread of its own, which no agent can stop from renewing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from waiting import eventually

from agentrun.bus.runs import Held
from agentrun.domain.errors import BusUnavailable, Fenced, StoreUnavailable
from agentrun.store.ids import new_id
from agentrun.store.transitions import AttemptRef, Renewal
from agentrun.worker.keeper import LeaseKeeper
from agentrun.worker.lease import Lease

LEASE = 0.6


class Stores:
    """Renews whatever is not in `ended`; may be away."""

    def __init__(self) -> None:
        self.ended: set[AttemptRef] = set()
        self.away = False
        self.renewals = 0
        self.refreshed: list[str] = []
        self.entry: str | None = None
        self.on_keep: Callable[[], object] = lambda: None
        self.acknowledged: list[Held] = []

    async def renew(self, refs: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
        if self.away:
            raise StoreUnavailable("away")
        self.renewals += 1
        return Renewal(frozenset(refs) - self.ended, frozenset(refs) & self.ended)

    async def refresh(self, entry_ids: Sequence[str]) -> None:
        if self.away:
            raise BusUnavailable("away")
        self.refreshed += entry_ids

    async def keep(self, held: Sequence[Held]) -> Sequence[str | None]:
        await self.refresh([one.entry_id or "" for one in held])
        self.on_keep()
        return [self.entry or one.entry_id for one in held]

    async def acknowledge(self, held: Sequence[Held]) -> None:
        self.acknowledged += held

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def keeper(
    stores: Stores, *, lease_seconds: float = LEASE, on_blocked: Callable[[str], None] = lambda message: None
) -> AsyncIterator[LeaseKeeper]:
    made = LeaseKeeper(lambda: stores, lease_seconds=lease_seconds, on_blocked=on_blocked, blocked_seconds=0.5)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def lease(*, seconds: float = LEASE, stops_in: float = 60.0) -> Lease:
    now = time.monotonic()
    return Lease(AttemptRef(new_id(), 1), "1-0", deadline=now + seconds, stops_at=now + stops_in)


async def test_a_lease_is_renewed_and_its_entry_refreshed_while_it_is_held() -> None:
    stores = Stores()
    async with keeper(stores) as kept:
        held = lease()
        kept.add(held)
        first = held.deadline
        await eventually(lambda: held.deadline > first + LEASE, within=5, what="the lease has been renewed")
        await eventually(lambda: "1-0" in stores.refreshed, within=5, what="its entry has been refreshed")
        kept.remove(held)
        last = held.deadline
        renewals = stores.renewals
        await asyncio.sleep(LEASE)
        assert held.deadline == last
        assert stores.renewals <= renewals + 1


async def test_an_entry_that_was_put_back_is_the_one_that_the_end_acknowledges() -> None:
    stores = Stores()
    stores.entry = "2-0"
    async with keeper(stores) as kept:
        held = lease()
        kept.add(held)
        await eventually(lambda: held.entry_id == "2-0", within=5, what="the lease knows its new entry")
        assert held.take_entry() == "2-0"
    assert stores.acknowledged == []


async def test_an_entry_that_is_put_back_while_its_attempt_ends_does_not_stay() -> None:
    stores = Stores()
    stores.entry = "2-0"
    async with keeper(stores) as kept:
        held = lease()
        taken: list[str] = []
        stores.on_keep = lambda: taken or taken.append(held.take_entry())
        kept.add(held)
        await eventually(lambda: stores.acknowledged, within=5, what="what came too late is acknowledged")
    assert taken == ["1-0"] and stores.acknowledged == [Held(held.ref.run_id, "2-0")]


async def test_nothing_is_put_back_for_a_run_that_somebody_else_may_have() -> None:
    class NoPostgres(Stores):
        async def renew(self, refs: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
            raise StoreUnavailable("away")

    stores = NoPostgres()
    async with keeper(stores) as kept:
        kept.hold("9-0")
        kept.add(lease(seconds=0.0))
        await eventually(lambda: stores.refreshed.count("9-0") > 1, within=5, what="entries have been refreshed")
    assert "1-0" not in stores.refreshed


async def test_qw_02_an_agent_that_blocks_the_loop_loses_no_lease() -> None:
    async with keeper(Stores()) as kept:
        held = lease()
        kept.add(held)
        time.sleep(3 * LEASE)
        assert not held.in_doubt


async def test_an_attempt_past_its_deadline_pauses_until_a_late_renewal() -> None:
    stores = Stores()
    stores.away = True
    async with keeper(stores) as kept:
        held = lease()
        kept.add(held)
        await eventually(lambda: held.in_doubt, within=5, what="the lease is in doubt")
        pausing = asyncio.create_task(held.sure())
        await asyncio.sleep(0.05)
        assert not pausing.done()
        stores.away = False
        await asyncio.wait_for(pausing, 5)
        assert not held.lost and not held.in_doubt


async def test_qw_08_an_error_that_nobody_expected_does_not_end_the_renewals() -> None:
    class Broken(Stores):
        async def renew(self, refs: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
            self.renewals += 1
            if self.renewals < 3:
                raise ZeroDivisionError
            return await super().renew(refs, lease_seconds=lease_seconds)

    async with keeper(Broken()) as kept:
        held = lease(seconds=0.01)
        kept.add(held)
        await asyncio.wait_for(held.sure(), 5)


async def test_a_renewal_that_finds_the_row_ended_fences_the_attempt() -> None:
    stores = Stores()
    async with keeper(stores) as kept:
        held, other = lease(), lease()
        told: list[bool] = []
        held.on_lost = lambda: told.append(True)
        stores.ended.add(held.ref)
        kept.add(held)
        kept.add(other)
        await eventually(lambda: told, within=5, what="the attempt is told")
        with pytest.raises(Fenced):
            held.deadline = 0.0
            await held.sure()
        assert not other.lost


async def test_a_lease_with_little_time_left_is_renewed_at_once() -> None:
    stores = Stores()
    async with keeper(stores, lease_seconds=30) as kept:
        late = lease(seconds=-1)
        kept.add(late)
        await asyncio.wait_for(late.sure(), 5)


async def test_a_loop_that_is_blocked_past_the_last_moment_of_a_run_ends_the_process() -> None:
    told: list[str] = []
    async with keeper(Stores(), on_blocked=told.append) as kept:
        kept.add(lease(stops_in=0.2))
        time.sleep(1.5)
    assert told and "maxRunSeconds" in told[0]


async def test_a_loop_that_is_blocked_while_its_runs_have_time_does_not() -> None:
    told: list[str] = []
    async with keeper(Stores(), on_blocked=told.append) as kept:
        kept.add(lease(stops_in=60))
        time.sleep(1.5)
        assert kept.blocked > 1
    assert told == []


async def test_what_runs_beside_answers_while_the_loop_is_blocked_and_its_failure_is_told() -> None:
    entered: list[bool] = []

    @contextlib.asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        entered.append(True)
        yield
        entered.append(False)

    made = LeaseKeeper(Stores, lease_seconds=LEASE, beside=beside)
    await made.start()
    assert entered == [True]
    await made.stop()
    assert entered == [True, False]

    @contextlib.asynccontextmanager
    async def no_port() -> AsyncIterator[None]:
        raise ValueError("port is taken")
        yield

    with pytest.raises(ValueError, match="port is taken"):
        await LeaseKeeper(Stores, lease_seconds=LEASE, beside=no_port).start()
