"""Watches that go silent without an error, with an operator as shipped, at its default times, that reconciles on real stores."""

import time
from pathlib import Path
from typing import Any

import pytest
from kube_client import Kube, agent_run, comes_up, path
from kube_front import kube_front
from kube_servers import KubeServer
from processes import ProductProcess
from waiting import eventually, rests

FULL_LIST = "agentrun_operator_resync_seconds_count"


@pytest.mark.long
@pytest.mark.parametrize(("edited", "silent"), [("agentruns", ""), ("secrets", "/secrets")], ids=["all", "of-secrets"])
async def test_ko_02_at_default_times_what_changed_behind_silent_watches_is_reconciled_within_three_minutes(
    edited: str,
    silent: str,
    operator_process: Any,
    crds_applied: KubeServer,
    kube: Kube,
    namespace: str,
    database_url: str,
    redis_url: str,
    tmp_path: Path,
) -> None:
    await kube.store_secrets(namespace, database_url=database_url, redis_url=redis_url)
    await kube.create("agentruns", namespace, agent_run("a"))

    async def made() -> list[Any]:
        """Another database is migrated before any pod is rolled out on it."""
        jobs = [one["metadata"]["name"] for one in await kube.list("jobs", namespace)]
        return [jobs, *(one["spec"]["template"] for one in await kube.list("deployments", namespace))]

    async with kube_front(crds_applied, tmp_path) as front:
        # The full list of every five minutes would find it as well.
        quiet = {"KUBECONFIG": str(front.kubeconfig), "AGENTRUN_OPERATOR_RESYNC_SECONDS": "3600"}
        process: ProductProcess = await operator_process(namespace, environment=quiet)
        await eventually(lambda: comes_up(kube, namespace, "a"), within=120, what="it is Ready")

        async def looks() -> float:
            return (await process.metrics()).total("agentrun_operator_reconcile_seconds_count")

        async def seconds() -> float:
            return time.monotonic()

        # Each look at an AgentRun reads its Secrets: none may be due, and nobody plays the kubelet, until the change is noticed.
        await rests(looks, turns=seconds, count=15, within=120, what="the looks at the AgentRun")
        before, opened, lists = await made(), len(front.requests), (await process.metrics())[FULL_LIST]

        front.freeze_watches(silent)
        if edited == "agentruns":
            await kube.patch("agentruns", namespace, "a", {"spec": {"workers": {"retries": 7}}})
        else:
            await kube.secret(
                namespace, "database", url=f"{database_url}{'&' if '?' in database_url else '?'}application_name=other"
            )

        async def is_noticed() -> bool:
            return await made() != before

        await eventually(is_noticed, within=180, what=f"the edit of {edited} is noticed")
        anew = [asked for asked in front.requests[opened:] if asked == f"WATCH {path(edited, namespace)}"]
        assert anew, "by a new watch"
        if silent:
            assert (await process.metrics())[FULL_LIST] == lists, "not by a full list, which follows where others were silent"
        await eventually(lambda: comes_up(kube, namespace, "a"), within=60, what="the edit is rolled out")
        assert (await process.get("/readyz")).status_code == (await process.get("/healthz")).status_code == 200
        assert process.returncode is None
