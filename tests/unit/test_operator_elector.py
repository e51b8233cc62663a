"""Leading: one at a time, never past the renew deadline, and no two clocks compared."""

import asyncio
import contextlib
import copy
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from waiting import eventually

from agentrun_operator.elector import Elector, Terms, Try, WorkDidNotEnd
from agentrun_operator.kube_errors import Conflict, Unavailable
from agentrun_operator.resources import LEASES, Ref

REF = Ref(LEASES, "system", "agentrun-operator")
TERMS = Terms(lease=2, renew=0.4, retry=0.05)


@dataclass
class Store:
    """One Lease, with resourceVersions; fails or hangs on demand."""

    lease: dict[str, Any] | None = None
    fault: str = ""
    versions: Any = field(default_factory=lambda: itertools.count(1))

    async def get(self, _ref: Ref) -> dict[str, Any] | None:
        await self._misbehave()
        return copy.deepcopy(self.lease)

    async def create(self, _ref: Ref, body: dict[str, Any]) -> dict[str, Any]:
        await self._misbehave()
        if self.lease is not None:
            raise Conflict("exists", status=409)
        return self._keep(body)

    async def replace(self, _ref: Ref, body: dict[str, Any]) -> dict[str, Any]:
        await self._misbehave()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("changed", status=409)
        return self._keep(body)

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.lease = {**copy.deepcopy(body), "metadata": {"resourceVersion": str(next(self.versions))}}
        return self.lease

    async def _misbehave(self) -> None:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault == "refuse":
            raise Unavailable("refused")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Work:
    begun: int = 0
    ended: int = 0

    async def __call__(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    @property
    def going(self) -> bool:
        return self.begun > self.ended


@contextlib.asynccontextmanager
async def electing(elector: Elector, work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(elector.run(work))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def elector(store: Store, name: str, *, clock: Clock | None = None, terms: Terms = TERMS) -> Elector:
    return Elector(store, REF, name, terms=terms, **({"clock": clock} if clock else {}))


async def test_of_two_one_gets_the_lease() -> None:
    store = Store()
    one, two = elector(store, "one"), elector(store, "two")

    assert [await one.attempt(), await two.attempt(), await one.attempt()] == [Try.HELD, Try.TAKEN, Try.HELD]
    assert store.holder == "one"


async def test_a_lease_is_expired_when_it_was_seen_unchanged_for_its_duration() -> None:
    store, clock = Store(), Clock()
    terms = Terms(lease=15, renew=10, retry=2)
    one, two = elector(store, "one", clock=clock, terms=terms), elector(store, "two", clock=clock, terms=terms)
    await one.attempt()
    assert store.lease is not None
    store.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"  # a clock that is wrong says nothing

    results = []
    for clock.now in (100.0, 114.9):
        results.append(await two.attempt())
    await one.attempt()
    for clock.now in (115.0, 129.9, 130.0):
        results.append(await two.attempt())

    assert results == [Try.TAKEN, Try.TAKEN, Try.TAKEN, Try.TAKEN, Try.HELD]
    assert (store.holder, store.lease["spec"]["leaseTransitions"]) == ("two", 1)


async def test_who_comes_second_at_the_same_moment_does_not_hold_it() -> None:
    store = Store(lease={"metadata": {"resourceVersion": "0"}, "spec": {"holderIdentity": ""}})
    one, two = elector(store, "one"), elector(store, "two")
    seen = copy.deepcopy(store.lease)
    await one.attempt()

    async def stale(_ref: Ref) -> dict[str, Any] | None:
        return seen

    store.get = stale  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        await two.attempt()
    assert store.holder == "one"


@pytest.mark.parametrize("fault", ["hang", "refuse"])
async def test_work_ends_at_the_renew_deadline_and_is_begun_again(fault: str) -> None:
    store, work = Store(), Work()
    async with electing(elector(store, "one"), work):
        await eventually(lambda: work.going, within=2, what="work is begun")
        store.fault = fault
        broken = asyncio.get_running_loop().time()
        await eventually(lambda: not work.going, within=2, what="work is cancelled")
        assert asyncio.get_running_loop().time() - broken < TERMS.renew + 0.3
        store.fault = ""
        await eventually(lambda: work.begun == 2 and work.going, within=2, what="work is begun again")


async def test_a_short_outage_does_not_end_work() -> None:
    store, work = Store(), Work()
    async with electing(elector(store, "one", terms=Terms(lease=4, renew=2.0, retry=0.05)), work):
        await eventually(lambda: work.going, within=2, what="work is begun")
        store.fault = "refuse"
        await asyncio.sleep(0.3)
        store.fault = ""
        await asyncio.sleep(0.2)
        assert (work.begun, work.ended) == (1, 0)


async def test_work_ends_at_once_when_somebody_else_holds_the_lease() -> None:
    store, work = Store(), Work()
    leader = elector(store, "one", terms=Terms(lease=60, renew=50.0, retry=0.05))
    async with electing(leader, work):
        await eventually(lambda: work.going, within=2, what="work is begun")
        assert store.lease is not None
        store.lease = {"metadata": {"resourceVersion": "x"}, "spec": {**store.lease["spec"], "holderIdentity": "thief"}}
        await eventually(lambda: not work.going, within=2, what="work is cancelled")
        assert not leader.leading


async def test_a_lease_that_was_given_back_is_free_at_once() -> None:
    store = Store()
    one, two = elector(store, "one"), elector(store, "two")
    assert not await one.release()
    await one.attempt()
    assert await two.attempt() is Try.TAKEN

    assert await one.release()
    assert await two.attempt() is Try.HELD
    assert not await one.release()
    assert store.holder == "two"


async def test_giving_back_does_not_wait_for_a_server_that_hangs() -> None:
    store = Store()
    one = elector(store, "one")
    await one.attempt()
    store.fault = "hang"
    async with asyncio.timeout(1):
        assert not await one.release(within=0.05)


async def test_work_that_fails_is_begun_again() -> None:
    store, begun = Store(), 0

    async def fail() -> None:
        nonlocal begun
        begun += 1
        raise RuntimeError("bug")

    async with electing(elector(store, "one"), fail):
        await eventually(lambda: begun >= 2, within=2, what="work is begun again")


async def test_work_that_does_not_end_ends_the_process() -> None:
    store, release, begun = Store(), asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    leader = elector(store, "one", terms=Terms(lease=2, renew=0.2, retry=0.05))
    async with electing(leader, stubborn) as task:
        try:
            await begun.wait()
            store.fault = "refuse"
            await asyncio.wait([task], timeout=5)
            assert task.done()
            assert isinstance(task.exception(), WorkDidNotEnd)
        finally:
            release.set()


async def test_an_elector_that_does_not_even_try_shows() -> None:
    clock = Clock()
    one = elector(Store(), "one", clock=clock)
    assert one.stalled() is None
    clock.now += 61
    assert one.stalled() == "no progress: elector"
