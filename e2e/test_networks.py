"""What the NetworkPolicies promise is enforced: everything works, and what is not named is refused. So is what the `restricted` standard
forbids.

A refusal proves something only where the same connection would come about without the policy: each listener is proven from beside it, and
each way by a pod that no policy selects.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator

import pytest
from waiting import eventually

from harness import agents
from harness.chart import NAMESPACE
from harness.commands import CommandError
from harness.kubectl import Kubectl
from harness.shop import WORK, Shop
from harness.system import STORES_NAMESPACE

pytestmark = pytest.mark.full

SECRET_PORT = 9000
LISTEN = f"""
import socket, sys, threading
server = socket.create_server(("", {SECRET_PORT}))
def accept():
    while True:
        server.accept()[0].close()
threading.Thread(target=accept, daemon=True).start()
print("listens", flush=True)
sys.stdin.read()"""
"""Ends with its standard input, and so with the `kubectl exec` that began it."""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


@contextlib.contextmanager
def listening(kubectl: Kubectl, namespace: str, pod: str) -> Iterator[None]:
    """A listener on SECRET_PORT in a pod, as a debugger or a forgotten server would be."""
    inside = ["exec", "-i", "-n", namespace, pod, "--", "python", "-c", LISTEN]
    command = ["kubectl", "--context", kubectl.context, *inside]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"listens\n"
            yield
        finally:
            process.terminate()


def reaches(kubectl: Kubectl, namespace: str, pod: str, host: str, port: int) -> bool:
    """Whether a pod gets a TCP connection."""
    try:
        kubectl("exec", "-n", namespace, pod, "--", "python", "-c", CONNECT, host, str(port))
    except CommandError as error:
        assert any(word in str(error) for word in ("TimeoutError", "ConnectionRefusedError", "OSError", "timed out")), error
        return False
    return True


async def test_default_deny_is_enforced_and_everything_works(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    shop.apply(agents.pod("probe", shop.system.image, ["sleep", "600"]))
    shop.kubectl.wait("pod/probe", "condition=Ready", shop.namespace, within=60)
    address, pods = {}, {}
    for part in ("gateway", "worker", "scheduler"):
        found = shop.pods("jobs", part)[0]
        address[part], pods[part] = found["status"]["podIP"], found["metadata"]["name"]
    provider = shop.kubectl.items("pods", shop.namespace, labels="app=provider")[0]
    operator = shop.system.chart.operator_pods()[0]

    def in_shop(pod: str, host: str, port: int) -> bool:
        return reaches(shop.kubectl, shop.namespace, pod, host, port)

    # What no policy selects gets everywhere that policies leave open.
    assert in_shop("probe", "kubernetes.default", 443)
    with listening(shop.kubectl, shop.namespace, provider["metadata"]["name"]):
        assert in_shop("probe", provider["status"]["podIP"], SECRET_PORT)
        # Out: a worker reaches the provider that spec.networkPolicy.egress names, and both stores, and nothing else.
        assert in_shop(pods["worker"], "provider", agents.PROVIDER_PORT)
        assert in_shop(pods["worker"], f"postgres.{STORES_NAMESPACE}", 5432)
        assert in_shop(pods["worker"], f"valkey.{STORES_NAMESPACE}", 6379)
        for part, name in pods.items():
            await refused(lambda name=name: in_shop(name, provider["status"]["podIP"], SECRET_PORT), f"out of the {part}")
            await refused(lambda name=name: in_shop(name, "kubernetes.default", 443), f"the API server from the {part}")

    # In: what is served, and nothing else.
    for part, port in (("gateway", 8080), ("worker", 8081), ("scheduler", 8081)):
        assert in_shop("probe", address[part], port)
        with listening(shop.kubectl, shop.namespace, pods[part]):
            assert in_shop(pods[part], "127.0.0.1", SECRET_PORT)
            await refused(lambda part=part: in_shop("probe", address[part], SECRET_PORT), f"into the {part}")

    # The operator: in, its health port; out, the API server, stores, and nothing else.
    name, place = operator["metadata"]["name"], operator["status"]["podIP"]
    assert in_shop("probe", place, 8081)
    with listening(shop.kubectl, NAMESPACE, name):
        assert reaches(shop.kubectl, NAMESPACE, name, "127.0.0.1", SECRET_PORT)
        await refused(lambda: in_shop("probe", place, SECRET_PORT), "into the operator")
    assert reaches(shop.kubectl, NAMESPACE, name, f"valkey.{STORES_NAMESPACE}", 6379)
    assert in_shop("probe", provider["status"]["podIP"], agents.PROVIDER_PORT)
    await refused(
        lambda: reaches(shop.kubectl, NAMESPACE, name, provider["status"]["podIP"], agents.PROVIDER_PORT), "out of the operator"
    )

    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=30)

    # The counter-proof: without its policies the same pod lets everybody in.
    shop.change("jobs", networkPolicy={"enabled": False})
    with listening(shop.kubectl, shop.namespace, pods["scheduler"]):
        await eventually(
            lambda: in_shop("probe", address["scheduler"], SECRET_PORT), within=60, what="without a policy it is reached"
        )


async def refused(connects: Callable[[], bool], what: str) -> None:
    """A policy takes effect within seconds; from then on there is no connection."""
    await eventually(lambda: not connects(), within=30, what=f"refused: {what}")
    assert not connects(), what


async def test_all_pods_run_under_the_restricted_standard(shop: Shop) -> None:
    label = "pod-security.kubernetes.io/enforce"
    privileged = agents.pod("privileged", shop.system.image, ["sleep", "1"])
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(CommandError, match="violates PodSecurity"):
        shop.apply(privileged)

    shop.allowed.operators_replaced = True
    chart = shop.system.chart
    shop.kubectl("label", "namespace", NAMESPACE, f"{label}=restricted", "--overwrite")
    try:
        chart.uninstall()
        chart.install()
        chart.test()
        assert len(chart.operator_pods()) == 2
        gateway = shop.agent("jobs", WORK)  # in a namespace that enforces it, too
        await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)
        assert shop.kubectl.get("namespace", shop.namespace)["metadata"]["labels"][label] == "restricted"
    finally:
        shop.kubectl("label", "namespace", NAMESPACE, f"{label}-")
