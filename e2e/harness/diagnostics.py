"""What a person would look at after a failure, in a folder: objects, events, logs, tables and streams."""

import json
from collections.abc import Callable
from pathlib import Path

from harness import logs
from harness.chart import NAMESPACE
from harness.commands import CommandError, run
from harness.system import STORES_NAMESPACE, System

OURS = "agentruns,crontasks"
KINDS = (
    "deployments,statefulsets,replicasets,pods,jobs,services,endpointslices,configmaps,networkpolicies,"
    "poddisruptionbudgets,leases,persistentvolumeclaims,events"
)
"""No Secrets."""
TABLES = (
    "runs", "attempts", "effects", "dead_letters", "cron_tasks", "slots", "sessions", "messages", "inputs", "ledger", "budget_counters",
    "meta", "schema_versions",
)  # fmt: skip


def collect(system: System, namespace: str, folder: Path) -> None:
    """Writes what can be had about the cluster, its operator and stores, and one scenario's namespace (or none); what cannot says why."""
    folder.mkdir(parents=True, exist_ok=True)
    kubectl = system.kubectl
    if not _write(folder / "nodes.txt", lambda: kubectl("describe", "nodes")):
        _write(folder / "docker.txt", lambda: run(["docker", "ps", "--all"]))
        return  # without a cluster everything else would only say so again
    _write(folder / "crds.yaml", lambda: kubectl("get", "crds", "-o", "yaml"))
    _write(folder / "helm.txt", system.chart.history)
    _write(folder / "pods.txt", lambda: kubectl("get", "pods", "--all-namespaces", "-o", "wide"))
    places = [place for place in (namespace, NAMESPACE, STORES_NAMESPACE) if place]
    for place in places:
        into = folder / place
        into.mkdir(exist_ok=True)
        for kinds in (OURS, KINDS):  # the definitions may be what is missing
            path = into / f"{kinds.partition(',')[0]}-and-others.yaml"
            _write(path, lambda kinds=kinds, place=place: kubectl("get", kinds, "-n", place, "-o", "yaml"))
        _write(into / "describe.txt", lambda place=place: kubectl("describe", "deployments,pods,jobs", "-n", place))
        for pod in _pods(system, place):
            _write(
                into / f"log-{pod}.txt",
                lambda pod=pod, place=place: kubectl("logs", "-n", place, pod, "--all-containers", "--prefix", "--tail=3000"),
            )
    try:
        logs.save(system.cluster, places, folder / "logs-also-of-pods-that-are-gone")
    except CommandError as error:
        (folder / "logs.txt").write_text(f"could not be had: {error}")
    if not namespace:
        return
    for table in TABLES:
        _write(folder / f"table-{table}.txt", lambda table=table: system.psql(namespace, f"SELECT * FROM {table} LIMIT 500"))
    _write(folder / "redis.txt", lambda: _redis(system, namespace))


def _pods(system: System, namespace: str) -> list[str]:
    try:
        return [pod["metadata"]["name"] for pod in system.kubectl.items("pods", namespace)]
    except CommandError:
        return []


def _redis(system: System, namespace: str) -> str:
    lines = []
    for key in system.valkey("--scan", "--pattern", f"agentrun:{{{namespace}/*").split()[:200]:
        lines.append(f"{key} {system.valkey('TYPE', key)}")
        if key.endswith(":runs"):
            lines += [system.valkey("XINFO", "STREAM", key, "FULL"), system.valkey("XPENDING", key, "workers")]
    return "\n".join(lines)


def _write(path: Path, ask: Callable[[], str]) -> bool:
    """Whether it could be had."""
    try:
        path.write_text(ask())
    except (CommandError, json.JSONDecodeError) as error:
        path.write_text(f"could not be had: {error}")
        return False
    return True
