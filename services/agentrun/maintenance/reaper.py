"""Takes runs from dead attempts, and looks again at entries that were delivered and then forgotten.

Two inputs, because each covers what the other cannot see: attempts past their lease, by a query, whatever Redis holds; and entries
that nobody has touched for long, by XAUTOCLAIM. Any number of reapers may run: the conditions in Postgres and the scripts in Redis
decide. Losing a pending entry never ends an attempt; only its lease does.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID

import structlog

from agentrun import failpoints
from agentrun.bus.events import EventStream
from agentrun.bus.runs import BEGINNING, Delivery, Held, WorkStream
from agentrun.control.contact import Contact
from agentrun.control.reaping import Action, for_reaper
from agentrun.domain.errors import BusUnavailable, StoreUnavailable
from agentrun.domain.states import FINAL, Outcome, RunStatus
from agentrun.maintenance.batches import in_batch
from agentrun.store import attempts, runs, transitions
from agentrun.store.pool import Pool
from agentrun.store.transitions import AttemptRef, Reason, TakenOver, TakeOver
from agentrun.telemetry import ATTEMPTS_ENDED, DEAD_LETTERS, ENTRIES, RUNS_FINISHED, TAKEOVERS

PAGE = 100
MOST_PAGES = 20
"""Pages of one tick: the rest waits for the next one, so that progress shows."""
SHORTEST_GAP_SECONDS = 1.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The manifest's numbers: workers.leaseSeconds, and those of spec.reaper."""

    lease_seconds: float
    idle_seconds: float
    interval_seconds: float
    max_lost_attempts: int


