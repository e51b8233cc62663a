"""The chart, as an admin installs it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.cluster import Cluster
from harness.commands import run

CHART = Path(__file__).parents[2] / "charts" / "agentrun"
NAMESPACE = "agentrun-system"
RELEASE = "agentrun"


class Chart:
    """One release on a cluster."""

    def __init__(self, cluster: Cluster, image: str, *, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        self._cluster = cluster
        self._image = image
        self.release = release
        self.namespace = namespace

    def install(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        chart: Path = CHART,
        image: str = "",
        wait: bool = True,
        within: float = 180.0,
    ) -> None:
        """`helm upgrade --install --wait`. Raises CommandError with what helm says."""
        repository, _, tag = (image or self._image).rpartition(":")
        given = {"image": {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}, **(values or {})}
        self._helm(
            "upgrade", "--install", self.release, str(chart), "--create-namespace", *(["--wait"] if wait else []),
            f"--timeout={int(within)}s", "-f", "-", stdin=yaml.safe_dump(given), within=within + 30,
        )  # fmt: skip

    def uninstall(self, *, within: float = 120.0) -> None:
        """`helm uninstall --wait`; a release that is not there is no error."""
        self._helm(
            "uninstall",
            self.release,
            "--wait",
            "--cascade=foreground",
            "--ignore-not-found",
            f"--timeout={int(within)}s",
            within=within + 30,
        )

    def rollback(self, *, within: float = 180.0) -> None:
        """`helm rollback --wait` to the revision before."""
        self._helm("rollback", self.release, "--wait", f"--timeout={int(within)}s", within=within + 30)

    def test(self, *, within: float = 120.0) -> str:
        """`helm test`."""
        return self._helm("test", self.release, f"--timeout={int(within)}s", within=within + 30)

    def installed(self) -> bool:
        """Whether the release is there and not broken."""
        listed = json.loads(self._helm("list", "-o", "json"))
        return any(one["name"] == self.release and one["status"] == "deployed" for one in listed)

    def history(self) -> str:
        """What there is of the release, for people."""
        return self._helm("list") + self._helm("history", self.release) + self._helm("get", "values", self.release)

    def operator_pods(self) -> list[dict[str, Any]]:
        """The operator's pods as they are."""
        return self._cluster.kubectl.items(
            "pods", self.namespace, labels=f"app.kubernetes.io/instance={self.release},app.kubernetes.io/component=operator"
        )

    def restarts(self) -> dict[str, int]:
        """How often the containers of the operator's pods were restarted, by the names of the pods."""
        return {
            pod["metadata"]["name"]: sum(one["restartCount"] for one in pod["status"].get("containerStatuses", []))
            for pod in self.operator_pods()
        }

    def _helm(self, *arguments: str, stdin: str | None = None, within: float = 60.0) -> str:
        where = ["--kube-context", self._cluster.context, "--namespace", self.namespace]
        return run(["helm", *arguments, *where], stdin=stdin, within=within)
