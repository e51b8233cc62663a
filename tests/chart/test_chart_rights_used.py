"""The operator with the chart's rights and no others, on an API server that notes who asked for what."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from kube_client import Document, Kube, agent_run, play_kubelet
from kube_servers import COLLECTORS, OPERATOR, WORKLOADS, KubeServer, why_not
from processes import ProductProcess, ProductProcesses, clean_environment, free_port
from product_launch import FORKS
from store_servers import short_folder
from waiting import eventually

from agentrun.bus.connection import connect
from agentrun.bus.keys import Keys
from agentrun.bus.runs import Held, WorkStream
from agentrun.store.migrations import migrate
from agentrun_operator.resources import CHILDREN, OURS

Right = tuple[str, str, str]
"""API group, resource, verb."""

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "rules": [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}],
}
NOT_SEEN = {
    *((one.group, one.plural, verb) for one in CHILDREN for verb in ("get", "create", "delete")),
    *((one.group, one.plural, "get") for one in OURS),
}
"""Rights that the log of a quiet life does not show. A server-side apply that makes an object is a patch there, but needs `create` too;
`delete` is for what is taken back while its AgentRun stays; `get` is for names that somebody else may have."""


class Audited:
    """An API server with a log of the operator's requests."""

    def __init__(self, folder: Path) -> None:
        policy, self._log = folder / "policy.yaml", folder / "audit.log"
        policy.write_text(yaml.safe_dump(POLICY))
        self.server = KubeServer(folder, arguments=[f"--audit-policy-file={policy}", f"--audit-log-path={self._log}"])

    def requests(self) -> list[Document]:
        """Requests for resources that have been answered; what everybody may ask for is left out."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []
        return [one for one in lines if "objectRef" in one and one["stage"] in ("ResponseComplete", "ResponseStarted")]

    def used(self) -> set[Right]:
        found = set()
        for one in self.requests():
            ref = one["objectRef"]
            resource = ref["resource"] + (f"/{ref['subresource']}" if "subresource" in ref else "")
            found.add((ref.get("apiGroup", ""), resource, one["verb"]))
        return found

    def refused(self) -> list[str]:
        return [one["requestURI"] for one in self.requests() if one["responseStatus"].get("code") in (401, 403)]


@pytest.fixture
async def audited() -> AsyncIterator[Audited]:
    if reason := why_not():
        pytest.skip(reason)
    with short_folder() as folder:
        made = Audited(folder)
        try:
            await made.server.start()
            made.server.apply_crds()
            made.server.start_controllers([*COLLECTORS, *WORKLOADS])
            yield made
        finally:
            made.server.discard()


def bind(server: KubeServer, found: list[Document]) -> set[Right]:
    """Gives the user of the tests what the chart gives the operator's account; those rights."""
    rights = set()
    wanted = []
    for one in found:
        if not one["kind"].endswith(("Role", "Binding")) or "helm.sh/hook" in one["metadata"].get("annotations", {}):
            continue
        subject = {"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}
        wanted.append({**one, "subjects": [subject]} if one["kind"].endswith("Binding") else one)
        for rule in one.get("rules", []):
            rights |= {
                (group, plural, verb) for group in rule["apiGroups"] for plural in rule["resources"] for verb in rule["verbs"]
            }
    spaces = {one["metadata"]["namespace"] for one in wanted if "namespace" in one["metadata"]} | {"team"}
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in sorted(spaces)]
    server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([*namespaces, *wanted]))
    return rights


@pytest.mark.parametrize(
    "watched", [pytest.param("", id="all-namespaces", marks=pytest.mark.slow), pytest.param("team", id="one-namespace")]
)
async def test_the_operator_lives_on_the_charts_rights_and_uses_them(
    audited: Audited,
    render: Callable[..., list[Document]],
    product_processes: ProductProcesses,
    database_url: str,
    redis_url: str,
    tmp_path: Path,
    watched: str,
) -> None:
    server = audited.server
    granted = bind(server, render({"watchNamespaces": [watched] if watched else [], "rbac": {"aggregate": False}}))
    start(server, product_processes, tmp_path, watched)

    async with Kube(server) as kube:
        await live(kube, server, redis_url, database_url)

        async def noticed() -> bool:
            return ("autoscaling", "horizontalpodautoscalers", "list") in audited.used()

        await eventually(noticed, within=30, what="the operator has looked for autoscalers")
    (operator,) = product_processes.started
    assert await operator.terminate() == 0

    assert audited.refused() == []
    assert audited.used() <= granted
    assert granted - audited.used() <= NOT_SEEN


