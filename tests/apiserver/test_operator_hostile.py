"""Other people's hands and bad input: labels that lie, races with deletions, floods of edits and of objects that cannot work."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kube_client import Kube, agent_run, comes_up, play_kubelet
from operator_cluster import Cluster
from processes import ProductProcess
from waiting import eventually, rests

from agentrun_operator.metrics import API_REQUESTS
from agentrun_operator.resources import AGENTRUNS, Key, Ref

BAD = 1000
"""How many objects that cannot work are made at once."""
OURS = {"app.kubernetes.io/managed-by": "agentrun-operator"}
KINDS = ("agentruns", "deployments", "services", "configmaps", "jobs", "poddisruptionbudgets", "networkpolicies")


# --- labels that lie -----------------------------------------------------------------------------------------------------------------


async def test_a_child_of_another_agent_run_that_is_given_our_label_is_left_alone(cluster: Cluster) -> None:
    await cluster.create("one")
    await cluster.settle("one")
    await cluster.create("two")
    await cluster.settle("two")
    uid = (await cluster.deployment("worker", "two"))["metadata"]["uid"]
    labels = {"metadata": {"labels": {"agentrun.dev/agentrun": "one"}}}
    await cluster.kube.patch("deployments", cluster.namespace, "two-worker", labels)

    await cluster.reconcile("one")
    found = await cluster.deployment("worker", "two")
    assert (found["metadata"]["uid"], found["metadata"].get("deletionTimestamp")) == (uid, None)
    assert await cluster.says("Ready", "one") == "True Ready"

    await cluster.reconcile("two")
    found = await cluster.deployment("worker", "two")
    assert found["metadata"]["labels"]["agentrun.dev/agentrun"] == "two", "drift, as any other"


async def test_a_copy_with_our_labels_is_nobodys_business(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    config = await cluster.kube.get("configmaps", cluster.namespace, await cluster.config("worker"))
    copy = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "my-copy", "labels": config["metadata"]["labels"]},
        "data": config["data"],
    }
    made = await cluster.kube.create("configmaps", cluster.namespace, copy)
    await cluster.edit({"workers": {"retries": 7}})
    await cluster.settle()
    left = await cluster.kube.get("configmaps", cluster.namespace, "my-copy")
    assert left["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_a_migration_job_of_our_name_that_somebody_else_made(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.reconcile()
    (job,) = await cluster.kube.list("jobs", cluster.namespace)
    name = job["metadata"]["name"]
    await cluster.kube.delete("jobs", cluster.namespace, name)
    await eventually(lambda: _is_gone(cluster.kube, "jobs", cluster.namespace, name), within=20, what="the Job is gone")
    template = {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x"}]}
    labels = {**OURS, "agentrun.dev/agentrun": "support"}
    foreign = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"template": {"spec": template}},
    }
    await cluster.kube.create("jobs", cluster.namespace, foreign)
    await cluster.reconcile()
    assert await cluster.says("Accepted") == "False NameTaken"
    assert name in await cluster.message("Ready")


async def _is_gone(kube: Kube, plural: str, namespace: str, name: str) -> bool:
    return await kube.find(plural, namespace, name) is None


# --- races with deletions ------------------------------------------------------------------------------------------------------------


async def test_a_worker_deployment_that_is_deleted_unseen_never_comes_back_with_one_replica(cluster: Cluster) -> None:
    await cluster.create(workers={"minReplicas": 3})
    await cluster.settle()
    await cluster.edit({"workers": {"retries": 7}})
    await cluster.look()
    since = await cluster.revision()
    await cluster.kube.delete("deployments", cluster.namespace, "support-worker")
    await eventually(
        lambda: _is_gone(cluster.kube, "deployments", cluster.namespace, "support-worker"), within=20, what="it is gone"
    )
    await cluster.run(Key(cluster.namespace, "support"))  # from what it saw before
    await cluster.settle()
    told = [body for _, body in await cluster.history(since) if body["metadata"]["name"] == "support-worker"]
    assert {body["spec"]["replicas"] for body in told} == {3}


async def test_ko_13_a_deleted_agent_run_is_not_made_up_for_when_its_children_are_collected(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    ref = Ref(AGENTRUNS, cluster.namespace, "support")
    stale = cluster.cache.get(ref)
    assert stale is not None
    await cluster.kube.delete("agentruns", cluster.namespace, "support")

    async def collected() -> bool:
        return not await cluster.objects()

    await eventually(collected, within=40, what="the children are collected")
    await cluster.look()
    cluster.cache.put(AGENTRUNS, stale)  # as a write's answer that comes after the news of the end
    before = _writes()
    await cluster.run(Key(cluster.namespace, "support"))
    assert _writes() == before
    assert await cluster.objects() == {}


def _writes() -> float:
    (family,) = API_REQUESTS.collect()
    return sum(one.value for one in family.samples if one.name.endswith("_total") and one.labels["method"] != "GET")


# --- bad input -----------------------------------------------------------------------------------------------------------------------


async def test_a_refused_worker_leaves_no_gateway_that_takes_messages(cluster: Cluster) -> None:
    bad = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"nope": 1}]}}}
    await cluster.create()
    await cluster.migrate()
    await cluster.edit({"podTemplate": {"affinity": bad}})
    for _ in range(3):
        await cluster.reconcile()
        await play_kubelet(cluster.kube, cluster.namespace)
    assert await cluster.says("Accepted") == "False ObjectRefused"
    assert {name.partition("/")[0] for name in await cluster.objects()} <= {"agentruns", "jobs", "configmaps", "networkpolicies"}


@pytest.mark.parametrize(("migrations", "refused"), [("Apply", "Job"), ("Verify", "Deployment")])
async def test_a_spec_that_the_api_server_refuses_leaves_nothing_half_made_and_heals(
    cluster: Cluster, migrations: str, refused: str
) -> None:
    bad = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"nope": 1}]}}}
    database = {"secretRef": {"name": "database"}, "migrations": migrations}
    await cluster.create(podTemplate={"affinity": bad}, database=database)
    for _ in range(2):
        await cluster.reconcile()
    assert await cluster.says("Accepted") == "False ObjectRefused"
    assert f"refused {refused} " in await cluster.message("Accepted")
    assert list(await cluster.objects()) == ["agentruns/support"]

    await cluster.edit({"podTemplate": {"affinity": None}})
    await cluster.settle()


async def shipped(operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str) -> ProductProcess:
    """The operator's process, with the AgentRun `a` Ready."""
    environment = {"AGENTRUN_OPERATOR_RESYNC_SECONDS": "1", "AGENTRUN_OPERATOR_LEASE": f"lease-{namespace}"}
    process: ProductProcess = await operator_process(namespace, environment=environment, pod_namespace="default")
    await kube.store_secrets(namespace, database_url=database_url, redis_url=redis_url)
    await kube.create("agentruns", namespace, agent_run("a"))
    await eventually(lambda: comes_up(kube, namespace, "a"), within=60, what="it is Ready")
    return process


