"""The invariants of ledger, budgets and sums, asked of the tables in one snapshot; and what tests of money do often."""

from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

from run_factory import event, ledger_row

from agentrun.domain.events import Kind
from agentrun.domain.states import RunStatus
from agentrun.store import transitions
from agentrun.store.budgets import Budget
from agentrun.store.pool import Executor
from agentrun.store.transitions import Finish, Flush, LedgerRow

COUNTERS = """
    WITH latest AS (
        SELECT r.id, r.user_id, r.budget_day, r.reserved_usd, r.status IN ('pending', 'running') AS unfinished,
               coalesce((SELECT a.booked_usd FROM attempts a WHERE a.run_id = r.id ORDER BY a.epoch DESC LIMIT 1), 0) AS booked,
               coalesce((SELECT sum(l.cost_usd) FROM ledger l WHERE l.run_id = r.id), 0) AS paid
        FROM runs r
    ), wanted AS (
        SELECT v.scope, l.budget_day AS day, sum(l.paid) AS spent,
               coalesce(sum(greatest(l.reserved_usd - l.booked, 0)) FILTER (WHERE l.unfinished), 0) AS reserved
        FROM latest l CROSS JOIN LATERAL (VALUES ('agent'), ('user:' || l.user_id)) AS v (scope)
        WHERE l.reserved_usd IS NOT NULL GROUP BY 1, 2
    )
    SELECT coalesce(w.scope, c.scope) || ' ' || coalesce(w.day, c.day) || ': reserved ' || coalesce(c.reserved, 0) || ', wanted '
           || coalesce(w.reserved, 0) || '; spent ' || coalesce(c.spent, 0) || ', wanted ' || coalesce(w.spent, 0)
    FROM wanted w FULL JOIN budget_counters c ON c.scope = w.scope AND c.day = w.day
    WHERE coalesce(c.reserved, 0) <> coalesce(w.reserved, 0) OR coalesce(c.spent, 0) <> coalesce(w.spent, 0)
    UNION ALL
    SELECT 'run ' || id || ': booked ' || booked || ', paid ' || paid FROM latest WHERE booked <> paid
"""


async def wrong(conn: Executor) -> list[str]:
    """What is wrong with the budgets: counters against runs, attempts and the ledger. Empty if they agree."""
    return [str(row[0]) for row in await conn.fetch(COUNTERS)]


def budget(run: str = "1", day: str | None = None, user: str | None = None, zone: str = "Etc/UTC") -> Budget:
    """A budget of amounts as text."""
    day_usd, user_usd = (None if usd is None else Decimal(usd) for usd in (day, user))
    return Budget(Decimal(run), day_usd, user_usd, zone)


async def counted(conn: Executor, scope: str = "agent") -> tuple[Decimal, Decimal]:
    """What a scope has reserved and spent, over all days."""
    row = await conn.fetchrow("SELECT sum(reserved), sum(spent) FROM budget_counters WHERE scope = $1", scope)
    assert row is not None
    return row[0] or Decimal(0), row[1] or Decimal(0)


async def books(conn: Executor, run_id: UUID, *rows: LedgerRow, epoch: int = 1) -> None:
    """An attempt stores ledger rows."""
    await transitions.flush(conn, [Flush(run_id, epoch, 128, ledger=rows)])


async def ends(conn: Executor, run_id: UUID, *rows: LedgerRow, epoch: int = 1, seq: int = 0) -> bool:
    """An attempt ends its run, and stores its last ledger rows."""
    last = event(seq, Kind.COMPLETED, epoch=epoch)
    wish = Finish(run_id, epoch, RunStatus.SUCCEEDED, result='{"output": "ok", "messages": []}', events=[last], ledger=rows)
    return (await transitions.finish(conn, [wish]))[0].ok


def paid(cost: str | None, call: int = 0, **more: Any) -> LedgerRow:
    """A call that cost so much."""
    return ledger_row(call, cost=cost, **more)


async def today(conn: Executor) -> date:
    """The day by Postgres' clock, in UTC."""
    found: date = await conn.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date")
    return found
