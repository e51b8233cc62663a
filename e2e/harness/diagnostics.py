"""What a person would look at after a failure, in a folder: objects, events, logs, tables and streams."""

import json
from collections.abc import Callable
from pathlib import Path

from harness.chart import NAMESPACE
from harness.commands import CommandError
from harness.system import System

KINDS = "agentruns,crontasks,deployments,replicasets,pods,jobs,services,configmaps,networkpolicies,poddisruptionbudgets,events"
TABLES = ("runs", "attempts", "effects", "dead_letters", "cron_tasks", "slots", "meta", "schema_versions")


def collect(system: System, namespace: str, folder: Path) -> None:
    """Writes what can be had; what cannot says why."""
    folder.mkdir(parents=True, exist_ok=True)
    kubectl = system.kubectl
    _write(folder / "objects.yaml", lambda: kubectl("get", KINDS, "-n", namespace, "-o", "yaml"))
    _write(folder / "describe.txt", lambda: kubectl("describe", "agentruns,crontasks,pods", "-n", namespace))
    _write(folder / "nodes.txt", lambda: kubectl("describe", "nodes"))
    for place in (namespace, NAMESPACE):
        for pod in _pods(system, place):
            for past in ("", "--previous"):
                _write(
                    folder / f"log-{pod}{past}.txt",
                    lambda pod=pod, place=place, past=past: kubectl(
                        "logs", "-n", place, pod, "--all-containers", "--tail=3000", *([past] if past else [])
                    ),
                )
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


def _write(path: Path, ask: Callable[[], str]) -> None:
    try:
        text = ask()
    except (CommandError, json.JSONDecodeError) as error:
        text = f"could not be had: {error}"
    path.write_text(text)