async def versions(kube: Kube, namespace: str) -> dict[str, str]:
    """The resourceVersions of everything that the operator writes but its Lease."""
    return {
        f"{kind}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
        for kind in (*KINDS, "events")
        for one in await kube.list(kind, namespace)
    }


@pytest.mark.slow
async def test_ko_06_edits_each_moment_then_silence_over_full_lists_then_ko_01_the_namespace_goes(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    process = await shipped(operator_process, kube, namespace, database_url, redis_url)

    async def writes() -> float:
        found = await process.metrics()
        return sum(
            value
            for name, value in found.items()
            if name.startswith("agentrun_operator_api_requests_total")
            and 'method="GET"' not in name
            and 'method="PUT"' not in name
        )

    before, edits = await writes(), 10
    for number in range(edits):
        await kube.patch("agentruns", namespace, "a", {"spec": {"workers": {"retries": number}}})
        # All edits are while it is at work on one before, none waits for it.
        await asyncio.sleep(0.2)
    await eventually(lambda: comes_up(kube, namespace, "a"), within=60, what="the last edit is Ready")
    assert "retries: 9" in json.dumps(await kube.list("configmaps", namespace))
    # Of an edit: a ConfigMap, two Deployments, the older ConfigMap, Events, and some states of the status.
    assert await writes() - before <= edits * 16

    async def counted() -> bool:
        status = (await kube.get("agentruns", namespace, "a"))["status"]
        return "undelivered" in status["queue"] and "busy" in status["workers"]

    async def full_lists() -> float:
        return (await process.metrics())["agentrun_operator_resync_seconds_count"]

    await eventually(counted, within=60, what="the counters of the scaler are in the status")
    await rests(
        lambda: versions(kube, namespace), turns=full_lists, count=4, within=60, what="everything that the operator writes"
    )

    await kube.delete("namespaces", "", namespace)
    await eventually(lambda: _is_gone(kube, "namespaces", "", namespace), within=60, what="the namespace is gone")
    assert process.returncode is None
    assert await process.terminate() == 0


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[int, set[asyncio.StreamWriter]]]:
    """Takes connections, reads, and never says a word. Its port, and the connections that are open."""
    is_open: set[asyncio.StreamWriter] = set()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_open.add(writer)
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        is_open.discard(writer)
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], is_open
    finally:
        server.close()
        for writer in [*is_open]:
            writer.close()


