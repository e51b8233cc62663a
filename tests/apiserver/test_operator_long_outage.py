"""The API server away for minutes, with an operator as shipped, at its default times, that reconciles on real stores."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kube_client import Kube, agent_run, comes_up
from kube_servers import KubeServer
from processes import ProductProcess
from store_servers import Databases
from waiting import eventually

NAMESPACE = "default"


async def reconciles(kube: Kube, name: str, *, image: str) -> bool:
    """Whether it is Ready as it is now, with its pods on this image."""
    if not await comes_up(kube, NAMESPACE, name):
        return False
    found = [await kube.get("deployments", NAMESPACE, f"{name}-{part}") for part in ("gateway", "worker", "scheduler")]
    return {one["spec"]["template"]["spec"]["containers"][0]["image"] for one in found} == {image}


@pytest.mark.long
@pytest.mark.parametrize(("fault", "seconds"), [("hangs", 90), ("is killed", 300)])
async def test_after_a_long_outage_at_default_times_all_is_reconciled_within_a_minute(
    fault: str,
    seconds: int,
    private_api_server: KubeServer,
    operator_process: Callable[..., Any],
    databases: Databases,
    redis_url: str,
) -> None:
    await asyncio.to_thread(private_api_server.apply_crds)
    async with databases.migrated() as former, databases.migrated() as new, Kube(private_api_server) as kube:
        await kube.store_secrets(NAMESPACE, database_url=former, redis_url=redis_url)
        await kube.secret(NAMESPACE, "of-new", url=new)
        process: ProductProcess = await operator_process(NAMESPACE, server=private_api_server)
        await kube.create("agentruns", NAMESPACE, agent_run("old", image="agentrun:1"))
        await eventually(lambda: reconciles(kube, "old", image="agentrun:1"), within=120, what="it is Ready")

        await (private_api_server.pause() if fault == "hangs" else private_api_server.kill())
        await asyncio.sleep(seconds)
        assert (await process.get("/healthz")).status_code == 200
        assert process.returncode is None
        await (private_api_server.resume() if fault == "hangs" else private_api_server.start())

        async with asyncio.timeout(60):
            await kube.patch("agentruns", NAMESPACE, "old", {"spec": {"image": "agentrun:2"}})
            await kube.create(
                "agentruns", NAMESPACE, agent_run("new", image="agentrun:1", database={"secretRef": {"name": "of-new"}})
            )
            await eventually(lambda: reconciles(kube, "old", image="agentrun:2"), within=60, what="the edit is rolled out")
            await eventually(lambda: reconciles(kube, "new", image="agentrun:1"), within=60, what="the new one is Ready")
        assert process.returncode is None, "it is still the same process"
