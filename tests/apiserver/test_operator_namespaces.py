"""The operator in one namespace, its AgentRuns in another: nothing of an AgentRun lies, or points, outside its own namespace."""

import uuid
from typing import Any

from kube_client import Document, Kube, agent_run, comes_up
from waiting import eventually

KINDS = ("deployments", "services", "configmaps", "jobs", "poddisruptionbudgets", "networkpolicies")


async def children(kube: Kube, namespace: str) -> dict[str, Document]:
    """Everything that the operator makes for AgentRuns."""
    return {
        f"{kind}/{one['metadata']['name']}": one
        for kind in KINDS
        for one in await kube.list(kind, namespace)
        if (one["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == "agentrun-operator"
    }


async def test_ko_11_with_the_operator_in_another_namespace_children_stay_in_that_of_their_agentrun_and_are_kept(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    home = f"t-{uuid.uuid4().hex[:10]}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}})
    process = await operator_process(f"{home},{namespace}", pod_namespace=home)
    await kube.store_secrets(namespace, database_url=database_url, redis_url=redis_url)
    owner = (await kube.create("agentruns", namespace, agent_run("a")))["metadata"]["uid"]
    await eventually(lambda: comes_up(kube, namespace, "a"), within=60, what="it is Ready")

    made = await children(kube, namespace)
    assert {name.partition("/")[0] for name in made} == set(KINDS)
    for body in made.values():
        (reference,) = body["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["name"], reference["uid"]) == ("AgentRun", "a", owner)
    assert await children(kube, home) == {}
    assert await kube.list("leases", home) != [], "it elects in its own namespace"

    # What an owner of another namespace would do: the collector finds no such object here. It has looked once this one is gone.
    stray = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "stray",
            "ownerReferences": [
                {"apiVersion": "agentrun.dev/v1alpha1", "kind": "AgentRun", "name": "a", "uid": str(uuid.uuid4())}
            ],
        },
    }
    await kube.create("configmaps", namespace, stray)

    async def collected() -> bool:
        return all(one["metadata"]["name"] != "stray" for one in await kube.list("configmaps", namespace))

    await eventually(collected, within=90, what="the collector takes what has no owner here")
    uids = {name: body["metadata"]["uid"] for name, body in made.items()}
    now = await children(kube, namespace)
    assert {name: body["metadata"]["uid"] for name, body in now.items()} == uids
    assert not any("deletionTimestamp" in body["metadata"] for body in now.values())
    assert await process.terminate() == 0
    await kube.delete("namespaces", "", home)
