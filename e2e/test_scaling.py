"""Scaling on a real cluster: up at once, down without killing anybody at work, and in a time that is printed."""

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
    with ThreadPoolExecutor(16) as threads:
        runs = list(threads.map(lambda _: gateway.submit("2")["run_id"], range(RUNS)))
    await eventually(lambda: asked_for(shop, "jobs") == 8, within=30, what="8 workers are asked for")
    say(f"8 workers asked for after {time.monotonic() - started:.1f} s (aim 3)")
    await eventually(lambda: succeeded(shop) == RUNS, within=240, what="all runs are done")
    say(f"{RUNS} runs done after {time.monotonic() - started:.1f} s (aim 60, ideal 50)")

    counts = shop.counts()
    assert all(counts[f"done-{run}"] == 1 for run in runs)
    assert shop.psql("SELECT count(*) FROM attempts") == str(RUNS)


async def test_a_scale_in_spares_the_busy_pod_that_is_the_youngest(shop: Shop) -> None:
    gateway = shop.agent(
        "jobs", WORK, workers={"concurrency": 1, "maxReplicas": 5, "drainSeconds": 0}, scaling=ONE_EACH["scaling"]
    )
    for _ in range(5):
        await one_busy_youngest(shop, gateway)
    assert shop.psql("SELECT count(*) FROM attempts WHERE epoch > 1") == "0"


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
    await eventually(lambda: gateway.run(long)["status"] == "succeeded", within=90, what="the long run is done")
    await eventually(lambda: not shop.pods("jobs", "worker"), within=60, what="no worker is left")


def ready(shop: Shop) -> int:
    found = shop.kubectl.find("deployment", "jobs-worker", shop.namespace) or {}
    return int((found.get("status") or {}).get("readyReplicas") or 0)
