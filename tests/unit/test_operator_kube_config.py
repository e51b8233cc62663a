"""Where the API server is: from a kubeconfig file, and by which proxy."""

import json
from pathlib import Path

import pytest

from agentrun_operator import kube_config

SERVER = "https://cluster.example:6443"
VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return write(tmp_path / "kubeconfig")


def write(path: Path, **cluster: str) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": SERVER, **cluster}}],
        "users": [{"name": "x", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


async def test_address_and_token_come_from_the_file(kubeconfig: Path) -> None:
    access = await kube_config.access([kubeconfig])
    assert (access.server, access.proxy, await access.authorization()) == (SERVER, None, "Bearer secret")
    found = await kube_config.connection([kubeconfig])
    assert (found.server, found.token, found.proxy_url) == (SERVER, "secret", None)
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, "http://proxy.example:3128"),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "cluster.example"}, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "other.example"}, "http://proxy.example:3128"),
    ],
)
async def test_the_proxy_of_the_environment_is_for_watches_and_requests(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxy: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (await kube_config.access([kubeconfig])).proxy == proxy
    assert (await kube_config.connection([kubeconfig])).proxy_url == proxy


async def test_the_proxy_of_the_file_comes_first(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    write(kubeconfig, **{"proxy-url": "http://nearer.example:3128"})
    assert (await kube_config.access([kubeconfig])).proxy == "http://nearer.example:3128"
