"""`agentrun crds apply` and `check`, as the chart's Jobs run them, on a real API server and with the rights that the chart gives."""

import asyncio
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from kube_servers import ADMIN, CRDS, OPERATOR, KubeServer
from waiting import eventually

from agentrun import __version__, cli
from agentrun.domain.errors import ConfigurationError
from agentrun.manifests.definitions import documents
from agentrun.manifests.installation import VERSION, Definition, install, is_newer

NAMES = ["agentruns.agentrun.dev", "crontasks.agentrun.dev"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Agentrun = Callable[..., Done]


@pytest.fixture
def agentrun(
    api_server: KubeServer, render: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Agentrun:
    """Runs `agentrun …` as a user who has the rights of the Job; the CRDs are not there at first."""
    api_server.kubectl("delete", "crd", *NAMES, "--ignore-not-found")
    hooks = [one for one in render() if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    (role,) = (one for one in hooks if one["kind"] == "ClusterRole")
    (binding,) = (one for one in hooks if one["kind"] == "ClusterRoleBinding")
    subject = {"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}
    api_server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([role, {**binding, "subjects": [subject]}]))

    def run(*arguments: str, user: str = OPERATOR) -> Done:
        monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig_of(user)))
        monkeypatch.setattr(sys, "argv", ["agentrun", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return Done(int(ended.value.code or 0), told.out, told.err)

    return run


def live(server: KubeServer, name: str) -> Any:
    return yaml.safe_load(server.kubectl("get", "crd", name, "-o", "yaml", "--show-managed-fields"))


def changed(name: str, version: str) -> dict[str, Any]:
    """A definition of another version, with one more column."""
    document = copy.deepcopy(next(one for one in documents() if one["metadata"]["name"] == name))
    document["metadata"]["annotations"][VERSION] = version
    document["spec"]["versions"][0]["additionalPrinterColumns"].append({"name": "Other", "type": "string", "jsonPath": ".x"})
    return document


def columns(document: Any) -> list[str]:
    return [column["name"] for column in document["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_the_files_carry_the_version_of_the_product() -> None:
    assert [one["metadata"]["annotations"][VERSION] for one in documents()] == [__version__, __version__]


def test_an_empty_cluster_gets_them_and_serves_them(agentrun: Agentrun, api_server: KubeServer) -> None:
    async def served() -> bool:
        return (await asyncio.to_thread(agentrun, "crds", "check")).returncode == 0

    missing = agentrun("crds", "check")
    assert missing.returncode == 2
    assert "does not serve agentruns.agentrun.dev and crontasks.agentrun.dev" in missing.stderr

    done = agentrun("crds", "apply")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{name}: applied, version {__version__}" for name in NAMES]
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=0s", *(f"crd/{name}" for name in NAMES))
    # They are established at once, and in the list of what is served a moment later.
    asyncio.run(eventually(served, within=60, what="both kinds are served"))
    assert {entry["manager"] for entry in live(api_server, NAMES[0])["metadata"]["managedFields"]} >= {"agentrun-crds"}
    assert agentrun("crds", "apply").returncode == 0, "a second time changes nothing"


@pytest.mark.parametrize("side", ["client", "server"])
def test_definitions_that_kubectl_applied_are_upgraded(agentrun: Agentrun, api_server: KubeServer, side: str) -> None:
    old = yaml.safe_dump(changed(NAMES[0], "0.0.9"))
    api_server.kubectl("apply", f"--server-side={str(side == 'server').lower()}", "-f", "-", stdin=old)

    done = agentrun("crds", "apply")

    assert (done.returncode, done.stderr) == (0, "")
    assert columns(live(api_server, NAMES[0])) == columns(documents()[0])


def test_definitions_without_a_version_are_upgraded(agentrun: Agentrun, api_server: KubeServer) -> None:
    old = changed(NAMES[0], "")
    del old["metadata"]["annotations"]
    api_server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(old))

    assert agentrun("crds", "apply").returncode == 0

    assert live(api_server, NAMES[0])["metadata"]["annotations"][VERSION] == __version__


def test_newer_definitions_stay_and_it_says_so(agentrun: Agentrun, api_server: KubeServer) -> None:
    api_server.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(changed(NAMES[0], "99.0.0")))

    done = agentrun("crds", "apply")

    assert done.returncode == 0, "an older product works with newer definitions, as after a rollback"
    assert done.stdout.splitlines()[0].startswith(f"{NAMES[0]}: left as it is, of version 99.0.0")
    assert done.stdout.splitlines()[1] == f"{NAMES[1]}: applied, version {__version__}"
    assert "Other" in columns(live(api_server, NAMES[0]))


def test_kubectl_goes_on_where_the_job_has_been(agentrun: Agentrun, api_server: KubeServer) -> None:
    assert agentrun("crds", "apply").returncode == 0

    api_server.kubectl("apply", "--server-side", "-f", str(CRDS))
    assert agentrun("crds", "apply").returncode == 0


def test_without_rights_it_says_which_is_missing(agentrun: Agentrun, api_server: KubeServer) -> None:
    api_server.kubectl("delete", "clusterrolebinding", "agentrun-crds")

    done = agentrun("crds", "apply")

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert 'cannot get resource "customresourcedefinitions"' in done.stderr
    assert agentrun("crds", "apply", user=ADMIN).returncode == 0


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [
        ("0.2.0", "0.1.0", True),
        ("0.10.0", "0.9.9", True),
        ("1.0.0", "0.99.99", True),
        ("0.1.0", "0.1.0", False),
        ("0.1.0", "0.2.0", False),
        ("0.1.0+build", "0.1.0", False),
        ("", "0.1.0", False),
        ("soon", "0.1.0", False),
        ("0.1.0", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, than: str, newer: bool) -> None:
    assert is_newer(version, than) is newer


async def test_a_definition_that_is_never_established_is_an_error_that_says_why() -> None:
    refused = {"type": "NamesAccepted", "status": "False", "message": '"arun" is already in use'}

    class Cluster:
        async def get(self, name: str) -> Definition | None:
            return None

        async def apply(self, name: str, definition: Definition) -> Definition:
            return {**definition, "status": {"conditions": [refused]}}

    async def get_refused(name: str) -> Definition | None:
        return {"metadata": {"name": name}, "status": {"conditions": [refused]}}

    cluster = Cluster()
    looks: list[str] = []

    async def pause() -> None:
        cluster.get = get_refused  # type: ignore[method-assign]
        looks.append("pause")
        await asyncio.sleep(0)

    with pytest.raises(ConfigurationError, match=r'agentruns\.agentrun\.dev: .* "arun" is already in use'):
        await install(documents()[:1], cluster, pause=pause, say=lambda _: None)
    assert len(looks) == 60
