"""How the operator carries many AgentRuns: time to reconcile all of them from a cold start, then what it costs when nothing happens.

    make bench-operator                    100, 300 and 1,000 AgentRuns
    make bench-operator COUNTS="100"
    make bench-operator COUNTS="50 --idle=300"

A real API server ($KUBEBUILDER_ASSETS), Postgres and Redis from wheels. Each AgentRun has a database of its own, made from a template
and reserved for it before the clock starts, so that no migration is timed; a thousand of them take 8 GB below /tmp until the end. No pods
run: the bench says that Deployments have come up. The operator is a process started as users start it, at its default settings. The last
line is the summary; it ends with 1 where a target is missed.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import asyncpg
from kube_client import Document, Kube, agent_run, set_deployment_status
from kube_servers import KubeServer, why_not
from processes import Metrics, ProductProcess, clean_environment, free_port
from store_servers import POSTGRES_SETTINGS, REDIS_SETTINGS, choose_programs, database_url, short_folder

from agentrun.dev.stores import StoreSettings, StoreUrls, stores
from agentrun.store.migrations import migrate

NAMESPACES = 10
AT_ONCE = 16
COPIES_AT_ONCE = 3
BENCH_POSTGRES_SETTINGS = {**POSTGRES_SETTINGS, "autovacuum": "off"}
"""Autovacuum would go through a thousand databases all the time, which nobody has on one server."""
RECONCILE_LIMIT_SECONDS = 600.0
SETTLE_SECONDS = 30.0
IDLE_SECONDS = 60.0
RECONCILED_SECONDS = 120.0
IDLE_CPU_PERCENT = 5.0
MEMORY_MIB = 250.0
TICK_SECONDS = 1.0
TARGETS = (
    f"targets, for 1,000 and fewer: reconciled in under {RECONCILED_SECONDS:.0f} s; idle below {IDLE_CPU_PERCENT:.0f} % of a core, "
    f"{MEMORY_MIB:.0f} MiB and {TICK_SECONDS:.0f} s a tick, without a write"
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One count's result. Times in seconds, CPU in per cent of a core, memory in MiB."""

    count: int
    reconciled: float
    ready: float
    busy_cpu_seconds: float
    idle_cpu: float
    api_server_idle_cpu: float
    memory: float
    peak_memory: float
    tick: float
    writes: int
    changed: int
    """Objects whose resourceVersion is another one than before the idle time."""

    def missed(self) -> list[str]:
        """The targets that it misses."""
        found = {
            "time to reconcile": self.reconciled >= RECONCILED_SECONDS,
            "CPU": self.idle_cpu >= IDLE_CPU_PERCENT,
            "memory": self.memory >= MEMORY_MIB,
            "tick": self.tick >= TICK_SECONDS,
            "no writes": self.writes > 0 or self.changed > 0,
        }
        return [f"{what} ({self.count})" for what, missed in found.items() if missed]

    def __str__(self) -> str:
        return (
            f"{self.count} AgentRuns: reconciled in {self.reconciled:.1f} s, ready in {self.ready:.1f} s; idle: "
            f"{self.idle_cpu:.1f} % of a core (API server {self.api_server_idle_cpu:.1f} %), "
            f"{self.memory:.0f} MiB (at most {self.peak_memory:.0f}), "
            f"tick {1000 * self.tick:.0f} ms, {self.writes} writes, {self.changed} objects changed"
        )


async def main(counts: Sequence[int], idle_seconds: float) -> int:
    """Exit code."""
    reason = why_not()
    if reason:
        sys.exit(f"bench-operator: {reason}")
    choose_programs()
    found = []
    with short_folder() as folder, stores(folder / "s", StoreSettings(BENCH_POSTGRES_SETTINGS, REDIS_SETTINGS)) as urls:
        await make_databases(urls, max(counts))
        for count in counts:
            with short_folder() as kube_folder:
                server = KubeServer(kube_folder)
                try:
                    found.append(await measure(server, urls, count, idle_seconds))
                finally:
                    server.discard()
            print(found[-1], flush=True)
    print(f"({TARGETS})")
    missed = [target for figures in found for target in figures.missed()]
    print(f"bench-operator: {verdict(missed)} | " + " | ".join(map(str, found)))
    return bool(missed)


