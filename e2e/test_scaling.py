"""Scaling on a real cluster: up at once, down without killing anybody at work, and in a time that is printed."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import eventually

from harness.gateway import Gateway
from harness.shop import WORK, Shop

pytestmark = pytest.mark.full

RUNS = 200
ONE_EACH = {
    "workers": {"concurrency": 1, "maxReplicas": 8},
    "scaling": {"targetPerWorker": 1, "cooldownSeconds": 5, "scaleDownStabilizationSeconds": 0},
}


def succeeded(shop: Shop) -> int:
    return int(shop.psql("SELECT count(*) FROM runs WHERE status = 'succeeded'"))


def asked_for(shop: Shop, name: str) -> int:
    found = shop.kubectl.find("deployment", f"{name}-worker", shop.namespace)
    return int(found["spec"]["replicas"]) if found else 0


async def test_two_hundred_runs_of_two_seconds_each_are_done_once_by_eight_workers_from_zero(
    shop: Shop, say: Callable[[str], None]
) -> None:
    gateway = shop.agent("jobs", WORK, **ONE_EACH)
    gateway.open()
    started = time.monotonic()

    async def eight() -> bool:
        return await asyncio.to_thread(asked_for, shop, "jobs") == 8

    asking = asyncio.create_task(eventually(eight, within=60, what="8 workers are asked for"))
    asking.add_done_callback(lambda _: say(f"8 workers asked for after {time.monotonic() - started:.1f} s (aim 3)"))
    with ThreadPoolExecutor(16) as threads:
        loop = asyncio.get_running_loop()
        submitted = await asyncio.gather(*(loop.run_in_executor(threads, gateway.submit, "2") for _ in range(RUNS)))
    say(f"{RUNS} runs submitted after {time.monotonic() - started:.1f} s")
    runs = [one["run_id"] for one in submitted]
    await asking
    await eventually(lambda: succeeded(shop) == RUNS, within=240, what="all runs are done")
    say(f"{RUNS} runs done after {time.monotonic() - started:.1f} s (aim 60, ideal 50)")

    counts = shop.counts()
    assert all(counts[f"done-{run}"] == 1 for run in runs)
    assert shop.psql("SELECT count(*) FROM attempts") == str(RUNS)


YOUNGEST = {"workers": {"concurrency": 1, "maxReplicas": 5, "drainSeconds": 0}, "scaling": ONE_EACH["scaling"]}


async def test_a_scale_in_spares_the_busy_pod_that_is_the_youngest(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK, **YOUNGEST)
    for _ in range(5):
        await one_busy_youngest(shop, gateway)
    assert attempts_lost(shop) == 0


async def test_a_scale_in_kills_busy_pods_of_a_cluster_that_does_not_look_at_deletion_costs(shop: Shop) -> None:
    """So the scenario before can fail: a pod of about the same age is spared by luck only, one time in five."""
    gateway = shop.agent("jobs", WORK, **YOUNGEST)
    await deletion_costs(shop, matter=False)
    try:
        rounds = 0
        while not attempts_lost(shop):
            rounds += 1
            assert rounds <= 5, "no busy pod was killed"
            await one_busy_youngest(shop, gateway)
    finally:
        await deletion_costs(shop, matter=True)


async def one_busy_youngest(shop: Shop, gateway: Gateway) -> None:
    """0 → 1 → 5 → 1, and the run that holds the last of them is on the pod that came last."""
    short = [gateway.submit("25")["run_id"] for _ in range(4)]
    await eventually(lambda: ready(shop) == 4, within=60, what="four workers")
    long = gateway.submit("60")["run_id"]
    await eventually(lambda: ready(shop) == 5, within=60, what="five workers")
    await eventually(lambda: gateway.run(long)["status"] == "running", within=30, what="the long run has begun")
    await eventually(
        lambda: all(gateway.run(run)["status"] == "succeeded" for run in short), within=60, what="the short ones end"
    )
    await eventually(lambda: asked_for(shop, "jobs") == 1, within=30, what="one worker is left")
    await eventually(lambda: gateway.run(long)["status"] == "succeeded", within=150, what="the long run is done")
    await eventually(lambda: not shop.pods("jobs", "worker"), within=60, what="no worker is left")


def attempts_lost(shop: Shop) -> int:
    return int(shop.psql("SELECT count(*) FROM attempts WHERE epoch > 1"))


async def deletion_costs(shop: Shop, *, matter: bool) -> None:
    """Whether the controller manager looks at them: its feature gate PodDeletionCost. It restarts for it."""
    manifest = "/etc/kubernetes/manifests/kube-controller-manager.yaml"
    argument = "--feature-gates=PodDeletionCost=false"
    change = f"/{argument}/d" if matter else f"s/^    - kube-controller-manager$/&\\n    - {argument}/"
    # A file of sed's own beside it would be taken for one more pod.
    shop.system.cluster.on_node(f"sed '{change}' {manifest} > /tmp/changed && cat /tmp/changed > {manifest}")

    def runs_so() -> bool:
        pods = shop.kubectl.items("pods", "kube-system", labels="component=kube-controller-manager")
        return any(
            (argument in pod["spec"]["containers"][0]["command"]) is not matter
            and all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}]))
            for pod in pods
        )

    await eventually(runs_so, within=120, what="the controller manager runs with it")


def ready(shop: Shop) -> int:
    found = shop.kubectl.find("deployment", "jobs-worker", shop.namespace) or {}
    return int((found.get("status") or {}).get("readyReplicas") or 0)
