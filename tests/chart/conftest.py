"""Fixtures of the chart tier; it is skipped, with the reason, on a machine without helm.

helm       runs helm and returns what it prints: helm("lint", str(CHART))
render     the objects of the chart: render({"replicaCount": 3}, "--set", "image.tag=1")
refusal    what helm says about values that it does not take
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_servers import KubeServer, why_not
from store_servers import short_folder

CHART = Path(__file__).parents[2] / "charts" / "agentrun"
NAMESPACE = "agentrun-system"
HERE = Path(__file__).parent

Document = dict[str, Any]
Render = Callable[..., list[Document]]
Helm = Callable[..., str]


class HelmError(Exception):
    """What helm said on stderr."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("helm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="helm is not on PATH"))


@functools.cache
def run_helm(*arguments: str, values: str = "{}") -> str:
    """Rendering without a cluster is repeatable, so the same call is made once."""
    told = subprocess.run(
        ["helm", *arguments],
        input=values,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
    if told.returncode:
        raise HelmError(told.stderr)
    return told.stdout


def template(values: Mapping[str, Any] | None, arguments: tuple[str, ...], chart: Path = CHART, release: str = "agentrun") -> str:
    command = ("template", release, str(chart), "--namespace", NAMESPACE, "--values", "-", *arguments)
    return run_helm(*command, values=json.dumps(values or {}))


@pytest.fixture
def helm() -> Helm:
    return run_helm


@pytest.fixture
def render() -> Render:
    def rendered(values: Mapping[str, Any] | None = None, *arguments: str, **where: Any) -> list[Document]:
        return [one for one in yaml.safe_load_all(template(values, arguments, **where)) if one]

    return rendered


@pytest.fixture
def refusal() -> Callable[..., str]:
    def refused(values: Mapping[str, Any] | None = None, *arguments: str) -> str:
        with pytest.raises(HelmError) as error:
            template(values, arguments)
        return str(error.value)

    return refused


@pytest.fixture(scope="session")
def api_server() -> Iterator[KubeServer]:
    """A real API server without the CRDs."""
    if reason := why_not():
        pytest.skip(reason)
    with short_folder() as folder:
        server = KubeServer(folder)
        try:
            server.start_now()
            yield server
        finally:
            server.discard()
