"""What the containers of a cluster have logged, also those that are gone.

The kubelet deletes a pod's logs soon after the pod. While `Logs` runs, each of them has a second name (a hard link) in FOLDER on the node:
nothing is copied, and nothing of a killed or replaced pod is missed. The number in a log's name is how often its container had been
restarted before.
"""

import contextlib
import fnmatch
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import Cluster
from harness.commands import CommandError, run

FOLDER = "/var/log/agentrun-e2e"
_LINK = f"cp -rln /var/log/pods/. {FOLDER}/ 2>/dev/null"
_KEEP = f"while true; do {_LINK}; read -t 0.5; [ $? -gt 128 ] || break; done"
"""Ends with its standard input, and so with whoever wanted it."""
_LINE = re.compile(r"\./([^_/]+)_([^_/]+)_[^/]+/([^/]+)/\d+\.log:(\S+) (stdout|stderr) ([PF]) ?(.*)")


@dataclass(frozen=True)
class Line:
    """One line of a container; `at` in RFC 3339, UTC."""

    namespace: str
    pod: str
    container: str
    at: str
    text: str


class Logs:
    """Keeps the logs of one cluster from `start` to `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        """From here on nothing is lost."""
        self._on_node(f"rm -rf {FOLDER} && mkdir -p {FOLDER}; {_LINK}; true")
        self._thread.start()

    def stop(self) -> None:
        """Ends it; what was kept stays on the node."""
        self._stopped.set()
        self._thread.join(10)

    def lines(self, namespaces: Sequence[str], *, since: str) -> list[Line]:
        """The lines since a time (RFC 3339, UTC, whole seconds) in namespaces with these names, or that begin with one of them and `-`."""
        chosen = " -o ".join(f"-path './{pattern}'" for pattern in _pods(namespaces))
        told = self._on_node(
            f"{_LINK}; cd {FOLDER} && find . -name '*.log' -newermt '{since}' \\( {chosen} \\) -exec grep -H '' {{}} +; true"
        )
        return [line for line in _parsed(told) if line.at >= since]

    def restarts(self) -> set[str]:
        """Each restart of a container outside of kube-system: namespace_pod_uid/container/how often before."""
        told = self._on_node(f"{_LINK}; cd {FOLDER} && find . -regex '.*/[1-9][0-9]*\\.log' -not -path './kube-system_*'")
        return {path.removeprefix("./").removesuffix(".log") for path in told.split()}

    def _run(self) -> None:
        command = ["docker", "exec", "-i", self._cluster.node, "bash", "-c", _KEEP]
        while not self._stopped.is_set():  # a restart of the node ends it
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process:
                while process.poll() is None and not self._stopped.wait(0.5):
                    pass
                process.kill()

    def _on_node(self, script: str) -> str:
        return self._cluster.on_node(script, within=120)


def save(cluster: Cluster, namespaces: Sequence[str], folder: Path) -> None:
    """Writes what is kept of these namespaces and of those that begin with one of them and `-`, each pod's into a folder of its own."""
    kept = cluster.on_node(f"ls {FOLDER} 2>/dev/null; true").split()
    for name in kept:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _pods(namespaces)):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(CommandError):
                run(["docker", "cp", "--quiet", f"{cluster.node}:{FOLDER}/{name}", str(folder)])


def _pods(namespaces: Sequence[str]) -> list[str]:
    """Patterns of the pods' folders, which are namespace_pod_uid."""
    return [f"{name}{end}*" for name in namespaces for end in "_-"]


def _parsed(told: str) -> Iterator[Line]:
    """Lines as the container wrote them: long ones are stored in parts."""
    parts: dict[tuple[str, ...], str] = {}
    for found in filter(None, map(_LINE.match, told.splitlines())):
        namespace, pod, container, at, stream, tag, text = found.groups()
        key = (namespace, pod, container, stream)
        parts[key] = parts.get(key, "") + text
        if tag == "F":
            yield Line(namespace, pod, container, at, parts.pop(key))
