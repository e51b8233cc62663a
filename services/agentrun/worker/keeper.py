"""The thread that keeps a worker's leases.

It has its own event loop and connections, so that an agent that blocks the worker's loop costs no lease. It renews in
Postgres and refreshes the entries in Redis every third of a lease, and it watches the worker's loop: one that has not
come round since an attempt's last moment can end no attempt any more, so the process ends instead and the leases run out.
Whatever must answer while the worker's loop is blocked runs here too (`beside`): the health server.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import redis.asyncio

from agentrun.bus import connection
from agentrun.bus.keys import Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.store import pool, transitions
from agentrun.store.transitions import AttemptRef, Renewal
from agentrun.telemetry import LEASE_RENEWALS
from agentrun.worker.lease import Lease
from agentrun.worker.patience import Complaint

RETRY_SECONDS = 0.5
WATCH_SECONDS = 0.25
BLOCKED_SECONDS = 5.0
BLOCKED_EXIT_CODE = 70


class Stores(Protocol):
    """What the keeper needs of the stores; made, used and closed inside the keeper's own loop."""

    async def renew(self, refs: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
        """Renews in Postgres; answers the attempts that still own their runs. Raises StoreUnavailable."""
        ...

    async def refresh(self, entry_ids: Sequence[str]) -> None:
        """Keeps the entries from being reclaimed. Raises BusUnavailable."""
        ...

    async def keep(self, held: Sequence[Held]) -> Sequence[str | None]:
        """The same for runs at work, whose lost entries are put back; answers their entries now. Raises BusUnavailable."""
        ...

    async def acknowledge(self, held: Sequence[Held]) -> None:
        """Takes entries away. Raises BusUnavailable."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class LeaseStores:
    """`Stores` on one connection to each store. After any failure the connection is dropped: a late answer reaches nobody."""

    def __init__(self, database_url: str, redis_url: str, keys: Keys, consumer: str) -> None:
        self._database_url = database_url
        self._redis_url = redis_url
        self._keys = keys
        self._consumer = consumer
        self._connection: pool.Connection | None = None
        self._redis: redis.asyncio.Redis | None = None
        self._work: WorkStream | None = None

    async def renew(self, refs: Sequence[AttemptRef], *, lease_seconds: float) -> Renewal:
        """Renews in Postgres."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await pool.connect(self._database_url, name="agentrun-leases")
        try:
            return await transitions.renew(self._connection, refs, lease_seconds=lease_seconds)
        except BaseException:
            self._connection.terminate()
            self._connection = None
            raise

    async def refresh(self, entry_ids: Sequence[str]) -> None:
        """Refreshes in Redis."""
        await (await self._stream()).refresh(self._consumer, entry_ids)

    async def keep(self, held: Sequence[Held]) -> Sequence[str | None]:
        """Refreshes in Redis, and puts back."""
        return await (await self._stream()).keep(self._consumer, held)

    async def acknowledge(self, held: Sequence[Held]) -> None:
        """Acknowledges in Redis."""
        await (await self._stream()).acknowledge(held)

    async def _stream(self) -> WorkStream:
        if self._work is None:
            self._redis = await connection.connect(self._redis_url)
            self._work = WorkStream(self._redis, self._keys)
        return self._work

    async def close(self) -> None:
        """Closes both."""
        if self._connection is not None:
            self._connection.terminate()
        if self._work is not None:
            await self._work.aclose()
        if self._redis is not None:
            await self._redis.aclose()


def end_process(message: str) -> None:
    """The last resort: ends the process from outside its blocked loop."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201 (the log may belong to the blocked thread)
    os._exit(BLOCKED_EXIT_CODE)


class LeaseKeeper:
    """Keeps the leases of one worker. `start` and `stop` in the worker's loop; `add` and `remove` from there too."""

    def __init__(
        self,
        stores: Callable[[], Stores],
        *,
        lease_seconds: float,
        on_blocked: Callable[[str], None] = end_process,
        blocked_seconds: float = BLOCKED_SECONDS,
        beside: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._make_stores = stores
        self._lease_seconds = lease_seconds
        self._on_blocked = on_blocked
        self._blocked_seconds = blocked_seconds
        self._beside = beside
        self._failure: Exception | None = None
        self._leases: dict[AttemptRef, Lease] = {}
        self._entries: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._up, self._down = asyncio.Event(), asyncio.Event()  # of the worker's loop: no thread is needed to wait
        self._came_round = time.monotonic()
        self._worker_loop: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._hurry: asyncio.Event
        self._end: asyncio.Event

    async def start(self) -> None:
        """Starts the thread. Raises what `beside` raises."""
        self._worker_loop = asyncio.get_running_loop()
        self._came_round = time.monotonic()
        self._thread.start()
        await self._up.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Ends the thread; what is still leased runs out."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._patience + 1):
                await self._down.wait()

    @property
    def blocked(self) -> float:
        """For how many seconds the worker's loop has not come round."""
        return time.monotonic() - self._came_round

    def add(self, lease: Lease) -> None:
        """Keeps this lease from now on; one with little time left is renewed at once."""
        with self._lock:
            self._leases[lease.ref] = lease
        if lease.deadline - time.monotonic() < self._lease_seconds / 2:
            self._loop.call_soon_threadsafe(self._hurry.set)

    def remove(self, lease: Lease) -> None:
        """Lets go of it."""
        with self._lock:
            self._leases.pop(lease.ref, None)

    def hold(self, entry_id: str) -> None:
        """Refreshes an entry that has no lease yet."""
        with self._lock:
            self._entries.add(entry_id)

    def let_go(self, entry_id: str) -> None:
        """Refreshes it no more."""
        with self._lock:
            self._entries.discard(entry_id)

    def _held(self) -> list[Lease]:
        with self._lock:
            return list(self._leases.values())

    def _holds(self, lease: Lease) -> bool:
        with self._lock:
            return lease.ref in self._leases

    @property
    def _patience(self) -> float:
        """How long a store may take to answer: no longer than the time between two renewals."""
        return max(self._lease_seconds / 3, 0.5)

    # --- the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._failure = error
        finally:
            self._tell(self._up.set, self._down.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hurry, self._end = asyncio.Event(), asyncio.Event()
        async with self._beside():
            self._tell(self._up.set)
            stores = self._make_stores()
            loops = [
                asyncio.create_task(self._again(self._renew, stores, self._hurry, what="cannot renew leases")),
                asyncio.create_task(self._again(self._refresh, stores, asyncio.Event(), what="cannot refresh entries")),
                asyncio.create_task(self._watch()),
            ]
            await self._end.wait()
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._patience):
                    await stores.close()

    def _tell(self, *callbacks: Callable[[], object]) -> None:
        """Calls back in the worker's loop, if it still runs."""
        with contextlib.suppress(RuntimeError):
            for callback in callbacks:
                self._worker_loop.call_soon_threadsafe(callback)

    async def _again(self, step: Callable[[Stores], Awaitable[None]], stores: Stores, hurry: asyncio.Event, *, what: str) -> None:
        """Does the step every third of a lease, sooner in a hurry or after a failure; no error ends it."""
        complaint = Complaint(what)
        while True:
            pause = self._lease_seconds / 3
            try:
                async with asyncio.timeout(self._patience):
                    await step(stores)
                complaint.over()
            except Exception as error:
                complaint.about(error)
                pause = min(pause, RETRY_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await hurry.wait()
            except TimeoutError:
                pass

    async def _renew(self, stores: Stores) -> None:
        self._hurry.clear()
        leases = self._held()
        if not leases:
            return
        start = time.monotonic()
        try:
            answer = await stores.renew([lease.ref for lease in leases], lease_seconds=self._lease_seconds)
        except BaseException:
            LEASE_RENEWALS.labels("failed").inc(len(leases))
            raise
        for lease in leases:
            if lease.ref in answer.renewed:
                LEASE_RENEWALS.labels("late" if lease.in_doubt else "renewed").inc()
                lease.renewed(start + self._lease_seconds)
            elif lease.ref in answer.lost and self._holds(lease):
                LEASE_RENEWALS.labels("lost").inc()
                self.remove(lease)
                lease.ended()

    async def _refresh(self, stores: Stores) -> None:
        with self._lock:
            entries = [*self._entries]
        if entries:
            await stores.refresh(entries)
        # In doubt, somebody else may have the run: nothing is put back for it.
        kept = [(lease, entry) for lease in self._held() if not lease.in_doubt and (entry := lease.entry_id) is not None]
        if not kept:
            return
        found = await stores.keep([Held(lease.ref.run_id, entry) for lease, entry in kept])
        late = [
            Held(lease.ref.run_id, now)
            for (lease, before), now in zip(kept, found, strict=True)
            if now not in (None, before) and not lease.entry_put_back(now)
        ]
        if late:
            await stores.acknowledge(late)

    async def _watch(self) -> None:
        """Ends the process when the worker's loop has been blocked past an attempt's last moment."""
        while True:
            before = time.monotonic()
            self._tell(self._beat)
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if now - before > 4 * WATCH_SECONDS:
                self._came_round = now  # nor did this thread run: the process was stopped, which is no fault of the loop
            message = self._judge(now)
            if message is not None:
                self._on_blocked(message)

    def _judge(self, now: float) -> str | None:
        last = min((lease.stops_at for lease in self._held()), default=now)
        if now - max(self._came_round, last) <= self._blocked_seconds:
            return None
        return (
            f"the event loop has been blocked for {now - self._came_round:.0f} s, past the maxRunSeconds of a run: "
            "ending the process; its runs go on elsewhere when their leases are over"
        )

    def _beat(self) -> None:
        self._came_round = time.monotonic()
