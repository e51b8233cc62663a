"""Which replica leads: a Lease in the cluster, held by one at a time.

The clock is monotonic. A Lease of somebody else counts as expired when it has been *seen unchanged* for its duration, so clocks of
different machines are never compared. A renewal holds from before its request was sent. At the renew deadline, which is shorter
than the lease, work is cancelled, whether the API server refuses, is away, or hangs. What is written after that is still correct,
since every write is one that both replicas would make; the Lease only keeps them from making them twice.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Protocol

import structlog

from agentrun.domain.errors import AgentrunError
from agentrun_operator.metrics import LEADER
from agentrun_operator.resources import LEASES, Ref

Body = dict[str, Any]
_log = structlog.get_logger(__name__)


class LeaseStore(Protocol):
    """What the elector needs of the API server."""

    async def get(self, ref: Ref) -> Body | None: ...
    async def create(self, ref: Ref, body: Body) -> Body: ...
    async def replace(self, ref: Ref, body: Body) -> Body: ...


class WorkDidNotEnd(AgentrunError):
    """Work goes on although it was cancelled: only the end of the process can stop it before another replica leads."""


class Try(Enum):
    """How one try to take or renew the Lease ended."""

    HELD = "held"
    TAKEN = "taken"
    """Somebody else holds it."""
    UNKNOWN = "unknown"
    """No answer, or somebody changed it at the same moment."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds: how long the Lease lasts, when work stops that could not renew it, and the pause between tries."""

    lease: int = 15
    renew: float = 10.0
    retry: float = 2.0


class Elector:
    """Runs work while it holds the Lease `ref` as `identity`."""

    def __init__(
        self,
        store: LeaseStore,
        ref: Ref,
        identity: str,
        *,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        assert ref.resource == LEASES
        self._store = store
        self._ref = ref
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._now = now
        self._seen: tuple[object, float] = (None, 0.0)
        self._deadline = 0.0
        """Until when the last renewal holds; 0.0 if there was none."""
        self._stamped = clock()
        self._said = ""
        self.leading = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Takes the Lease, works, and stands by again when it is lost. Never returns; raises WorkDidNotEnd."""
        while True:
            while await self._try(2 * self._terms.retry) is not Try.HELD:
                await self._pause()
            await self._lead(work)
            await self._pause()

    async def attempt(self) -> Try:
        """One try. HELD lasts until the renew deadline, counted from before the request. Raises KubeError."""
        begun = self._clock()
        lease = await self._store.get(self._ref)
        if lease is None:
            spec = {**self._spec(), "acquireTime": _stamp(self._now()), "leaseTransitions": 0}
            await self._store.create(self._ref, {"spec": spec})
        else:
            spec = lease.get("spec") or {}
            self._see(lease, begun)
            mine = spec.get("holderIdentity") == self._identity
            if not mine and self._is_held(spec, begun):
                return Try.TAKEN
            changed = self._spec()
            if not mine:
                changed |= {"acquireTime": _stamp(self._now()), "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
            # The resourceVersion of the body makes it fail if anybody was faster.
            await self._store.replace(self._ref, {**lease, "spec": {**spec, **changed}})
        self._deadline = begun + self._terms.renew
        return Try.HELD

    async def release(self, *, within: float = 3.0) -> bool:
        """Gives the Lease back at the end of the process, so that another replica need not wait. Whether it was ours to give."""
        if not self._deadline:
            return False
        try:
            async with asyncio.timeout(within):
                lease = await self._store.get(self._ref)
                spec = (lease or {}).get("spec") or {}
                if lease is None or spec.get("holderIdentity") != self._identity:
                    return False
                given_back = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _stamp(self._now())}
                await self._store.replace(self._ref, {**lease, "spec": given_back})
        except (TimeoutError, AgentrunError) as error:
            _log.warning("lease not released", error=str(error) or "no answer")
            return False
        _log.info("lease released", lease=str(self._ref))
        return True

    def stalled(self, *, after: float = 60.0) -> str | None:
        """What is wrong if no try was even begun for that long."""
        return "no progress: elector" if self._clock() - self._stamped > after else None

    async def _lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        _log.info("leading", lease=str(self._ref), identity=self._identity)
        task = asyncio.create_task(work(), name="leader")
        self._lead_is(True)
        why = "work ended"
        try:
            while not task.done():
                left = self._deadline - self._clock()
                if left <= 0:
                    why = "renew deadline passed"
                    break
                await asyncio.wait([task], timeout=min(self._terms.retry, left))
                if task.done():
                    break
                left = self._deadline - self._clock()
                if left > 0 and await self._try(min(left, 2 * self._terms.retry)) is Try.TAKEN:
                    why = "somebody else holds the lease"
                    break
        finally:
            self._lead_is(False)
            await self._end(task)
            _log.warning("no longer leading", reason=why)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=max(self._terms.lease - self._terms.renew, 1.0))
        if not done:
            raise WorkDidNotEnd("work goes on after the loss of the Lease; the process ends so that it stops")
        with contextlib.suppress(asyncio.CancelledError):
            if error := task.exception():
                _log.error("work failed", error=repr(error), exc_info=error)

    async def _try(self, limit: float) -> Try:
        self._stamped = self._clock()
        try:
            async with asyncio.timeout(max(limit, 0.05)):
                result = await self.attempt()
        except (TimeoutError, AgentrunError, ValueError) as error:
            self._say(str(error) or f"no answer within {limit:.1f} s")
            return Try.UNKNOWN
        self._say("")
        return result

    def _say(self, wrong: str) -> None:
        """Logs a change of what is wrong, not each try."""
        if wrong != self._said and wrong:
            _log.warning("lease not renewed" if self.leading else "lease not taken", error=wrong)
        self._said = wrong

    def _lead_is(self, leading: bool) -> None:
        self.leading = leading
        LEADER.set(leading)

    async def _pause(self) -> None:
        await asyncio.sleep(self._terms.retry * random.uniform(0.8, 1.2))

    def _see(self, lease: Body, at: float) -> None:
        """Notes since when the Lease has looked as it does."""
        spec = lease.get("spec") or {}
        look = (spec.get("holderIdentity"), spec.get("renewTime"), lease["metadata"].get("resourceVersion"))
        if self._seen[0] != look:
            self._seen = (look, at)

    def _is_held(self, spec: Body, at: float) -> bool:
        duration = float(spec.get("leaseDurationSeconds") or self._terms.lease)
        return bool(spec.get("holderIdentity")) and at < self._seen[1] + duration

    def _spec(self) -> Body:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._terms.lease,
            "renewTime": _stamp(self._now()),
        }


def _stamp(when: datetime) -> str:
    """MicroTime, as the API server writes it."""
    return when.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
