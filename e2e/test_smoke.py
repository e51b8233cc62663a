"""The whole path on a real cluster, once: Ready, a stream that is cut, a worker that is killed, a schedule, and nothing left."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import eventually

from harness import agents
from harness.gateway import shown, text_of
from harness.shop import TOOLS, WORK, Shop

EXPECTED = "".join(f"{number} " for number in range(30))
"""What the provider says to `deltas n=30`."""


def deltas(events: list[dict[str, Any]]) -> int:
    """How many pieces of text there are among events."""
    return sum(event["kind"] == "text_delta" for event in events)


async def test_ready_within_a_minute_and_a_cut_stream_goes_on_without_a_gap_or_a_double(
    shop: Shop, say: Callable[[str], None]
) -> None:
    started = time.monotonic()
    gateway = shop.agent("support", TOOLS, ready_within=60)
    say(f"Ready after {time.monotonic() - started:.1f} s")

    run = gateway.submit("[[slow ms=150]] [[deltas n=30]]")
    first: list[dict[str, Any]] = []
    async with gateway.stream(run["run_id"]) as stream:
        while deltas(first) < 3:
            first += [frame.json() for frame in await stream.take(1, within=60)]
    assert gateway.run(run["run_id"])["status"] == "running", "the stream was cut before the run's end"
    assert 0 < len(text_of(first)) < len(EXPECTED)
    async with gateway.stream(run["run_id"], after=first[-1]["seq"]) as stream:
        rest = [frame.json() for frame in await stream.rest(within=60)]
    again = await gateway.events(run["run_id"])

    seen = first + rest
    assert [event["seq"] for event in seen] == list(range(len(seen))), shown(seen)
    assert [(event["seq"], event["kind"]) for event in seen] == [(event["seq"], event["kind"]) for event in again]
    assert text_of(seen) == text_of(again) == EXPECTED
    assert seen[-1]["kind"] == "completed"


async def test_a_worker_that_is_killed_after_a_tool_call_is_replaced_and_the_tool_is_called_once(shop: Shop) -> None:
    shop.allowed.restarts["worker"] = 1
    gateway = shop.agent(
        "support", TOOLS, workers={"minReplicas": 1, "maxReplicas": 2, "leaseSeconds": 5}, reaper={"idleSeconds": 5}
    )
    run = gateway.submit('[[tool charge {"order": "o1"}]] [[slow ms=200]] [[deltas n=40]]')
    async with gateway.stream(run["run_id"]) as stream:
        seen: list[dict[str, Any]] = []
        while deltas(seen) < 3:
            seen += [frame.json() for frame in await stream.take(1, within=60)]
        (pod,) = shop.pods("support", "worker")
        assert shop.system.cluster.kill(pod["metadata"]["uid"]) >= 1
        seen += [frame.json() for frame in await stream.rest(within=90)]

    assert [event["seq"] for event in seen] == list(range(len(seen))), shown(seen)
    assert sum(event["kind"] == "restart" for event in seen) == 1
    assert (seen[-1]["kind"], seen[-1]["epoch"]) == ("completed", 2), shown(seen)
    assert text_of(seen) == "".join(f"{number} " for number in range(40))
    assert shop.counts()["charge-o1"] == 1
    assert shop.psql("SELECT outcome FROM attempts ORDER BY epoch").splitlines() == ["lost", "finished"]


async def test_sc_01_for_a_single_run_a_worker_comes_from_zero_and_goes_again_and_so_for_a_crontask_on_its_minute(
    shop: Shop, say: Callable[[str], None]
) -> None:
    gateway = shop.agent("jobs", WORK, scaling={"cooldownSeconds": 2, "scaleDownStabilizationSeconds": 0})
    assert shop.pods("jobs", "worker") == []

    started = time.monotonic()
    run = gateway.submit("1 second")["run_id"]
    await eventually(lambda: gateway.run(run)["status"] == "succeeded", within=60, what="it is done")
    say(f"from zero to done: {time.monotonic() - started:.1f} s")
    assert shop.counts()[f"done-{run}"] == 1
    await eventually(lambda: not shop.pods("jobs", "worker"), within=60, what="no worker is left")

    shop.apply(agents.cron_task("each-minute", "jobs"))
    await eventually(
        lambda: shop.psql("SELECT count(*) FROM slots WHERE outcome = 'ran'") == "1", within=90, what="its first slot"
    )
    done = "SELECT count(*) FROM slots s JOIN runs r ON r.id = s.run_id WHERE r.slot = s.slot AND r.status = 'succeeded'"
    await eventually(lambda: shop.psql(done) == "1", within=60, what="its run is done")
    await eventually(
        lambda: (shop.kubectl.get("crontask", "each-minute", shop.namespace).get("status") or {}).get("lastScheduleTime"),
        within=30,
        what="its status says so",
    )


@pytest.mark.full
async def test_two_agentruns_on_one_database_are_told_apart(shop: Shop) -> None:
    shop.agent("first", WORK)
    shop.apply(agents.agent_run("second", WORK))
    await eventually(
        lambda: (
            (shop.kubectl.condition("agentrun", "second", shop.namespace, "SchemaReady") or {}).get("reason") == "DatabaseNotOurs"
        ),
        within=30,
        what="the second one is refused",
    )
    assert shop.kubectl.find("deployment", "second-worker", shop.namespace) is None
