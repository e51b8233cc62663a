"""How many connections an AgentRun holds to Postgres, against the formula of docs/operations.md."""

import asyncio
import re
from pathlib import Path

import asyncpg
from doc_blocks import ROOT
from processes import ProductProcesses
from whole_path import system

GATEWAYS, WORKERS, POOL_SIZE = 2, 2, 3
SAMPLE = """
SELECT application_name, count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid() GROUP BY 1
"""


def most() -> dict[str, int]:
    """The terms of the formula by the name that the connections have, without those of the operator and of a migration."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.search(
        r"\(gateway\.replicas \+ workers\.maxReplicas \+ scheduler\.replicas\) × database\.poolSize  \+  workers\.maxReplicas \(leases\)",
        page,
    )
    return {
        "agentrun-gateway": GATEWAYS * POOL_SIZE,
        "agentrun-worker": WORKERS * POOL_SIZE,
        "agentrun-scheduler": POOL_SIZE,
        "agentrun-leases": WORKERS,
    }


async def test_no_more_connections_than_the_formula_says(
    database_url: str, redis_url: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    seen: dict[str, int] = {}
    watcher = await asyncpg.connect(database_url, server_settings={"application_name": "watcher"})

    async def watch() -> None:
        while True:
            for name, count in await watcher.fetch(SAMPLE):
                seen[name] = max(seen.get(name, 0), count)
            await asyncio.sleep(0.02)

    async with system(database_url, redis_url, product_processes, tmp_path) as whole:
        manifest = tmp_path / "agentrun.yaml"
        manifest.write_text(manifest.read_text() + f"  database: {{poolSize: {POOL_SIZE}}}\n")
        watching = asyncio.create_task(watch())
        await asyncio.gather(
            whole.scheduler(), *(whole.gateway() for _ in range(GATEWAYS)), *(whole.worker() for _ in range(WORKERS))
        )
        texts = [f"[[slow ms=20]] [[deltas n=20]] {number}" for number in range(30)]
        runs = await asyncio.gather(*(whole.submit(text, session=f"s{number}") for number, text in enumerate(texts)))
        await asyncio.gather(*(whole.follow(run) for run in runs))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await watcher.close()

    ours = {name: count for name, count in seen.items() if name.startswith("agentrun")}
    limits = most()
    assert ours.keys() == limits.keys()
    assert all(count <= limits[name] for name, count in ours.items()), (ours, limits)
    assert ours["agentrun-leases"] == WORKERS and ours["agentrun-worker"] > WORKERS
