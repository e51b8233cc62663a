"""A watch over the pods of a namespace that remembers every pod that was ever created, however short its life."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from harness.kubectl import Document, Kubectl


class PodWatch:
    """What a `kubectl get pods --watch` has told so far."""

    def __init__(self, process: subprocess.Popen[bytes], out: Any) -> None:
        self._process = process
        self._out = out

    def pods(self) -> list[Document]:
        """Each pod once, as it was first seen. Fails if the watch has ended: then it may have missed some."""
        first: dict[str, Document] = {}
        for pod in self.states():
            first.setdefault(pod["metadata"]["uid"], pod)
        return list(first.values())

    def states(self) -> list[Document]:
        """The pods each time that something about one had changed. Fails if the watch has ended."""
        assert self._process.poll() is None, "the watch over the pods has ended"
        self._out.seek(0)
        return [event["object"] for event in _documents(self._out.read())]

    def created(self, component: str) -> dict[str, str]:
        """The pods of a component that were ever there: image by name."""
        return {
            pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
            for pod in self.pods()
            if (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/component") == component
        }


@contextlib.contextmanager
def every_pod(kubectl: Kubectl, namespace: str) -> Iterator[PodWatch]:
    """Watches as long as the block lasts. Pods that are there already are among those seen."""
    with tempfile.TemporaryFile("a+") as out:  # appending: reading here moves no place at which kubectl writes
        command = ["get", "pods", "-n", namespace, "--watch", "--output-watch-events", "-o", "json"]
        process = subprocess.Popen(["kubectl", "--context", kubectl.context, *command], stdout=out, stderr=subprocess.STDOUT)
        try:
            yield PodWatch(process, out)
        finally:
            process.terminate()
            process.wait(10)


def _documents(text: str) -> Iterator[Document]:
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            document, at = decoder.raw_decode(text, at)
        except ValueError:
            return  # its rest is not written yet
        yield document
