"""What agents do to the world: recorded before the call goes out, settled after it. The statements are in effects.sql.

Each write is fenced by the attempt that makes it, and may be made again after StoreUnavailable: what was done the first time is found by
its token, or by its state, and answered as done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from agentrun.store.pool import Executor, unavailable


class EffectState(StrEnum):
    """What is known of an effect. initiated: the call may have gone out, and nobody has said what came of it."""

    INITIATED = "initiated"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt's wish to make a call. `token` is made once per wish, `request` is JSON text; with `again`, an effect that was initiated
    before and not settled may be initiated again.
    """

    run_id: UUID
    epoch: int
    token: UUID
    name: str
    key: str
    request: str | None
    again: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """`held`: the attempt still owns its run. `mine`: the call may go out now. Else the rest is what is on record; `tries` counts how often
    the call may have gone out, this time included; `request` and `response` are JSON text. None in `state`: there is no such effect.
    """

    held: bool
    mine: bool
    chain_id: UUID | None
    state: EffectState | None
    tries: int
    request: str | None
    response: str | None


@dataclass(frozen=True, slots=True)
class Settle:
    """What came of a call: done, failed (nothing has happened) or unknown. `response` is JSON text."""

    run_id: UUID
    epoch: int
    name: str
    key: str
    state: EffectState
    response: str | None


@dataclass(frozen=True, slots=True)
class Settled:
    """`held`: the attempt still owns its run. `ok`: the effect is on record as asked."""

    held: bool
    ok: bool


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A call of a run that has ended of which nobody has said what came; `request` is JSON text."""

    run_id: UUID
    user_id: str
    name: str
    key: str
    state: EffectState
    epoch: int
    tries: int
    request: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class EffectRow:
    """An effect as people see it."""

    name: str
    key: str
    state: EffectState
    epoch: int
    tries: int
    created_at: datetime
    settled_at: datetime | None


async def begin(conn: Executor, group: Sequence[Begin]) -> list[Begun]:
    """Records calls that are about to go out, in the order asked. A group holds each effect once. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.begin_effects($1, $2, $3, $4, $5, $6, $7)",
            [item.run_id for item in group],
            [item.epoch for item in group],
            [item.token for item in group],
            [item.name for item in group],
            [item.key for item in group],
            [item.request for item in group],
            [item.again for item in group],
        )
    return [
        Begun(
            held=row["held"],
            mine=row["mine"],
            chain_id=row["chain_id"],
            state=EffectState(row["state"]) if row["state"] else None,
            tries=row["tries"] or 0,
            request=row["request"],
            response=row["response"],
        )
        for row in rows
    ]


async def settle(conn: Executor, group: Sequence[Settle]) -> list[Settled]:
    """Records what came of calls, in the order asked. A group holds each effect once. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            "SELECT * FROM agentrun_1.settle_effects($1, $2, $3, $4, $5, $6)",
            [item.run_id for item in group],
            [item.epoch for item in group],
            [item.name for item in group],
            [item.key for item in group],
            [item.state.value for item in group],
            [item.response for item in group],
        )
    return [Settled(row["held"], row["ok"]) for row in rows]


async def of_run(conn: Executor, run_id: UUID) -> list[EffectRow]:
    """The effects that were last initiated by this run, oldest first. Raises StoreUnavailable."""
    with unavailable():
        rows = await conn.fetch(
            """SELECT name, key, state, epoch, tries, created_at, settled_at FROM effects WHERE run_id = $1
               ORDER BY created_at, name, key""",
            run_id,
        )
    return [EffectRow(row[0], row[1], EffectState(row[2]), *row[3:]) for row in rows]


async def unsettled(
    conn: Executor, *, agent: str, user_id: str | None, before: UUID | None = None, limit: int = 50
) -> list[Unsettled]:
    """Calls of runs that have ended of which nobody knows what came, those of the newest runs first; runs below `before`, and all of a
    run's effects or none, so there may be more than `limit`. `user_id` None means all users. Raises StoreUnavailable.
    """
    with unavailable():
        rows = await conn.fetch(
            """SELECT e.run_id, r.user_id, e.name, e.key, e.state, e.epoch, e.tries, e.request, e.created_at
               FROM effects e JOIN runs r ON r.id = e.run_id
               WHERE e.state IN ('initiated', 'unknown') AND r.status IN ('succeeded', 'failed', 'cancelled', 'superseded')
                 AND r.agent = $1 AND ($2::text IS NULL OR r.user_id = $2) AND ($3::uuid IS NULL OR e.run_id < $3)
               ORDER BY e.run_id DESC FETCH FIRST $4 ROWS WITH TIES""",
            agent,
            user_id,
            before,
            limit,
        )
    found = [Unsettled(row[0], row[1], row[2], row[3], EffectState(row[4]), *row[5:]) for row in rows]
    return sorted(found, key=lambda one: (-one.run_id.int, one.created_at, one.name, one.key))


async def settle_by_hand(
    conn: Executor, run_id: UUID, *, name: str, key: str, state: EffectState, response: str | None
) -> tuple[bool, EffectState | None]:
    """A person says what came of a call of a run that has ended: DONE with its response (JSON text), or FAILED: nothing has happened.

    Answers whether that is on record, now or by an earlier try, and the effect's state; None: the run has no such effect. An attempt of a
    redrive that begins the same effect at the same moment wins or finds it settled: the row decides. Raises StoreUnavailable.
    """
    with unavailable():
        await conn.execute(
            """UPDATE effects e SET state = $4, response = $5::jsonb, settled_at = clock_timestamp()
               WHERE e.run_id = $1 AND e.name = $2 AND e.key = $3 AND e.state IN ('initiated', 'unknown')
                 AND EXISTS (SELECT 1 FROM runs r WHERE r.id = e.run_id AND r.status NOT IN ('pending', 'running'))""",
            run_id,
            name,
            key,
            state.value,
            response,
        )
        row = await conn.fetchrow(
            """SELECT state, state = $4 AND response IS NOT DISTINCT FROM $5::jsonb FROM effects
               WHERE run_id = $1 AND name = $2 AND key = $3""",
            run_id,
            name,
            key,
            state.value,
            response,
        )
    return (bool(row[1]), EffectState(row[0])) if row else (False, None)
