"""Money on a real cluster: a day's budget refuses, a run's own limit stops, and the books agree though workers are killed."""

import asyncio
from collections.abc import Callable

import pytest
from waiting import eventually

from harness.shop import TOOLS, Shop

PRICES = [{"model": "gpt-4.1", "inputUsd": "0", "outputUsd": "100"}]
ONE_RUN = "[[size n=3800 piece=95]] [[slow ms=250]] write"
"""950 output tokens, 0.095 USD, in 10 seconds."""
TWO_STEPS = '[[tool charge {"order": "o1"}]] [[size n=3800]] write'


def usd(shop: Shop, statement: str) -> float:
    return float(shop.psql(statement) or 0)


@pytest.mark.full
async def test_a_budget_stops_a_run_and_refuses_what_does_not_fit_while_workers_are_killed(
    shop: Shop, say: Callable[[str], None]
) -> None:
    budget = {"usdPerRun": "0.1", "usdPerDay": "1"}
    gateway = shop.agent("money", TOOLS, budget=budget, prices=PRICES, workers={"minReplicas": 2, "leaseSeconds": 5})
    gateway.open()
    answers = [
        gateway.request("POST", f"/v1/sessions/s{n}/messages", {"input": ONE_RUN}, {"Idempotency-Key": f"k{n}"})
        for n in range(20)
    ]
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {202, 429} and codes.count(202) >= 10, codes
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "budget_exhausted" and int(refused.headers["Retry-After"]) >= 1

    await eventually(
        lambda: int(shop.psql("SELECT count(*) FROM runs WHERE status = 'running'")) > 0,
        within=60,
        what="runs are being worked on",
    )
    shop.allowed.restarts["worker"] = 1
    for pod in shop.pods("money", "worker")[:1]:
        shop.system.cluster.kill(pod["metadata"]["uid"])
    left = "SELECT count(*) FROM runs WHERE status IN ('pending', 'running')"
    peak = 0.0
    async with asyncio.timeout(180):
        while int(shop.psql(left)):
            peak = max(peak, usd(shop, "SELECT max(reserved + spent) FROM budget_counters"))
            await asyncio.sleep(0.5)
    spent = usd(shop, "SELECT spent FROM budget_counters WHERE scope = 'agent'")
    assert 0.9 <= peak <= 1 and 0.9 <= spent <= 1, "seen while runs were under way, and at the end"
    assert usd(shop, "SELECT sum(reserved) FROM budget_counters") == 0
    assert spent == usd(shop, "SELECT sum(cost_usd) FROM ledger")
    report = gateway.request("GET", "/v1/usage?group_by=model").json()
    assert float(report["total"]["cost_usd"]) == spent and report["total"]["calls"] == int(
        shop.psql("SELECT count(*) FROM ledger")
    )
    say(f"{codes.count(202)} of 20 admitted, {spent} of 1 USD spent, at most {peak} spent and set aside")

    shop.change("money", budget={"usdPerRun": "0.0001", "usdPerDay": "100"})
    shop.ready("money", within=120)

    def admitted() -> str | None:
        answer = gateway.request("POST", "/v1/sessions/o/messages", {"input": TWO_STEPS}, {"Idempotency-Key": "o1"})
        if answer.status_code != 202:
            gateway.close()  # its port-forward may lead to a pod of before, as long as that one takes to end
        return answer.json().get("run_id")

    stopped = await eventually(admitted, within=60, what="the day has room again")
    await eventually(lambda: gateway.run(stopped)["status"] == "failed", within=60, what="the run stops at its limit")
    found = gateway.run(stopped)
    assert found["error"]["type"] == "budget_exceeded" and found["usage"]["calls"] == 1
    assert shop.counts().get("charge-o1", 0) == 0, "the tools of the call that crossed the limit do not run"
