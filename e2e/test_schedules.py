"""CronTasks on a real cluster: each slot has its run, whatever happens to the schedulers."""

import asyncio
import time
from collections.abc import Callable
from itertools import cycle

import pytest
from waiting import eventually

from harness.shop import WORK, Shop

MINUTES = 3
KILL_EVERY = 15.0
SCHEDULERS = 2
"""The default of spec.scheduler.replicas."""


@pytest.mark.full
async def test_a_crontask_fires_on_three_consecutive_minutes_while_schedulers_are_killed(
    shop: Shop, say: Callable[[str], None]
) -> None:
    gateway = shop.agent("jobs", WORK)
    shop.apply(
        {
            "apiVersion": "agentrun.dev/v1alpha1",
            "kind": "CronTask",
            "metadata": {"name": "each-minute"},
            "spec": {"agentRunRef": {"name": "jobs"}, "schedule": "* * * * *", "input": "0.1"},
        }
    )
    await eventually(
        lambda: (shop.kubectl.get("crontask", "each-minute", shop.namespace).get("status") or {}).get("nextScheduleTime"),
        within=30,
        what="it is followed",
    )

    await eventually(lambda: len(shop.pods("jobs", "scheduler")) == SCHEDULERS, within=60, what="both schedulers are there")

    killed: set[str] = set()
    shop.allowed.restarts["scheduler"] = 2 * (MINUTES + 2) * 60 // int(KILL_EVERY)  # of each of the two, until its pod is gone
    fired = "SELECT count(*) FROM slots WHERE run_id IS NOT NULL"
    ends = time.monotonic() + (MINUTES + 2) * 60
    for every in cycle((False, True)):  # one of them, then all, and so on
        if int(shop.psql(fired)) >= MINUTES:
            break
        assert time.monotonic() < ends, shop.psql("SELECT slot, outcome, detail FROM slots ORDER BY slot")
        for pod in shop.pods("jobs", "scheduler")[: None if every else 1]:
            name = pod["metadata"]["name"]
            if shop.system.cluster.kill(pod["metadata"]["uid"]):
                killed.add(name)
            # A new pod begins at once; the old one's container would wait longer each time.
            shop.kubectl("delete", "pod", name, "-n", shop.namespace, "--grace-period=0", "--force", "--ignore-not-found")
        await asyncio.sleep(KILL_EVERY)

    slots = shop.psql("SELECT extract(epoch FROM slot)::bigint FROM slots ORDER BY slot").splitlines()
    minutes = [int(slot) // 60 for slot in slots]
    assert minutes == list(range(minutes[0], minutes[0] + len(minutes))), "no minute is left out"
    assert shop.psql("SELECT count(*) FROM slots WHERE run_id IS NULL") == "0"
    assert shop.psql("SELECT count(*) FROM runs") == shop.psql(
        "SELECT count(DISTINCT slot) FROM runs WHERE cron_task IS NOT NULL"
    )
    assert len(killed) >= MINUTES, "schedulers were killed all the while"
    say(f"{len(minutes)} slots; killed {len(killed)} schedulers, one every {KILL_EVERY:g} s")

    shop.kubectl("patch", "crontask", "each-minute", "-n", shop.namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    runs = shop.psql("SELECT id FROM runs").splitlines()
    await shop.done(gateway, runs, within=120)