async def test_ko_10_stores_that_hang_hold_up_neither_another_agentrun_nor_the_probe(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    process = await shipped(operator_process, kube, namespace, database_url, redis_url)
    async with silent_server() as (postgres_port, postgres_open), silent_server() as (redis_port, redis_open):
        await kube.secret(namespace, "silent-database", url=f"postgresql://u:p@127.0.0.1:{postgres_port}/d")
        await kube.secret(namespace, "silent-redis", url=f"redis://127.0.0.1:{redis_port}")
        stores = {"database": {"secretRef": {"name": "silent-database"}}, "redis": {"secretRef": {"name": "silent-redis"}}}
        await kube.create("agentruns", namespace, agent_run("bad", **stores))

        for number in range(5, 9):
            # The hang has begun and is not over.
            await eventually(lambda: postgres_open and redis_open, within=60, what="both stores keep the operator waiting")
            await kube.patch("agentruns", namespace, "a", {"spec": {"workers": {"retries": number}}})
            health: list[int] = []

            async def is_carried_out(number: int = number, health: list[int] = health) -> bool:
                health.append((await process.get("/healthz")).status_code)
                worker = await kube.get("deployments", namespace, "a-worker")
                volumes = worker["spec"]["template"]["spec"]["volumes"]
                (config,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
                return f"retries: {number}" in json.dumps((await kube.get("configmaps", namespace, config))["data"])

            await eventually(is_carried_out, within=15, what="the edit of the good one is carried out")
            assert {*health} == {200}

        async def is_said() -> bool:
            queue, ready = [await kube.condition(namespace, "bad", kind) for kind in ("QueueReady", "Ready")]
            return bool(queue and ready) and (queue["reason"], ready["status"] == "True") == ("RedisUnreachable", False)

        await eventually(is_said, within=60, what="the bad one says what it waits for")
        assert await process.terminate() == 0


async def test_ko_12_a_crowd_of_bad_objects_does_not_hold_up_a_good_one(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    """A half lacks its Secret, the other half has databases that never answer, each its own. The good one comes last in every list."""
    other = f"z-{namespace}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(4096)
        port = silent.getsockname()[1]
        urls = {f"u{number}": f"postgresql://u:p@127.0.0.1:{port}/d{number}" for number in range(BAD)}
        for place, databases in ((namespace, urls), (other, {"url": database_url})):
            await kube.secret(place, "database", **databases)
            await kube.secret(place, "redis", url=redis_url)
            await kube.secret(place, "api-keys", **{"api-keys": "{}"})
        turns = asyncio.Semaphore(20)

        async def bad(number: int) -> None:
            ref = {"name": "database", "key": f"u{number}"} if number % 2 else {"name": "absent"}
            async with turns:
                await kube.create("agentruns", namespace, agent_run(f"bad{number}", database={"secretRef": ref}))

        await asyncio.gather(*(bad(number) for number in range(BAD)))
        await kube.create("agentruns", other, agent_run("a"))
        process = await operator_process(f"{namespace},{other}", ready=False)
        await eventually(lambda: comes_up(kube, other, "a"), within=120, what="the good one is Ready")
        waiting = [one for one in await kube.list("agentruns", namespace) if "observedGeneration" not in one.get("status", {})]
        assert waiting, "it came up behind all of the bad ones"
        assert process.returncode is None
    await kube.delete("namespaces", "", other)
