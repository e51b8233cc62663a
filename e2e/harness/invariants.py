"""What holds over all scenarios: no process logs an error and no container is restarted, unless a scenario says that it does that."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from harness.chart import NAMESPACE
from harness.logs import Line, Logs
from harness.system import System

SERVERS = ("operator", "gateway", "worker", "scheduler")
"""Containers that log JSON and nothing else."""
COMMANDS = ("migrate", "crds")
"""Containers that say in plain lines what they do."""
API_STARTS_ANEW = r"storage is \(re\)initializing"
"""What the API server answers to a watch while it starts and while definitions change; kopf logs it as an error, and asks again."""


@dataclass
class Allowed:
    """What a scenario brings about."""

    errors: dict[str, list[str]] = field(default_factory=dict)
    """Patterns of log lines by container."""
    restarts: Counter[str] = field(default_factory=Counter)
    """How many restarts there may be at most, by container."""
    operators_replaced: bool = False
    """The operator's pods are others afterwards."""

    def error(self, container: str, *patterns: str) -> None:
        """Lines of a container that match one of these are expected."""
        self.errors.setdefault(container, []).extend(patterns)


class Invariants:
    """What one scenario does is judged from the end of the one before, so that nothing falls between two."""

    def __init__(self, system: System, logs: Logs) -> None:
        self._system = system
        self._logs = logs
        self._restarts = logs.restarts()
        self._since = _now()
        self._operators: set[str] = set()

    def begin(self) -> Allowed:
        """A scenario begins."""
        self._operators = self._operator_pods()
        return Allowed()

    def check(self, allowed: Allowed, namespaces: Iterable[str]) -> None:
        """A scenario in these namespaces, and those whose names go on with `-`, has gone well. Raises AssertionError if it broke one."""
        since, known, operators = self._since, self._restarts, self._operators
        self.settle()
        lines = self._logs.lines([NAMESPACE, *namespaces], since=since)
        unexpected = [line for line in lines if _is_error(line) and not _is_allowed(line, allowed)]
        assert not unexpected, "error lines that were not expected:\n" + "\n".join(
            f"{line.pod} {line.container} {line.at} {line.text[:2000]}" for line in unexpected[:20]
        )
        restarted = self._restarts - known
        too_many = Counter(name.split("/")[1] for name in restarted) - allowed.restarts
        assert not too_many, f"restarts that were not expected: {sorted(restarted)}; allowed: {dict(allowed.restarts)}"
        if not allowed.operators_replaced:
            assert self._operator_pods() == operators, "operator pods have been replaced"

    def settle(self) -> None:
        """What was until now is not looked at again."""
        self._since = _now()
        self._restarts = self._logs.restarts()

    def _operator_pods(self) -> set[str]:
        pods = self._system.chart.operator_pods()
        return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_error(line: Line) -> bool:
    try:
        return json.loads(line.text)["level"] in ("error", "critical")
    except (ValueError, TypeError, KeyError):
        pass  # a traceback, or whatever else is no log line of ours
    if line.container in SERVERS and not line.pod.endswith("-test"):  # `helm test` has a container of this name
        return bool(line.text.strip())
    return line.container in COMMANDS and re.match(r"Traceback|agentrun: ", line.text) is not None


def _is_allowed(line: Line, allowed: Allowed) -> bool:
    return any(re.search(pattern, line.text) for pattern in allowed.errors.get(line.container, ()))