def verdict(missed: Sequence[str]) -> str:
    return f"MISSED {', '.join(missed)}" if missed else "all targets met"


async def make_databases(urls: StoreUrls, count: int) -> None:
    begun = time.monotonic()
    pool = await asyncpg.create_pool(urls.database_url, min_size=1, max_size=COPIES_AT_ONCE)
    await pool.execute("CREATE DATABASE bench_template TEMPLATE template0")
    await migrate(database_url(urls.database_url, "bench_template"), say=lambda _: None)

    async def one(number: int) -> None:
        # Copied file by file: without fsync its checkpoints cost less than writing every page to the log.
        await pool.execute(f"CREATE DATABASE bench_{number} TEMPLATE bench_template STRATEGY file_copy", timeout=120)
        conn = await asyncpg.connect(database_url(urls.database_url, f"bench_{number}"))
        await conn.execute("UPDATE meta SET owner = $1", f"{namespace(number)}/agent-{number}")
        await conn.close()

    await in_parallel((one(number) for number in range(count)), at_once=COPIES_AT_ONCE)
    await pool.close()
    print(f"{count} databases made in {time.monotonic() - begun:.0f} s", flush=True)


async def measure(server: KubeServer, urls: StoreUrls, count: int, idle_seconds: float) -> Figures:
    await server.start()
    server.apply_crds()
    async with Kube(server) as kube:
        await make_agent_runs(kube, urls, count)
        begun = time.monotonic()
        operator = start_operator(server)
        try:
            await until(kube, count, is_reconciled, operator)
            reconciled = time.monotonic() - begun
            print(f"{count}: reconciled after {reconciled:.1f} s", flush=True)
            await come_up(kube)
            await until(kube, count, is_ready, operator)
            ready = time.monotonic() - begun
            print(f"{count}: ready after {ready:.1f} s", flush=True)
            busy = cpu_seconds(operator.pid)
            await asyncio.sleep(SETTLE_SECONDS)
            seen = await versions(kube)
            figures = await idle(operator, server, idle_seconds)
            now = await versions(kube)
            changed = sum(seen.get(uid) != now.get(uid) for uid in {*seen, *now})
            return Figures(count, reconciled, ready, busy, changed=changed, **figures)
        finally:
            operator.kill()


def start_operator(server: KubeServer) -> ProductProcess:
    port = free_port()
    environment = {
        **clean_environment(),
        "KUBECONFIG": str(server.kubeconfig),
        "POD_NAME": "operator-0",
        "AGENTRUN_OPERATOR_IMAGE": "agentrun:bench",
        "AGENTRUN_OPERATOR_HEALTH_HOST": "127.0.0.1",
        "AGENTRUN_OPERATOR_HEALTH_PORT": str(port),
        "AGENTRUN_LOG_LEVEL": "warning",
    }
    return ProductProcess(
        "operator", [sys.executable, "-m", "agentrun", "operator"], environment, port, server.folder / "operator.log"
    )


async def versions(kube: Kube) -> dict[str, str]:
    """The resourceVersion of each AgentRun and of each of its objects and Events, by uid."""
    found = {}
    for kind in (
        "agentruns",
        "deployments",
        "services",
        "configmaps",
        "jobs",
        "poddisruptionbudgets",
        "networkpolicies",
        "events",
    ):
        for number in range(NAMESPACES):
            found |= {
                one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in await kube.list(kind, namespace(number))
            }
    return found


