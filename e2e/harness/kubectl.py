"""kubectl on one cluster, as a person would use it."""

import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from harness.commands import CommandError, run

Document = dict[str, Any]


class Kubectl:
    """Bound to a context, so that no other cluster of this machine is ever touched."""

    def __init__(self, context: str) -> None:
        self.context = context

    def __call__(self, *arguments: str, stdin: str | None = None, within: float = 60.0) -> str:
        return run(["kubectl", "--context", self.context, *arguments], stdin=stdin, within=within)

    def get(self, kind: str, name: str, namespace: str = "") -> Document:
        """One object. Raises CommandError if it is not there."""
        return dict(json.loads(self("get", kind, name, *_of(namespace), "-o", "json")))

    def find(self, kind: str, name: str, namespace: str = "") -> Document | None:
        """One object, None if it is not there."""
        found = self("get", kind, name, *_of(namespace), "-o", "json", "--ignore-not-found")
        return dict(json.loads(found)) if found.strip() else None

    def items(self, kind: str, namespace: str = "", *, labels: str = "") -> list[Document]:
        """All objects of a kind, of all namespaces if none is named."""
        where = _of(namespace) if namespace else ["-A"]
        return list(json.loads(self("get", kind, *where, *(["-l", labels] if labels else []), "-o", "json"))["items"])

    def apply(self, documents: Iterable[Mapping[str, Any]], namespace: str = "") -> None:
        """Applies documents on the server's side. Raises CommandError with what the server says to them."""
        text = yaml.safe_dump_all(list(documents), sort_keys=False)
        self("apply", "--server-side", "--force-conflicts", *_of(namespace), "-f", "-", stdin=text)

    def delete(self, kind: str, name: str, namespace: str = "", *, wait: bool = True, within: float = 60.0) -> None:
        """Deletes what may be gone already."""
        self("delete", kind, name, *_of(namespace), "--ignore-not-found", f"--wait={str(wait).lower()}", within=within)

    def wait(self, target: str, condition: str, namespace: str = "", *, within: float) -> None:
        """`kubectl wait`. Raises CommandError if it does not come to hold within so many seconds."""
        self("wait", target, f"--for={condition}", *_of(namespace), f"--timeout={int(within)}s", within=within + 15)

    def condition(self, kind: str, name: str, namespace: str, wanted: str) -> Document | None:
        """A condition of an object; None without one."""
        found = self.find(kind, name, namespace) or {}
        conditions = (found.get("status") or {}).get("conditions") or []
        return next((one for one in conditions if one["type"] == wanted), None)

    @contextlib.contextmanager
    def forward(self, target: str, port: int, namespace: str) -> Iterator[int]:
        """A port of this machine that leads to `target` as long as the block lasts and the pod behind it lives."""
        with tempfile.TemporaryFile("a+") as out:  # appending: reading here moves no place at which kubectl writes
            command = ["kubectl", "--context", self.context, "port-forward", *_of(namespace), target, f":{port}"]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            try:
                yield _forwarded(process, out)
            finally:
                process.terminate()
                process.wait(10)


def _of(namespace: str) -> list[str]:
    return ["-n", namespace] if namespace else []


def _forwarded(process: subprocess.Popen[bytes], out: Any) -> int:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        out.seek(0)
        text = out.read()
        if found := re.search(r"Forwarding from 127\.0\.0\.1:(\d+)", text):
            return int(found[1])
        if process.poll() is not None:
            raise CommandError(f"port-forward: {text.strip()}")
        time.sleep(0.05)
    raise CommandError(f"port-forward: nothing within 15 s: {text.strip()}")
