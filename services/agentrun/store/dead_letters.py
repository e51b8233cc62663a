"""Reading dead letters."""

from agentrun.store.pool import Executor, unavailable


async def count_open(conn: Executor) -> int:
    """How many runs were given up and not redriven. Raises StoreUnavailable."""
    with unavailable():
        return int(await conn.fetchval("SELECT count(*) FROM dead_letters WHERE redriven_run_id IS NULL"))