async def idle(operator: ProductProcess, server: KubeServer, seconds: float) -> dict[str, Any]:
    """The figures of a time in which nothing happens."""
    api_server = server.apiserver.pid
    assert api_server is not None
    before, cpu, api_cpu = await operator.metrics(), cpu_seconds(operator.pid), cpu_seconds(api_server)
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - begun
    cpu, api_cpu = cpu_seconds(operator.pid) - cpu, cpu_seconds(api_server) - api_cpu
    after = await operator.metrics()
    ticks = difference(before, after, "agentrun_operator_tick_seconds_count")
    return {
        "idle_cpu": 100 * cpu / took,
        "api_server_idle_cpu": 100 * api_cpu / took,
        "memory": resident_mib(operator.pid),
        "peak_memory": resident_mib(operator.pid, "VmHWM"),
        "tick": difference(before, after, "agentrun_operator_tick_seconds_sum") / max(ticks, 1),
        "writes": writes(before, after),
    }


def difference(before: Metrics, after: Metrics, name: str, **labels: str) -> float:
    return after.total(name, **labels) - before.total(name, **labels)


def writes(before: Metrics, after: Metrics) -> int:
    """Requests that write, without those of the Lease (one PUT for each renewal)."""
    name = "agentrun_operator_api_requests_total"
    return int(sum(difference(before, after, name, method=method) for method in ("POST", "PATCH", "DELETE")))


async def make_agent_runs(kube: Kube, urls: StoreUrls, count: int) -> None:
    for number in range(NAMESPACES):
        await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace(number)}})
        await kube.secret(namespace(number), "redis", url=urls.redis_url)
        await kube.secret(namespace(number), "api-keys", **{"api-keys": "{}"})

    async def one(number: int) -> None:
        await kube.secret(namespace(number), f"db-{number}", url=database_url(urls.database_url, f"bench_{number}"))
        body = agent_run(f"agent-{number}", database={"secretRef": {"name": f"db-{number}"}, "migrations": "Verify"})
        body["spec"]["agent"]["instructions"] = "be brief. " * 200
        await kube.create("agentruns", namespace(number), body)

    await in_parallel(one(number) for number in range(count))


def namespace(number: int) -> str:
    return f"bench-{number % NAMESPACES}"


async def come_up(kube: Kube) -> None:
    """All Deployments are up, as kubelets would say."""
    deployments = (await kube.request("GET", "/apis/apps/v1/deployments"))["items"]
    await in_parallel(set_deployment_status(kube, one) for one in deployments)


async def in_parallel(work: Iterable[object], *, at_once: int = AT_ONCE) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(job: object) -> None:
        async with places:
            await job  # type: ignore[misc]

    await asyncio.gather(*(one(job) for job in work))


async def until(kube: Kube, count: int, condition: Callable[[Document], bool], operator: ProductProcess) -> None:
    """Waits until it is true of all AgentRuns, one namespace after the other: to list all of them each time is work for the API server."""
    deadline = time.monotonic() + RECONCILE_LIMIT_SECONDS
    for number in range(min(count, NAMESPACES)):
        while True:
            items = await kube.list("agentruns", namespace(number))
            done = sum(map(condition, items))
            if done == len(items):
                break
            if operator.returncode is not None or time.monotonic() > deadline:
                sys.exit(
                    f"bench-operator: {done} of {len(items)} in {namespace(number)}; the operator's log:\n{operator.log_tail()}"
                )
            await asyncio.sleep(1.0)


def is_reconciled(item: Document) -> bool:
    """Everything is made, and its queue has been looked at."""
    return says(item, "SchemaReady") and says(item, "QueueReady") and says(item, "ScalingActive")


def is_ready(item: Document) -> bool:
    return says(item, "Ready")


def says(item: Document, kind: str) -> bool:
    status = item.get("status") or {}
    found = [one for one in status.get("conditions") or () if one["type"] == kind and one["status"] == "True"]
    return bool(found) and status.get("observedGeneration") == item["metadata"]["generation"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int, what: str = "VmRSS") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures the operator with many AgentRuns.")
    parser.add_argument("counts", nargs="*", type=int, default=[100, 300, 1000])
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="seconds to watch it idle")
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.counts, given.idle)))
