"""What breaks in a cluster: the operator, the node, Redis, Postgres. Runs go on, and nothing is lost or done twice."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from waiting import eventually

from harness.chart import NAMESPACE
from harness.invariants import API_STARTS_ANEW
from harness.kubectl import Document
from harness.shop import WORK, Shop
from harness.system import STORES_NAMESPACE
from harness.watching import PodWatch, every_pod

pytestmark = pytest.mark.full

AWAY = 90.0
"""Seconds for which there may be no operator."""


async def test_ko_09_another_operator_takes_over_from_one_that_is_killed_and_through_a_roll_out(
    shop: Shop, say: Callable[[str], None]
) -> None:
    shop.allowed.operators_replaced = True
    shop.allowed.restarts["operator"] = 1  # the killed container may begin again before its pod is gone
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    before, deployments = shop.uids("jobs"), names(shop, "deployments")

    # Nobody gives the Lease back, and nobody of its holder's name asks for it again.
    first = holder(shop)
    assert shop.system.cluster.kill(shop.kubectl.get("pod", first, NAMESPACE)["metadata"]["uid"]) >= 1
    shop.kubectl("delete", "pod", first, "-n", NAMESPACE, "--grace-period=0", "--force")
    begun = time.monotonic()
    await eventually(lambda: holder(shop) not in ("", first), within=AWAY, what="another one holds the Lease")
    say(f"another operator leads {time.monotonic() - begun:.0f} s after the kill (at most {AWAY:g})")
    shop.change("jobs", workers={"minReplicas": 2})
    await eventually(lambda: len(shop.pods("jobs", "worker")) == 2, within=60, what="the change is carried out")

    # One after the other is replaced; whoever holds the Lease gives it back.
    operators = {pod["metadata"]["name"] for pod in shop.system.chart.operator_pods()}
    begun = time.monotonic()
    shop.kubectl("rollout", "restart", "-n", NAMESPACE, f"deployment/{shop.system.chart.release}")
    await eventually(lambda: holder(shop) not in {"", *operators}, within=AWAY, what="a new one holds the Lease")
    say(f"a new operator leads {time.monotonic() - begun:.0f} s after the roll-out began (at most {AWAY:g})")
    scale(shop, 2)  # as it is; returns when the roll-out has ended
    shop.change("jobs", workers={"minReplicas": 3})
    await eventually(lambda: len(shop.pods("jobs", "worker")) == 3, within=60, what="the change is carried out")

    assert names(shop, "deployments") == deployments, "nothing is there twice"
    assert {name for name in before if "-worker-" not in name} <= set(shop.uids("jobs")), "nothing else was touched"
    await shop.done(gateway, [gateway.submit("1")["run_id"]], within=30)


def holder(shop: Shop) -> str:
    """The pod that holds the operator's Lease; empty if nobody does."""
    return str(shop.kubectl.get("lease", shop.system.chart.release, NAMESPACE)["spec"].get("holderIdentity") or "")


def names(shop: Shop, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in shop.kubectl.items(kind, shop.namespace)}


async def test_sc_08_runs_go_on_on_the_same_pods_while_both_operators_are_down_and_when_they_are_back(shop: Shop) -> None:
    shop.allowed.operators_replaced = True
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1, "concurrency": 4})
    before, generation = shop.uids("jobs"), shop.generations("jobs")
    runs = [gateway.submit("until operators-are-back")["run_id"] for _ in range(3)]
    scale(shop, 0)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            runs.append(gateway.submit("1")["run_id"])
            await eventually(
                lambda: gateway.run(runs[-1])["status"] == "succeeded", within=30, what="it is done without an operator"
            )
    finally:
        scale(shop, 2)
    shop.kubectl.wait("agentrun/jobs", "condition=Ready", shop.namespace, within=60)
    await eventually(lambda: holder(shop), within=AWAY, what="an operator leads")
    shop.ready("jobs")
    assert shop.uids("jobs") == before
    assert shop.generations("jobs") == generation

    shop.mark("operators-are-back")
    await shop.done(gateway, runs, within=60)
    assert shop.outcomes() == {"finished": len(runs)}
    assert shop.uids("jobs") == before


def scale(shop: Shop, replicas: int) -> None:
    shop.kubectl("scale", "-n", NAMESPACE, f"deployment/{shop.system.chart.release}", f"--replicas={replicas}")
    shop.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{shop.system.chart.release}", "--timeout=90s", within=120)


