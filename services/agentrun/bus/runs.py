"""The work stream: which runs somebody should work on. It hints; whether a run may be claimed is decided in Postgres.

Its invariant: the hash of entries holds a run exactly as long as the run's newest entry is waiting or pending. Only the
scripts write both, so it also holds after a crash, and after FLUSHALL both are empty.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from redis.asyncio import Redis

from agentrun.bus.connection import (
    ANSWER_SECONDS,
    DedicatedConnection,
    GroupMissing,
    answering,
    check,
    script,
)
from agentrun.bus.keys import GROUP, Keys
from agentrun.domain.errors import BusUnavailable
from agentrun.domain.ids import parse_id

BEGINNING = "0-0"
"""The cursor with which a pass of `autoclaim` begins and ends."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry that a consumer holds now. `run_id` is None if its field `run` is missing or is not an id."""

    entry_id: str
    run_id: UUID | None


@dataclass(frozen=True, slots=True)
class Held:
    """A run and the entry that the caller holds of it: no entry if it came from Postgres, no run if the entry names none."""

    run_id: UUID | None
    entry_id: str | None


class Reclaimed(NamedTuple):
    """One page of `autoclaim`: the cursor for the next one, what was claimed, and entries that are in the stream no more."""

    cursor: str
    deliveries: list[Delivery]
    deleted: list[str]


