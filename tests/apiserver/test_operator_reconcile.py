"""Observe, plan and apply against a real API server. What the stores say is the test's."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kube_client import Document, Refused, play_kubelet
from operator_cluster import PARTS, Cluster
from waiting import eventually

from agentrun import failpoints
from agentrun.domain.errors import AgentrunError
from agentrun.failpoints import FailpointError
from agentrun.telemetry import REGISTRY
from agentrun_operator.facts import QueueFact, ScalingFact, ScalingState, StoreProblem
from agentrun_operator.resources import AGENTRUNS, Key


def images_in(history: list[tuple[int, Document]], *, until: int) -> set[str]:
    return {
        container["image"]
        for revision, body in history
        if revision <= until
        for container in body["spec"]["template"]["spec"]["containers"]
    }


@pytest.fixture
def failing_at() -> Any:
    yield failpoints.configure
    failpoints.configure("")


# --- the whole life ------------------------------------------------------------------------------------------------------------------


async def test_mg_04_the_whole_life_from_creation_to_ready(cluster: Cluster, kubectl: Callable[..., str]) -> None:
    cluster.stores.has(0)
    since = await cluster.revision()
    await cluster.create()
    waiting = asyncio.create_task(
        asyncio.to_thread(kubectl, "wait", "-n", cluster.namespace, "agentrun/support", "--for=condition=Ready", "--timeout=50s")
    )
    await cluster.reconcile()
    assert await cluster.says("SchemaReady") == "Unknown Migrating"
    (job,) = await cluster.kube.list("jobs", cluster.namespace)
    assert job["metadata"]["name"] in await cluster.message("SchemaReady")
    await play_kubelet(cluster.kube, cluster.namespace)
    await cluster.reconcile()
    assert await cluster.kube.list("deployments", cluster.namespace) == []
    before = await cluster.revision()
    cluster.stores.has(2)
    await cluster.settle()
    assert images_in(await cluster.history(since), until=before) == set()
    assert "condition met" in await waiting
    found = await cluster.kube.get("agentruns", cluster.namespace, "support")
    status = found["status"]
    assert [condition["type"] for condition in status["conditions"]] == [
        "Ready",
        "Accepted",
        "SchemaReady",
        "QueueReady",
        "GatewayAvailable",
        "WorkersAvailable",
        "ScalingActive",
    ]
    assert status["observedGeneration"] == found["metadata"]["generation"]
    assert status["gateway"]["url"] == f"http://support-gateway.{cluster.namespace}.svc"
    assert await cluster.events() == ["Migrated", "MigrationStarted", "Ready"]
    columns = kubectl("get", "-n", cluster.namespace, "arun", "support").splitlines()[1].split()
    assert columns[:4] == ["support", "True", "Ready", "0/0"]


FULL: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "agent": {"model": "demo:chat", "secretRefs": [{"name": "api-keys"}]},
    "gateway": {
        "auth": {"keysSecretRef": {"name": "api-keys"}},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"cloud/x": "y"}},
        "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}, "limits": {"cpu": 1, "memory": "2Gi"}},
    },
    "networkPolicy": {
        "egress": [
            {
                "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}],
                "ports": [{"port": 80, "endPort": 90}],
            },
            {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
            {},
        ]
    },
    "podTemplate": {
        "labels": {"team": "x"},
        "annotations": {"empty": ""},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "env": [{"name": "EMPTY"}, {"name": "FULL", "value": "x"}],
        "volumes": [
            {"name": "code", "configMap": {"name": "tools"}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "0.5Gi"}},
            {"name": "plain", "emptyDir": {}},
            {"name": "more", "secret": {"secretName": "api-keys"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        ],
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/x", "readOnly": False},
            {"name": "code", "mountPath": "/y", "subPath": "z"},
        ],
    },
}


@pytest.mark.parametrize("spec", [{}, FULL], ids=["small", "full"])
async def test_a_second_look_writes_nothing_nor_does_a_restarted_operator(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.create(**spec)
    await cluster.settle()
    before = await cluster.versions()
    writes = _writes()
    await cluster.reconcile()
    assert _writes() == writes
    assert await cluster.versions() == before
    worker = (await cluster.deployment("worker"))["metadata"]["generation"]
    # The API server orders managers by the time of their last apply, so the first one after the scaler's is a change of that order,
    # but for one in the same second.
    applied = max(
        datetime.fromisoformat(entry["time"]) for entry in (await cluster.deployment("worker"))["metadata"]["managedFields"]
    )
    await eventually(lambda: datetime.now(UTC) > applied + timedelta(seconds=1), within=5, what="the next second has begun")
    cluster.restart()
    await cluster.reconcile()
    after = await cluster.versions()
    assert {name for name in after if after[name] != before[name]} <= {"deployments/support-worker"}
    assert (await cluster.deployment("worker"))["metadata"]["generation"] == worker
    await cluster.reconcile()
    cluster.restart()
    await cluster.reconcile()
    assert await cluster.versions() == after
    (job,) = await cluster.kube.list("jobs", cluster.namespace)
    assert set(before) == {
        "agentruns/support",
        f"jobs/{job['metadata']['name']}",
        f"configmaps/{await cluster.config('worker')}",
        "services/support-gateway",
        *(f"deployments/support-{part}" for part in PARTS),
        *(f"networkpolicies/support-{part}" for part in (*PARTS, "migrate")),
        *(f"poddisruptionbudgets/support-{part}" for part in ("gateway", "worker")),
    }


def _writes() -> float:
    return sum(
        REGISTRY.get_sample_value("agentrun_operator_api_requests_total", {"method": method, "status": "200"}) or 0.0
        for method in ("PATCH", "POST", "DELETE")
    )


async def test_ko_11_children_have_one_owner_of_their_namespace_and_go_with_it(cluster: Cluster) -> None:
    found = await cluster.create()
    cluster.stores.has(0)
    await cluster.reconcile()
    cluster.stores.has(2)
    await cluster.settle()
    children = {name: body for name, body in (await cluster.objects()).items() if not name.startswith("agentruns/")}
    for body in children.values():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["kind"], owner["controller"]) == (found["metadata"]["uid"], "AgentRun", True)
    assert any(name.startswith("jobs/") for name in children)
    assert "finalizers" not in (await cluster.kube.get("agentruns", cluster.namespace, "support"))["metadata"]
    await cluster.kube.delete("agentruns", cluster.namespace, "support")

    async def gone() -> bool:
        return not await cluster.objects()

    await eventually(gone, within=40, what="the children are collected")


# --- the schema gate -----------------------------------------------------------------------------------------------------------------


async def test_mg_04_no_pod_of_the_new_image_before_its_schema_and_old_ones_serve_while_the_migration_fails(
    cluster: Cluster,
) -> None:
    await cluster.create(image="agentrun:1")
    await cluster.settle()
    since = await cluster.revision()
    before = {part: await cluster.deployment(part) for part in PARTS}

    cluster.stores.has(2, required=3)
    await cluster.edit({"image": "agentrun:2"})
    await cluster.reconcile()
    (first,) = await cluster.kube.list("jobs", cluster.namespace)
    assert first["spec"]["template"]["spec"]["containers"][0]["image"] == "agentrun:2"
    await play_kubelet(cluster.kube, cluster.namespace, jobs="Failed")
    await cluster.reconcile()
    assert await cluster.says("SchemaReady") == "False MigrationFailed"
    assert f"kubectl logs -n {cluster.namespace} job/{first['metadata']['name']}" in await cluster.message("Ready")
    assert await cluster.says("Stalled") == "True MigrationFailed"
    assert await cluster.says("GatewayAvailable") == "True Available"
    assert await cluster.reconcile() is None
    for part in PARTS:
        assert (await cluster.deployment(part))["metadata"]["generation"] == before[part]["metadata"]["generation"]

    await cluster.kube.delete("jobs", cluster.namespace, first["metadata"]["name"])
    await cluster.reconcile()
    (again,) = await cluster.kube.list("jobs", cluster.namespace)
    assert again["metadata"]["name"] == first["metadata"]["name"]
    await play_kubelet(cluster.kube, cluster.namespace, jobs="Failed")
    await cluster.reconcile()

    await cluster.edit({"image": "agentrun:3"})
    await cluster.reconcile()
    (other,) = await cluster.kube.list("jobs", cluster.namespace)
    assert other["metadata"]["name"] != first["metadata"]["name"]
    await play_kubelet(cluster.kube, cluster.namespace)
    gate = await cluster.revision()
    cluster.stores.has(3, required=3)
    await cluster.settle()
    history = await cluster.history(since)
    assert images_in(history, until=gate) <= {"agentrun:1"}
    assert images_in(history, until=2**63) - {"agentrun:1"} == {"agentrun:3"}
    assert await cluster.says("Stalled") == ""


async def test_mg_05_ahead_within_the_range_serves_and_outside_nothing_rolls(cluster: Cluster) -> None:
    cluster.stores.has(3, oldest_accepted=2)
    await cluster.create(image="agentrun:1")
    await cluster.settle()
    cluster.stores.has(4, oldest_accepted=3)
    await cluster.edit({"image": "agentrun:2"})
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False SchemaTooNew"
    assert "accepts code for schema 3 or newer; this is for 2" in await cluster.message("SchemaReady")
    assert {await cluster.image(part) for part in PARTS} == {"agentrun:1"}


async def test_with_an_unknown_schema_nothing_is_made_and_nothing_is_changed(cluster: Cluster) -> None:
    cluster.stores.fact = None
    await cluster.create(image="agentrun:1")
    assert await cluster.reconcile() is not None
    assert list(await cluster.objects()) == ["agentruns/support"]
    cluster.stores.has(2)
    await cluster.settle()
    cluster.stores.fact = None
    await cluster.edit({"image": "agentrun:2"})
    await cluster.reconcile()
    assert {await cluster.image(part) for part in PARTS} == {"agentrun:1"}


# --- secrets -------------------------------------------------------------------------------------------------------------------------


async def test_a_secret_comes_later_changes_and_vanishes(cluster: Cluster) -> None:
    await cluster.kube.delete("secrets", cluster.namespace, "redis")
    await cluster.create()
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False SecretMissing"
    assert "the Secret redis (spec.redis.secretRef) is not there; create it with the key url" in await cluster.message("Ready")
    assert list(await cluster.objects()) == ["agentruns/support"]

    await cluster.kube.secret(cluster.namespace, "redis", uri="redis://redis:6379/0")
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False SecretKeyMissing"

    await cluster.kube.secret(cluster.namespace, "redis", url="redis://redis:6379/0")
    await cluster.settle()
    before = {part: (await cluster.deployment(part))["spec"]["template"] for part in PARTS}

    await cluster.kube.secret(cluster.namespace, "redis", url="redis://other:6380/0")
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False RollingOut"
    for part in PARTS:
        assert (await cluster.deployment(part))["spec"]["template"] != before[part]
    await cluster.settle()
    assert "redis://other:6380/0" in cluster.stores.urls

    versions = await cluster.versions()
    await cluster.kube.delete("secrets", cluster.namespace, "database")
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False SecretMissing"
    assert await cluster.says("GatewayAvailable") == "True Available"
    after = await cluster.versions()
    assert {name for name in after if after[name] != versions.get(name)} == {"agentruns/support"}


async def test_a_mounted_secret_that_changes_rolls_all_pods_once(cluster: Cluster) -> None:
    await cluster.kube.secret(cluster.namespace, "certs", ca="a")
    mounted = {
        "volumes": [{"name": "certs", "secret": {"secretName": "certs"}}],
        "volumeMounts": [{"name": "certs", "mountPath": "/c"}],
    }
    await cluster.create(podTemplate=mounted)
    await cluster.settle()
    before = {part: (await cluster.deployment(part))["spec"]["template"] for part in PARTS}

    await cluster.kube.secret(cluster.namespace, "certs", ca="b")
    await cluster.reconcile()
    for part in PARTS:
        assert (await cluster.deployment(part))["spec"]["template"] != before[part]
    await cluster.settle()
    versions = await cluster.versions()
    await cluster.reconcile()
    assert await cluster.versions() == versions


async def test_no_secret_is_in_what_the_operator_writes(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    text = json.dumps(await cluster.objects())
    for value in ("u:p@db", base64.b64encode(b"postgresql://u:p@db").decode()[:20]):
        assert value not in text


# --- other people's hands ------------------------------------------------------------------------------------------------------------


async def test_a_foreign_deployment_of_our_name_is_left_alone_and_nothing_is_made(cluster: Cluster) -> None:
    labels = {"app": "x"}
    foreign = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "support-worker"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x"}]}},
        },
    }
    made = await cluster.kube.create("deployments", cluster.namespace, foreign)
    await cluster.create()
    await cluster.reconcile()
    assert await cluster.says("Accepted") == "False NameTaken"
    assert f"Deployment {cluster.namespace}/support-worker belongs to somebody else" in await cluster.message("Ready")
    assert list(await cluster.objects()) == ["agentruns/support"]
    left = await cluster.kube.get("deployments", cluster.namespace, "support-worker")
    assert left["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    await cluster.kube.delete("deployments", cluster.namespace, "support-worker")
    await cluster.settle()


async def test_ko_08_drift_is_set_right_and_additions_stay(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    sidecar = {"name": "sidecar", "image": "proxy:1"}
    template = {"spec": {"containers": [{"name": "gateway", "image": "foreign:9"}, sidecar]}}
    await cluster.kube.apply(
        "deployments",
        cluster.namespace,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "support-gateway", "labels": {"theirs": "x", "agentrun.dev/agentrun": "support"}},
            "spec": {"template": template},
        },
        manager="somebody",
    )
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False RollingOut"
    found = await cluster.deployment("gateway")
    images = {one["name"]: one["image"] for one in found["spec"]["template"]["spec"]["containers"]}
    assert images == {"gateway": "agentrun:test", "sidecar": "proxy:1"}
    assert found["metadata"]["labels"]["theirs"] == "x"
    assert "DriftCorrected" in await cluster.events()
    await cluster.settle()
    before = await cluster.versions()
    await cluster.reconcile()
    assert await cluster.versions() == before


async def test_ko_08_deleted_children_are_made_again(cluster: Cluster) -> None:
    await cluster.create(workers={"minReplicas": 2})
    await cluster.settle()
    before = set(await cluster.objects())
    config = await cluster.config("worker")
    for plural, name in (("deployments", "support-worker"), ("services", "support-gateway"), ("configmaps", config)):
        await cluster.kube.delete(plural, cluster.namespace, name)
    await cluster.reconcile()
    assert (await cluster.events()).count("DriftCorrected") == 3
    assert await cluster.says("WorkersAvailable") == "Unknown Starting"
    assert (await cluster.deployment("worker"))["spec"]["replicas"] == 2
    await cluster.settle()
    assert set(await cluster.objects()) == before


async def test_parts_that_are_not_wanted_any_more_go(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    await cluster.edit({"gateway": {"replicas": 1}, "workers": {"maxReplicas": 1}, "networkPolicy": {"enabled": False}})
    await cluster.reconcile()
    kinds = {name.partition("/")[0] for name in await cluster.objects()}
    assert kinds == {"agentruns", "configmaps", "services", "deployments", "jobs"}
    assert (await cluster.deployment("gateway"))["spec"]["replicas"] == 1


async def test_a_status_edited_by_hand_is_written_again(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    found = await cluster.kube.get("agentruns", cluster.namespace, "support")
    conditions = [{**one, "status": "False", "reason": "Lie"} for one in found["status"]["conditions"]]
    status = {"status": {"conditions": conditions, "gateway": {"replicas": 99}}}
    await cluster.kube.patch("agentruns", cluster.namespace, "support", status, subresource="status")
    await cluster.reconcile()
    assert await cluster.says("Ready") == "True Ready"
    assert (await cluster.kube.get("agentruns", cluster.namespace, "support"))["status"]["gateway"]["replicas"] == 2


async def test_what_the_api_server_refuses_is_in_the_condition_and_heals(cluster: Cluster) -> None:
    bad = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"nope": 1}]}}}
    await cluster.create(podTemplate={"affinity": bad})
    assert await cluster.reconcile() == 60.0
    assert await cluster.says("Accepted") == "False ObjectRefused"
    assert "nope" in await cluster.message("Ready")
    before = await cluster.versions()
    await cluster.reconcile()
    assert await cluster.versions() == before
    await cluster.edit({"podTemplate": {"affinity": None}})
    await cluster.settle()


# --- workers -------------------------------------------------------------------------------------------------------------------------


def owned_by(deployment: Document, manager: str) -> Any:
    (entry,) = [one for one in deployment["metadata"]["managedFields"] if one["manager"] == manager]
    return entry["fieldsV1"]


async def test_suspend_leaves_the_gateway_and_says_so(cluster: Cluster) -> None:
    await cluster.create(suspend=True, workers={"minReplicas": 3})
    for _ in range(3):
        await cluster.reconcile()
        await play_kubelet(cluster.kube, cluster.namespace)
    await cluster.reconcile()
    assert await cluster.says("Suspended") == "True Suspended"
    assert await cluster.says("Ready") == "False Suspended"
    assert await cluster.says("GatewayAvailable") == "True Available"
    assert (await cluster.deployment("worker"))["spec"]["replicas"] == 0
    config = await cluster.kube.get("configmaps", cluster.namespace, await cluster.config("gateway"))
    assert "suspend: true" in config["data"]["agentrun.yaml"]
    await cluster.edit({"suspend": False})
    await cluster.settle()
    assert await cluster.says("Suspended") == ""


async def test_workers_never_stand_at_the_default_of_one_replica(cluster: Cluster) -> None:
    since = await cluster.revision()
    cluster.scaling = ScalingFact(ScalingState.ACTIVE, 4)
    await cluster.create()
    await cluster.settle()
    replicas = [
        body["spec"]["replicas"] for _, body in await cluster.history(since) if body["metadata"]["name"] == "support-worker"
    ]
    assert set(replicas) == {4}


@pytest.mark.parametrize(("migrated", "step"), [(False, 1), (False, 2), *((True, step) for step in (1, 6, 7, 8, 9, 10, 13))])
async def test_a_crash_between_any_two_writes_is_mended(
    cluster: Cluster, failing_at: Callable[[str], None], migrated: bool, step: int
) -> None:
    cluster.scaling = ScalingFact(ScalingState.ACTIVE, 3)
    await cluster.create()
    if migrated:
        await cluster.migrate()
        cluster.restart()
    failing_at(f"operator.apply.between=raise@{step}")
    with pytest.raises(FailpointError):
        await cluster.reconcile()
    failing_at("")
    cluster.restart()
    await cluster.settle()
    worker = await cluster.deployment("worker")
    assert worker["spec"]["replicas"] == 3
    assert owned_by(worker, "agentrun-scaler") == {"f:spec": {"f:replicas": {}}}
    assert "f:replicas" not in owned_by(worker, "agentrun-operator")["f:spec"]
    assert "agentrun.dev/creating" not in worker["metadata"]["annotations"]
    before = await cluster.versions()
    await cluster.reconcile()
    assert await cluster.versions() == before


@pytest.mark.parametrize("point", ["operator.apply.before", "operator.status.before"])
async def test_a_crash_before_the_writes_or_before_the_status_is_mended(
    cluster: Cluster, failing_at: Callable[[str], None], point: str
) -> None:
    await cluster.create()
    failing_at(f"{point}=raise")
    with pytest.raises(FailpointError):
        await cluster.reconcile()
    failing_at("")
    await cluster.settle()


async def test_the_number_of_workers_that_somebody_else_sets_is_left_alone(cluster: Cluster) -> None:
    await cluster.create(scaling={"mode": "External"})
    await cluster.settle()
    assert await cluster.says("ScalingActive") == "False External"
    await cluster.kube.patch("deployments", cluster.namespace, "support-worker", {"spec": {"replicas": 6}})
    await cluster.edit({"image": "agentrun:2"})
    await cluster.settle()
    worker = await cluster.deployment("worker")
    assert (worker["spec"]["replicas"], await cluster.image("worker")) == (6, "agentrun:2")


# --- names and successors ------------------------------------------------------------------------------------------------------------


async def test_ko_12_long_names_give_distinct_children_and_impossible_ones_are_refused(cluster: Cluster) -> None:
    long = "a" * 60
    for name in (f"{long}bcd", f"{long}bce", "b" * 52, "c" * 53):
        await cluster.create(name)
    for name in ("d" * 64, "e" * 253, "with.dots"):
        with pytest.raises(Refused):
            await cluster.create(name)
    names = set()
    for name in (f"{long}bcd", f"{long}bce", "b" * 52, "c" * 53):
        await cluster.settle(name)
        names |= {found for found in await cluster.objects() if found.startswith("deployments/")}
    assert len(names) == 12


async def test_ko_13_a_successor_of_the_same_name_gets_children_of_its_own(cluster: Cluster) -> None:
    await cluster.create(image="agentrun:1")
    await cluster.settle()
    old = {name: body["metadata"]["uid"] for name, body in (await cluster.objects()).items()}
    await cluster.kube.delete("agentruns", cluster.namespace, "support")
    found = await cluster.create(image="agentrun:2")

    async def ready() -> bool:
        await cluster.reconcile()
        await play_kubelet(cluster.kube, cluster.namespace)
        return await cluster.says("Ready") == "True Ready"

    await eventually(ready, within=40, what="the successor is Ready")
    objects = await cluster.objects()
    assert {_without_digest(name) for name in objects} == {_without_digest(name) for name in old}
    assert not {body["metadata"]["uid"] for body in objects.values()} & set(old.values())
    assert {
        body["metadata"]["ownerReferences"][0]["uid"] for name, body in objects.items() if not name.startswith("agentruns/")
    } == {found["metadata"]["uid"]}
    assert await cluster.image("worker") == "agentrun:2"


def _without_digest(name: str) -> str:
    """Jobs and ConfigMaps have the digest of what they were made from in their names."""
    return name.rpartition("-")[0] if name.startswith(("jobs/", "configmaps/")) else name


async def test_ko_13_created_changed_twice_and_deleted_leaves_nothing(cluster: Cluster) -> None:
    await cluster.create(image="agentrun:1")
    await cluster.look()
    for image in ("agentrun:2", "agentrun:3"):
        await cluster.edit({"image": image})
    await cluster.kube.delete("agentruns", cluster.namespace, "support")
    # From what it saw before. What it makes is collected at once, perhaps between two writes of one object: it is tried again then.
    with contextlib.suppress(AgentrunError):
        await cluster.run(Key(cluster.namespace, "support"))
    await cluster.reconcile()

    async def gone() -> bool:
        return not await cluster.objects()

    await eventually(gone, within=40, what="nothing is left")


async def test_ko_13_an_operator_with_old_news_removes_nothing_of_the_successor(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.look()
    stale = cluster.cache.get(next(iter(cluster.cache.of(AGENTRUNS))))
    await cluster.kube.delete("agentruns", cluster.namespace, "support")
    await cluster.create()
    await cluster.settle()
    before = await cluster.versions()
    cluster.restart()
    await cluster.look()
    assert stale is not None
    ref = next(iter(cluster.cache.of(AGENTRUNS)))
    cluster.cache.remove(ref)
    cluster.cache.put(AGENTRUNS, stale)
    await cluster.run(Key(cluster.namespace, "support"))
    assert await cluster.versions() == before


async def test_sc_08_a_restarted_operator_changes_no_deployment(cluster: Cluster) -> None:
    cluster.scaling = ScalingFact(ScalingState.ACTIVE, 3)
    await cluster.create()
    await cluster.settle()
    before = {part: await cluster.deployment(part) for part in PARTS}
    cluster.scaling = None
    cluster.restart()
    await cluster.reconcile()
    for part in PARTS:
        after = await cluster.deployment(part)
        assert after["metadata"]["generation"] == before[part]["metadata"]["generation"]
        assert after["spec"] == before[part]["spec"]


async def test_a_database_of_another_agent_run_is_refused_with_its_name(cluster: Cluster) -> None:
    assert cluster.stores.fact is not None
    cluster.stores.fact = replace(cluster.stores.fact, owner="team/sales")
    await cluster.create()
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False DatabaseNotOurs"
    assert "belongs to the AgentRun team/sales" in await cluster.message("Ready")
    assert list(await cluster.objects()) == ["agentruns/support"]


async def test_two_agent_runs_on_one_database_that_nobody_has_reserved(cluster: Cluster) -> None:
    cluster.stores.reserved = False
    for name in ("one", "two"):
        await cluster.create(name)
        await cluster.reconcile(name)
        assert await cluster.says("Ready", name) == "Unknown Migrating"
    await play_kubelet(cluster.kube, cluster.namespace)
    assert cluster.stores.fact is not None
    cluster.stores.fact = replace(cluster.stores.fact, owner=f"{cluster.namespace}/two")
    cluster.stores.reserved = True
    await cluster.settle("two")
    await cluster.reconcile("one")
    assert await cluster.says("Ready", "one") == "False DatabaseNotOurs"
    assert {name for name in await cluster.objects() if name.startswith("deployments/one")} == set()


async def test_a_migration_at_work_is_not_cut_off_by_edits(cluster: Cluster) -> None:
    cluster.stores.has(0)
    await cluster.create()
    await cluster.reconcile()
    (job,) = await cluster.kube.list("jobs", cluster.namespace)
    at_work = {"status": {"active": 1, "ready": 1, "startTime": job["metadata"]["creationTimestamp"]}}
    await cluster.kube.patch("jobs", cluster.namespace, job["metadata"]["name"], at_work, subresource="status")
    for number in range(3):
        await cluster.edit({"podTemplate": {"labels": {"number": str(number)}}})
        await cluster.reconcile()
        (left,) = await cluster.kube.list("jobs", cluster.namespace)
        assert (left["metadata"]["uid"], left["metadata"].get("deletionTimestamp")) == (job["metadata"]["uid"], None)
    await play_kubelet(cluster.kube, cluster.namespace)
    cluster.stores.has(2)
    await cluster.settle()
    jobs = {found["metadata"]["uid"] for found in await cluster.kube.list("jobs", cluster.namespace)}
    assert job["metadata"]["uid"] not in jobs


async def test_pods_that_run_keep_their_configuration_until_they_are_replaced(cluster: Cluster) -> None:
    await cluster.create()
    await cluster.settle()
    first = await cluster.config("worker")
    await cluster.edit({"workers": {"retries": 7}})
    await cluster.reconcile()
    await cluster.reconcile()
    second = await cluster.config("worker")
    assert first != second
    assert await cluster.config("gateway") == first
    kept = await cluster.kube.get("configmaps", cluster.namespace, first)
    assert "retries" not in kept["data"]["agentrun.yaml"]
    with pytest.raises(Refused):
        await cluster.kube.patch("configmaps", cluster.namespace, first, {"data": {"agentrun.yaml": "x"}})
    await cluster.edit({"streaming": {"flushEvents": 10}})
    await cluster.settle()
    found = await cluster.kube.list("configmaps", cluster.namespace, labels="agentrun.dev/agentrun=support")
    assert [one["metadata"]["name"] for one in found] == [await cluster.config("gateway")]


async def test_a_bug_in_the_operators_decisions_is_in_a_condition(cluster: Cluster, failing_at: Callable[[str], None]) -> None:
    await cluster.create()
    await cluster.settle()
    before = await cluster.versions()
    failing_at("operator.plan=raise@*")
    for _ in range(2):
        with pytest.raises(FailpointError):
            await cluster.reconcile()
    assert await cluster.says("Ready") == await cluster.says("Accepted") == "Unknown OperatorError"
    assert "cannot work out what is to be done (FailpointError)" in await cluster.message("Ready")
    assert await cluster.says("GatewayAvailable") == "True Available"
    after = await cluster.versions()
    assert {name for name in after if after[name] != before[name]} == {"agentruns/support"}
    assert (await cluster.events()).count("NotReady") == 1
    failing_at("")
    await cluster.settle()


@pytest.mark.parametrize("url", ["redis://:p[w@redis:6379/0", "redis://[::1:6379"])
async def test_a_url_that_cannot_be_read_is_no_reason_to_fail(cluster: Cluster, url: str) -> None:
    await cluster.kube.secret(cluster.namespace, "redis", url=url)
    cluster.stores.queue_fact = QueueFact(StoreProblem.BAD_URL)
    await cluster.create()
    await cluster.reconcile()
    assert await cluster.says("Ready") == "False RedisUrlInvalid"
    assert list(await cluster.objects()) == ["agentruns/support"]