class Reaper:
    """One reaper of one AgentRun. Its two inputs are two methods, so that an outage of Redis does not slow down the first.

    `consumer` is its own name in the group: stuck entries pass through its hands.
    """

    def __init__(self, pool: Pool, stream: WorkStream, events: EventStream, *, consumer: str, limits: Limits) -> None:
        self._pool = pool
        self._stream = stream
        self._events = events
        self._consumer = consumer
        self.limits = replace(limits, interval_seconds=min(limits.interval_seconds, limits.lease_seconds / 5))
        """As given, but a reaper that looks less than a few times in a lease could not tell a stall from its own pause."""
        self._cursor = BEGINNING
        # A living worker renews every third of a lease: half a lease of silence leaves it the time to do so.
        gap = timedelta(seconds=max(limits.lease_seconds / 2, SHORTEST_GAP_SECONDS))
        self._lease_contact = Contact(lease=timedelta(seconds=limits.lease_seconds), longest_gap=gap)
        self._entry_contact = Contact(lease=timedelta(seconds=limits.lease_seconds), longest_gap=gap)

    @property
    def steady(self) -> bool:
        """Whether the contact with Postgres has lasted for a lease, so that attempts past theirs are taken over."""
        return self._lease_contact.steady and self._entry_contact.steady

    async def tick(self) -> None:
        """Both inputs, once. Raises StoreUnavailable, BusUnavailable, BusMisconfigured."""
        await self.reap_leases()
        await self.reap_entries()

    async def reap_leases(self) -> None:
        """Takes over every run whose attempt is past its lease, also while Redis is away. Raises StoreUnavailable."""
        contact, failed = self._lease_contact, set[AttemptRef]()
        for _ in range(MOST_PAGES):
            page = await _answered(contact, attempts.expired(self._pool, limit=PAGE + len(failed)))
            contact.reached(page.clock.now, started=page.clock.started)
            until = contact.good_until
            todo = [ref for ref in page.refs if ref not in failed]
            if not todo or until is None:
                return
            failed.update(await in_batch(todo, partial(self._reap_attempts, until=until), loop="reap-leases"))
            if len(todo) < PAGE:
                return

    async def reap_entries(self) -> None:
        """Looks again at entries untouched for idleSeconds. Raises StoreUnavailable, BusUnavailable, BusMisconfigured.

        Postgres is asked first: an entry that is claimed while it is away would only be hidden for another idleSeconds.
        """
        contact = self._entry_contact
        for _ in range(MOST_PAGES):
            clock = await _answered(contact, attempts.clock(self._pool))
            contact.reached(clock.now, started=clock.started)
            page = await self._stream.autoclaim(
                self._consumer, idle_ms=int(self.limits.idle_seconds * 1000), cursor=self._cursor, count=PAGE
            )
            self._cursor = page.cursor
            if page.deliveries or page.deleted:
                await failpoints.hit("reaper.autoclaimed")
            if page.deleted:
                ENTRIES.labels("deleted").inc(len(page.deleted))
                await self._stream.acknowledge([Held(None, entry) for entry in page.deleted])
            await in_batch(page.deliveries, partial(self._reap_deliveries, until=contact.good_until), loop="reap-entries")
            if page.cursor == BEGINNING:
                return

    async def _reap_attempts(self, refs: Sequence[AttemptRef], *, until: datetime) -> None:
        taken = await self._take_over(refs, until)
        try:
            await self._announce(taken, held={})
        except BusUnavailable as error:  # what is in Postgres is enough: the sweep and the next pass over entries find it
            _log.warning("runs were taken over, and Redis could not be told", runs=len(taken), error=str(error))

    async def _reap_deliveries(self, deliveries: Sequence[Delivery], *, until: datetime | None) -> None:
        looks = await runs.look(self._pool, [one.run_id for one in deliveries if one.run_id])
        held: dict[Action, list[Held]] = {action: [] for action in Action}
        for one in deliveries:
            action = for_reaper(looks.get(one.run_id) if one.run_id else None)
            if action is Action.TAKE_OVER and until is None:
                action = Action.LEAVE
            held[action].append(Held(one.run_id, one.entry_id))
        await failpoints.hit("reaper.looked")
        await self._stream.acknowledge(held[Action.ACK] + held[Action.ORPHAN])
        await self._stream.give_back(
            [
                (one.entry_id, _consumer_of(looks[one.run_id].owner))
                for one in held[Action.GIVE_BACK]
                if one.run_id and one.entry_id
            ]
        )
        await self._republish(held[Action.REPUBLISH])
        lost = {one.run_id: one.entry_id for one in held[Action.TAKE_OVER] if one.run_id and one.entry_id}
        if lost and until is not None:
            taken = await self._take_over([AttemptRef(run_id, looks[run_id].epoch) for run_id in lost], until)
            await self._announce(taken, held=lost)
        for action, entries in held.items():
            ENTRIES.labels(action.value).inc(len(entries))

    async def _take_over(self, refs: Sequence[AttemptRef], until: datetime) -> list[TakenOver]:
        """Ends lost attempts, unless it is later than `until`; answers for those that were lost indeed.

        A run is named once: the last attempt is the one that runs.
        """
        group = [TakeOver(run_id, Reason.LOST, epoch) for run_id, epoch in {ref.run_id: ref.epoch for ref in refs}.items()]
        taken = await transitions.take_over(self._pool, group, max_lost_attempts=self.limits.max_lost_attempts, until=until)
        await failpoints.hit("reaper.taken")
        taken = [one for one in taken if one.ok]
        for one in taken:
            TAKEOVERS.labels(Reason.LOST.value).inc()
            ATTEMPTS_ENDED.labels(Outcome.LOST.value).inc()
            if one.status is RunStatus.FAILED:
                DEAD_LETTERS.inc()
                RUNS_FINISHED.labels(one.status.value).inc()
            _log.warning("took over a run", run_id=str(one.run_id), epoch=one.epoch, owner=one.owner, status=one.status)
        return taken

    async def _announce(self, taken: Sequence[TakenOver], *, held: Mapping[UUID, str]) -> None:
        """Tells the readers, lets the runs go on, and frees the entries of those that ended. Harmless to repeat.

        `held` are the entries in this reaper's hands, by run; an entry of another run is looked up.
        """
        if not taken:
            return
        await self._events.append([(one.run_id, event) for one in taken for event in one.events])
        known = {**await self._stream.entries([one.run_id for one in taken if one.run_id not in held]), **held}
        await self._republish([Held(one.run_id, known[one.run_id]) for one in taken if one.status is RunStatus.PENDING])
        await self._stream.acknowledge([Held(one.run_id, known[one.run_id]) for one in taken if one.status in FINAL])
        heads = {one.next_head for one in taken if one.next_head and one.status in FINAL}
        if heads:
            await self._stream.publish(sorted(heads))

    async def _republish(self, held: Sequence[Held]) -> None:
        if held:
            await self._stream.republish(held)
            await failpoints.hit("reaper.republished")


async def _answered(contact: Contact, question: Awaitable[T]) -> T:
    try:
        return await question
    except StoreUnavailable:
        contact.broken()
        raise


def _consumer_of(owner: str | None) -> str:
    """An attempt's owner is consumer/nonce; see the worker."""
    return (owner or "").rpartition("/")[0]