def start(server: KubeServer, processes: ProductProcesses, folder: Path, watched: str) -> None:
    port = free_port()
    settings = {
        **clean_environment(),
        "KUBECONFIG": str(server.kubeconfig_of(OPERATOR)),
        "POD_NAME": "operator",
        "POD_NAMESPACE": "agentrun-system",
        "AGENTRUN_OPERATOR_LEASE": "agentrun",
        "AGENTRUN_OPERATOR_NAMESPACES": watched,
        "AGENTRUN_OPERATOR_IMAGE": "agentrun:test",
        "AGENTRUN_OPERATOR_HEALTH_PORT": str(port),
        "AGENTRUN_OPERATOR_TICK_SECONDS": "0.5",
    }
    command = ["agentrun", "operator"] if FORKS else [sys.executable, "-m", "agentrun", "operator"]
    processes.started.append(ProductProcess("operator", command, settings, port, folder / "operator.log"))


async def live(kube: Kube, server: KubeServer, redis_url: str, database_url: str) -> None:
    """An AgentRun comes up, is scaled up and in, has a CronTask, and goes. The migration Job's work is done before it is made."""
    await migrate(database_url, owner="team/support")
    await kube.store_secrets("team", database_url=database_url, redis_url=redis_url)
    quick = {"targetPerWorker": 1, "cooldownSeconds": 0, "scaleDownStabilizationSeconds": 0}
    await kube.create("agentruns", "team", agent_run(scaling=quick))
    task = {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "timeZone": "UTC", "input": "hello"}
    document = {"apiVersion": "agentrun.dev/v1alpha1", "kind": "CronTask", "metadata": {"name": "nightly"}, "spec": task}
    await kube.create("crontasks", "team", document)
    redis = await connect(redis_url)
    stream = WorkStream(redis, Keys("team", "support"))

    async def has(count: int) -> bool:
        await play_kubelet(kube, "team", migrates=True)
        found = await kube.find("deployments", "team", "support-worker")
        return (
            found is not None and found["spec"]["replicas"] == count and found.get("status", {}).get("readyReplicas", 0) == count
        )

    async def says(plural: str, name: str) -> bool:
        await play_kubelet(kube, "team", migrates=True)
        found = await kube.get(plural, "team", name)
        return bool(found.get("status", {}).get("conditions"))

    await eventually(lambda: has(0), within=60, what="the workers have a Deployment")
    await eventually(lambda: says("crontasks", "nightly"), within=30, what="the CronTask has a status")
    await stream.publish([uuid4() for _ in range(3)])
    await eventually(lambda: has(3), within=60, what="three workers")
    pods = await kube.list("pods", "team", labels="app.kubernetes.io/component=worker")
    busy = await stream.read(f"{pods[0]['metadata']['name']}-1a2b3c4d", count=1, block_ms=0)
    done = await stream.read("somebody-else-00000000", count=2, block_ms=0)
    await stream.acknowledge([Held(one.run_id, one.entry_id) for one in done])
    await eventually(lambda: has(1), within=60, what="one worker, after a scale-in with costs")
    await stream.acknowledge([Held(one.run_id, one.entry_id) for one in busy])
    await stream.aclose()
    await redis.aclose()
    await kube.delete("crontasks", "team", "nightly")
    await kube.delete("agentruns", "team", "support")


def test_the_log_is_read_as_rights() -> None:
    """So that the comparison above is one of equal things."""

    class Fake(Audited):
        def __init__(self) -> None:
            pass

        def requests(self) -> list[Any]:
            ref = {"resource": "agentruns", "subresource": "status", "apiGroup": "agentrun.dev"}
            return [{"verb": "patch", "objectRef": ref, "responseStatus": {"code": 403}, "requestURI": "/x"}]

    assert Fake().used() == {("agentrun.dev", "agentruns/status", "patch")}
    assert Fake().refused() == ["/x"]
