"""What breaks in a cluster: the operator, the node, Redis, Postgres. Runs go on, and nothing is lost or done twice."""

import time

import pytest
from waiting import eventually

from harness.chart import NAMESPACE
from harness.shop import WORK, Shop
from harness.system import STORES_NAMESPACE

pytestmark = pytest.mark.full


async def test_the_operator_is_killed_and_the_other_one_takes_over(shop: Shop) -> None:
    shop.operator_was_disturbed = True
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    holder = shop.kubectl.get("lease", shop.system.chart.release, NAMESPACE)["spec"]["holderIdentity"]
    pod = shop.kubectl.get("pod", holder, NAMESPACE)
    assert shop.system.cluster.kill(pod["metadata"]["uid"]) >= 1

    shop.kubectl(
        "patch", "agentrun/jobs", "-n", shop.namespace, "--type=merge", "-p", '{"spec": {"workers": {"minReplicas": 2}}}'
    )

    await eventually(lambda: len(shop.pods("jobs", "worker")) == 2, within=60, what="the change is carried out")
    run = gateway.submit("1")["run_id"]
    await shop.done(gateway, [run], within=30)


async def test_runs_go_on_while_both_operators_are_down(shop: Shop) -> None:
    shop.operator_was_disturbed = True
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    scale(shop, 0)
    try:
        until = time.monotonic() + 120
        runs = []
        while time.monotonic() < until:
            runs.append(gateway.submit("1")["run_id"])
            await eventually(
                lambda: gateway.run(runs[-1])["status"] == "succeeded", within=30, what="it is done without an operator"
            )
    finally:
        scale(shop, 2)
    shop.kubectl.wait("agentrun/jobs", "condition=Ready", shop.namespace, within=60)


def scale(shop: Shop, replicas: int) -> None:
    shop.kubectl("scale", "-n", NAMESPACE, f"deployment/{shop.system.chart.release}", f"--replicas={replicas}")
    shop.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{shop.system.chart.release}", "--timeout=60s", within=90)


async def test_redis_is_lost_with_fifty_runs_queued(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, workers={"concurrency": 2, "maxReplicas": 4}, scaling={"targetPerWorker": 2})
    runs = [gateway.submit("1")["run_id"] for _ in range(50)]

    shop.kubectl("delete", "pod", "-n", STORES_NAMESPACE, "-l", "app=valkey", "--grace-period=0", "--force")

    await shop.done(gateway, runs, within=180)


async def test_postgres_is_restarted_during_runs(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, workers={"concurrency": 4, "minReplicas": 2})
    runs = [gateway.submit("15")["run_id"] for _ in range(6)]
    await eventually(lambda: gateway.run(runs[0])["status"] == "running", within=30, what="they have begun")

    shop.kubectl("delete", "pod", "-n", STORES_NAMESPACE, "-l", "app=postgres", within=120)
    shop.kubectl("rollout", "status", "-n", STORES_NAMESPACE, "statefulset/postgres", "--timeout=90s", within=120)

    await shop.done(gateway, runs, within=120)


async def test_the_node_is_restarted(shop: Shop) -> None:
    shop.operator_was_disturbed = True
    shop.expected_errors.append(r"storage is \(re\)initializing")  # what a starting API server answers; kopf asks again
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1, "leaseSeconds": 5}, reaper={"idleSeconds": 5})
    runs = [gateway.submit("20")["run_id"] for _ in range(3)]
    await eventually(lambda: gateway.run(runs[0])["status"] == "running", within=30, what="they have begun")
    gateway.close()

    shop.system.cluster.restart_node()

    await eventually(lambda: shop.kubectl("get", "nodes"), within=120, what="the API server answers")
    await eventually(
        lambda: shop.kubectl("rollout", "status", "-n", STORES_NAMESPACE, "statefulset/postgres", "--timeout=5s"),
        within=180,
        what="Postgres is back",
    )
    await shop.done(gateway, runs, within=240)
    shop.kubectl.wait("agentrun/jobs", "condition=Ready", shop.namespace, within=120)