async def test_redis_is_lost_with_fifty_runs_queued(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, workers={"concurrency": 1, "minReplicas": 1, "maxReplicas": 1})
    runs = [gateway.submit("until redis-is-lost")["run_id"]]
    await eventually(lambda: gateway.run(runs[0])["status"] == "running", within=30, what="the only worker is busy")
    runs += [gateway.submit("0.2")["run_id"] for _ in range(50)]
    assert shop.psql("SELECT count(*) FROM runs WHERE status = 'pending'") == "50"
    shop.system.valkey("SET", "e2e-was-here", "1")
    (pod,) = shop.kubectl.items("pods", STORES_NAMESPACE, labels="app=valkey")

    shop.kubectl("delete", "pod", pod["metadata"]["name"], "-n", STORES_NAMESPACE, "--grace-period=0", "--force")

    shop.kubectl("rollout", "status", "-n", STORES_NAMESPACE, "deployment/valkey", "--timeout=60s", within=90)
    (fresh,) = shop.kubectl.items("pods", STORES_NAMESPACE, labels="app=valkey")
    assert fresh["metadata"]["uid"] != pod["metadata"]["uid"]
    assert shop.system.valkey("EXISTS", "e2e-was-here") == "0", "everything is lost"
    shop.mark("redis-is-lost")
    await shop.done(gateway, runs, within=180)


async def test_postgres_is_restarted_during_runs(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, workers={"concurrency": 4, "minReplicas": 2})
    runs = [gateway.submit("15")["run_id"] for _ in range(6)]
    await eventually(lambda: gateway.run(runs[0])["status"] == "running", within=30, what="they have begun")

    shop.kubectl("delete", "pod", "-n", STORES_NAMESPACE, "-l", "app=postgres", within=120)
    shop.kubectl("rollout", "status", "-n", STORES_NAMESPACE, "statefulset/postgres", "--timeout=90s", within=120)

    await shop.done(gateway, runs, within=120)


async def test_the_node_is_restarted(shop: Shop) -> None:
    shop.allowed.restarts.update(operator=6, gateway=8, worker=8, scheduler=8, provider=2, postgres=2, valkey=2)
    shop.allowed.error("operator", API_STARTS_ANEW)
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1, "leaseSeconds": 5}, reaper={"idleSeconds": 5})
    runs = [gateway.submit("20")["run_id"] for _ in range(3)]
    await eventually(lambda: gateway.run(runs[0])["status"] == "running", within=30, what="they have begun")
    # The provider counts in memory, from 0 after the restart; none is done before it, so those that it counts then are all.
    assert not any(name.startswith("done-") for name in shop.counts())
    gateway.close()

    shop.system.cluster.restart_node()

    await eventually(lambda: shop.kubectl("get", "nodes"), within=120, what="the API server answers")
    await eventually(lambda: shop.psql("SELECT 1") == "1", within=180, what="Postgres is back")
    assert shop.psql("SELECT count(*) FROM attempts WHERE epoch = 1 AND outcome = 'finished'") == "0", "all were cut"
    await shop.done(gateway, runs, within=240)
    finished = shop.psql("SELECT count(*) FROM attempts WHERE outcome = 'finished' GROUP BY run_id").splitlines()
    assert finished == ["1"] * len(runs), "each is done by one attempt"
    shop.kubectl.wait("agentrun/jobs", "condition=Ready", shop.namespace, within=120)


async def test_qw_05_a_worker_that_is_told_to_stop_ends_its_run_takes_no_other_and_exits_with_0(
    shop: Shop, say: Callable[[str], None]
) -> None:
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1, "concurrency": 2, "drainSeconds": 45})
    (pod,) = shop.pods("jobs", "worker")
    name = pod["metadata"]["name"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60
    with every_pod(shop.kubectl, shop.namespace) as seen:
        await eventually(lambda: seen.created("worker"), within=30, what="the watch has begun")
        first = gateway.submit("10")["run_id"]
        await eventually(lambda: gateway.run(first)["status"] == "running", within=30, what="it has begun")

        signalled = datetime.now(UTC)
        shop.kubectl.delete("pod", name, shop.namespace, wait=False)  # the kubelet signals process 1 of the container
        await eventually(
            lambda: "worker stops" in shop.kubectl("logs", "-n", shop.namespace, name), within=30, what="the signal has arrived"
        )
        second = gateway.submit("0.1")["run_id"]  # there is room for it
        await shop.done(gateway, [first, second], within=90)
        end = await eventually(lambda: terminated(seen, name), within=60, what="its container has ended")
    took = (datetime.fromisoformat(end["finishedAt"]) - signalled).total_seconds()
    say(f"process 1 ended {took:.0f} s after the signal (less than 15), with {end['exitCode']}")
    assert end["exitCode"] == 0
    assert took < 15
    rows = shop.psql(f"SELECT epoch, outcome, owner LIKE '{name}-%' FROM attempts ORDER BY run_id = '{second}'").splitlines()
    assert rows == ["1|finished|t", "1|finished|f"]
    assert shop.system.valkey("XPENDING", f"agentrun:{{{shop.namespace}/jobs}}:runs", "workers").split()[0] == "0"


def terminated(seen: PodWatch, name: str) -> Document | None:
    """How the container of a pod ended, as soon as it has."""
    for pod in seen.states():
        if pod["metadata"]["name"] == name:
            for status in pod["status"].get("containerStatuses", ()):
                if end := status["state"].get("terminated"):
                    return dict(end)
    return None