class WorkStream:
    """The work stream of one AgentRun. Every method raises BusUnavailable when Redis does not do its part."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._pool = redis.connection_pool
        self._keys = keys
        self._both = [keys.runs, keys.entries]
        self._reader = DedicatedConnection(self._pool)
        self._ready = False
        self._recovering = False
        self._create_group = script(redis, "create_group")
        self._publish = script(redis, "publish")
        self._republish = script(redis, "republish")
        self._acknowledge = script(redis, "acknowledge")
        self._refresh = script(redis, "refresh")
        self._keep = script(redis, "keep")
        self._autoclaim = script(redis, "autoclaim")
        self._give_back = script(redis, "give_back")
        self._existing = script(redis, "existing")
        self._trim = script(redis, "trim")
        self._retire = script(redis, "retire")
        self._forget = script(redis, "forget")

    async def aclose(self) -> None:
        """Closes the connection for reads; the client that was given in stays open."""
        await self._reader.aclose()

    async def ensure_group(self) -> None:
        """Creates stream and group if they are missing, after `check`: raises BusMisconfigured if keys may be evicted.

        The group begins at 0: what was added before it is delivered, and what is finished long since is acknowledged then.
        """
        await check(self._redis)
        async with answering(self._pool):
            await self._create_group([self._keys.runs, self._keys.born], [GROUP])
        self._ready = True

    async def publish(self, run_ids: Sequence[UUID]) -> int:
        """Adds an entry for each run that has none, and wakes whoever listens. Returns how many were added."""
        if not run_ids:
            return 0
        async with answering(self._pool):
            added = await self._publish(self._both, [self._keys.wake, *map(str, run_ids)])
        return int(added)

    async def republish(self, held: Sequence[Held]) -> list[str]:
        """Gives each run a new entry; the entry held and the one known before are acknowledged. Returns the new entries.

        Each `held` names its run. Publishing a run twice is harmless, so this is called whenever in doubt.
        """
        if not held:
            return []
        pairs = [part for one in held for part in (str(_run(one)), one.entry_id or "")]
        async with answering(self._pool):
            entries = await self._republish(self._both, [GROUP, self._keys.wake, *pairs])
        return [_text(entry) for entry in entries]

    async def acknowledge(self, held: Sequence[Held]) -> int:
        """Takes entries off the pending list for good; each `held` names its entry. Returns how many were pending."""
        pairs = [part for one in held if one.entry_id for part in (str(one.run_id or ""), one.entry_id)]
        if not pairs:
            return 0
        async with answering(self._pool):
            return int(await self._acknowledge(self._both, [GROUP, *pairs]))

    async def read(self, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        """At most `count` new entries for this consumer, waiting for the first at most `block_ms` (0: not at all).

        Uses a connection of its own, so at most one read waits at a time; cancel it at will, but an entry that was on its
        way is then pending and left to the reaper. If the group or the connection is gone, both are made anew and the
        answer is empty; raises BusUnavailable if that fails, or twice in a row.
        """
        if not self._ready:
            await self.ensure_group()
        block: list[str | int] = ["BLOCK", block_ms] if block_ms > 0 else []
        command = ["XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, *block, "STREAMS", self._keys.runs, ">"]
        try:
            async with answering(self._pool, block_ms / 1000 + ANSWER_SECONDS):
                reply = await self._reader.call(*command)
        except BusUnavailable:
            self._ready = False
            if self._recovering:
                raise
            self._recovering = True
            await self.ensure_group()
            return []
        self._recovering = False
        return [_delivery(entry, fields) for _, found in reply or () for entry, fields in found]

    async def refresh(self, consumer: str, entry_ids: Sequence[str]) -> set[str]:
        """Resets the idle time of the entries that are still this consumer's, and returns those."""
        if not entry_ids:
            return set()
        with contextlib.suppress(GroupMissing):
            async with answering(self._pool):
                return {_text(entry) for entry in await self._refresh([self._keys.runs], [GROUP, consumer, *entry_ids])}
        return set()

    async def keep(self, consumer: str, held: Sequence[Held]) -> list[str | None]:
        """The same for runs that this consumer works on; an entry that the stream has lost, as after FLUSHALL, is put back.

        Each `held` names its run and entry. Answers for each the entry that this consumer holds now; None: somebody else will handle
        one. The caller acknowledges what was put back for a run that has ended meanwhile.
        """
        if not held:
            return []
        arguments = [GROUP, consumer, *(part for one in held for part in (str(_run(one)), one.entry_id or BEGINNING))]
        try:
            async with answering(self._pool):
                found = await self._keep(self._both, arguments)
        except GroupMissing:
            await self.ensure_group()
            async with answering(self._pool):
                found = await self._keep(self._both, arguments)
        return [_text(entry) or None for entry in found]

    async def autoclaim(self, consumer: str, *, idle_ms: int, cursor: str, count: int) -> Reclaimed:
        """Claims up to `count` entries that nobody has touched for `idle_ms`, from `cursor` on.

        Keep the cursor from call to call, so that a page that cannot be handled does not hide the later ones; it is
        `BEGINNING` when the pass is through, and when the group had to be made anew. Entries reported as deleted are to be
        counted and acknowledged; their runs are found by whoever compares Postgres with `entries` and `existing`.
        """
        arguments: list[str | int] = [GROUP, consumer, idle_ms, cursor, count]
        try:
            async with answering(self._pool):
                following, found, deleted = await self._autoclaim([self._keys.runs], arguments)
        except GroupMissing:
            await self.ensure_group()
            return Reclaimed(BEGINNING, [], [])
        deliveries = [Delivery(_text(entry), _run_id(run)) for entry, run in zip(found[::2], found[1::2], strict=True)]
        return Reclaimed(_text(following), deliveries, [_text(entry) for entry in deleted])

    async def give_back(self, owners: Sequence[tuple[str, str]]) -> None:
        """Hands entries (id, consumer) that were claimed by mistake to the consumers whose they are.

        An entry that has been acknowledged meanwhile stays so. JUSTID: the delivery counter is not raised.
        """
        if not owners:
            return
        pairs = [part for pair in owners for part in pair]
        with contextlib.suppress(GroupMissing):
            async with answering(self._pool):
                await self._give_back([self._keys.runs], [GROUP, *pairs])

    async def entries(self, run_ids: Sequence[UUID]) -> Mapping[UUID, str | None]:
        """The entry of each run, or None: then nobody will hear of it unless it is published."""
        if not run_ids:
            return {}
        async with answering(self._pool):
            found: list[Any] = await self._redis.hmget(self._keys.entries, [str(run_id) for run_id in run_ids])
        return {run_id: _text(entry) if entry else None for run_id, entry in zip(run_ids, found, strict=True)}

    async def existing(self, entry_ids: Sequence[str]) -> set[str]:
        """Those of the entries that will still be handled: in the stream, and not delivered yet or pending."""
        if not entry_ids:
            return set()
        async with answering(self._pool):
            return {_text(entry) for entry in await self._existing([self._keys.runs], [GROUP, *entry_ids])}

    async def exists(self, entry_id: str) -> bool:
        """The same for one entry."""
        return entry_id in await self.existing([entry_id])

    async def trim(self) -> int:
        """Removes the entries that nobody needs any more, and returns how many."""
        async with answering(self._pool):
            return int(await self._trim([self._keys.runs], [GROUP]))

    async def forget_lost(self, *, idle_ms: int, cursor: int = 0, count: int = 1000) -> tuple[int, int]:
        """Looks at about `count` runs' entry ids from `cursor` on and forgets those, older than `idle_ms`, that the stream has lost.

        Returns the next cursor (0: all have been looked at) and how many were forgotten.
        """
        async with answering(self._pool):
            following, forgotten = await self._forget([self._keys.runs, self._keys.entries], [cursor, count, idle_ms])
        return int(following), int(forgotten)

    async def retire_consumers(self, idle_ms: int) -> list[str]:
        """Deletes consumers that have been idle so long and hold nothing, and returns their names.

        `idle_ms` must be well above the time that a read blocks. A consumer that was only waiting comes back with its next
        delivery (Redis 7.0 does not count waiting as activity).
        """
        async with answering(self._pool):
            return [_text(name) for name in await self._retire([self._keys.runs], [GROUP, idle_ms])]


def _run(held: Held) -> UUID:
    if held.run_id is None:
        raise ValueError(f"republish: the entry {held.entry_id} names no run: acknowledge it instead")
    return held.run_id


def _delivery(entry: bytes, fields: Sequence[bytes] | None) -> Delivery:
    pairs: dict[bytes, Any] = dict(zip(fields[::2], fields[1::2], strict=True)) if fields else {}
    return Delivery(_text(entry), _run_id(pairs.get(b"run", b"")))


def _run_id(value: bytes) -> UUID | None:
    return parse_id(value.decode("ascii", "replace"))


def _text(value: bytes) -> str:
    return value.decode()
