"""The CRDs on a real API server: they are in its own form, refuse what they should, and stay out of the way."""

import copy
import re
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from crd_schema import without_empty
from kube_client import PLURALS, Kube, Refused, agent_run, path
from kube_servers import CRDS, KubeError, KubeServer
from waiting import eventually

from agentrun.manifests import agent_run_of, cron_task_of

VALID = sorted((CRDS / "examples" / "valid").glob("*.yaml"))
INVALID = sorted((CRDS / "examples" / "invalid").glob("*.yaml"))
NAMES = ("agentruns", "crontasks")
NOW = "2026-01-01T00:00:00Z"

Kubectl = Callable[..., str]


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def plural(document: dict[str, Any]) -> str:
    return f"{document['kind'].lower()}s"


def spec_of(crd: dict[str, Any]) -> dict[str, Any]:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}


async def _established(kube: Kube, name: str) -> None:

    async def said() -> bool:
        found = await kube.get("customresourcedefinitions", "", name)
        return any(one["type"] == "Established" and one["status"] == "True" for one in found["status"]["conditions"])

    await eventually(said, within=30, what=f"{name} is established")


@pytest.fixture
async def copied(kube: Kube, crds_applied: KubeServer) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The AgentRun's CRD under a plural of this test alone, to be changed: (plural, CRD)."""
    kind = f"Copy{uuid.uuid4().hex[:8]}"
    name = f"{kind.lower()}s"
    crd = read(CRDS / "agentruns.yaml")
    crd["metadata"]["name"] = f"{name}.agentrun.dev"
    crd["spec"]["names"] = {"kind": kind, "listKind": f"{kind}List", "plural": name, "singular": kind.lower()}
    PLURALS[name] = PLURALS["agentruns"]
    await kube.apply("customresourcedefinitions", "", crd)
    await _established(kube, crd["metadata"]["name"])
    await eventually(lambda: kube.request("GET", path(name, "default")), within=30, what=f"{name} is served")
    yield name, crd
    await kube.delete("customresourcedefinitions", "", crd["metadata"]["name"])
    del PLURALS[name]


@pytest.mark.parametrize("name", NAMES)
async def test_a_crd_is_in_the_form_that_the_server_stores(name: str, crds_applied: KubeServer, kube: Kube) -> None:
    file = read(CRDS / f"{name}.yaml")
    stored = await kube.get("customresourcedefinitions", "", file["metadata"]["name"])

    assert stored["spec"]["versions"] == file["spec"]["versions"]
    assert not [one for one in stored["status"]["conditions"] if one["type"] == "NonStructuralSchema"]


@pytest.mark.parametrize("name", NAMES)
async def test_applying_again_changes_nothing_whoever_does_it(name: str, crds_applied: KubeServer, kube: Kube) -> None:
    file = read(CRDS / f"{name}.yaml")
    before = await kube.get("customresourcedefinitions", "", file["metadata"]["name"])

    other = await kube.apply("customresourcedefinitions", "", file, manager="other", force=False)
    forced = await kube.apply("customresourcedefinitions", "", file, manager="agentrun-crds", force=True)
    again = await kube.apply("customresourcedefinitions", "", file, manager="agentrun-crds", force=True)

    assert {other["metadata"]["generation"], forced["metadata"]["generation"]} == {before["metadata"]["generation"]}
    assert again["metadata"]["resourceVersion"] == forced["metadata"]["resourceVersion"]


def test_kubectl_apply_and_server_side_apply_go_together(crds_applied: KubeServer, kubectl: Kubectl) -> None:
    kubectl("apply", "-f", str(CRDS))
    assert kubectl("apply", "-f", str(CRDS)).count("unchanged") == 2
    kubectl("apply", "--server-side", "-f", str(CRDS))


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
async def test_a_valid_example_is_admitted_with_the_documented_defaults(file: Path, namespace: str, kube: Kube) -> None:
    document = read(file)
    typed = (agent_run_of if document["kind"] == "AgentRun" else cron_task_of)(document)

    stored = await kube.create(plural(document), namespace, document)

    assert without_empty(stored["spec"]) == without_empty(typed.as_document()["spec"])
    document["metadata"]["namespace"] = namespace
    read_back = (agent_run_of if document["kind"] == "AgentRun" else cron_task_of)(stored)
    assert read_back == type(read_back).model_validate(
        {**typed.as_document(), "metadata": document["metadata"]}, by_alias=True, by_name=False
    )


@pytest.mark.parametrize("file", INVALID, ids=lambda file: file.stem)
async def test_an_invalid_example_is_refused_for_its_one_fault(file: Path, crds_applied: KubeServer, kube: Kube) -> None:
    expected = re.match(r"# expect: (.+)\n", file.read_text())
    assert expected is not None
    document = read(file)

    with pytest.raises(Refused) as refused:
        await kube.create(plural(document), "default", document)

    assert expected[1] in refused.value.message
    assert refused.value.status in (400, 422)
    causes = refused.value.body.get("details", {}).get("causes", [])
    assert len({cause["field"] for cause in causes if "some validation rules were not checked" not in cause["message"]}) <= 1
    assert "evaluating rule" not in refused.value.message


def test_kubectl_apply_says_the_same(namespace: str, kubectl: Kubectl) -> None:
    file = CRDS / "examples" / "invalid" / "agentrun-minimum-above-maximum.yaml"
    with pytest.raises(KubeError, match=re.escape("spec.workers.minReplicas: Invalid value")) as refused:
        kubectl("apply", "-n", namespace, "-f", str(file))
    assert "lower it or raise maxReplicas" in str(refused.value)


async def test_the_reference_of_a_cron_task_cannot_be_changed(namespace: str, kube: Kube) -> None:
    task = read(CRDS / "examples" / "valid" / "crontask-minimal.yaml")
    await kube.create("crontasks", namespace, task)

    await kube.patch("crontasks", namespace, "report", {"spec": {"suspend": True}})
    with pytest.raises(Refused, match="agentRunRef cannot be changed: create another CronTask"):
        await kube.patch("crontasks", namespace, "report", {"spec": {"agentRunRef": {"name": "other"}}})


async def test_the_columns_say_how_it_is(namespace: str, kube: Kube, kubectl: Kubectl) -> None:
    await kube.create("agentruns", namespace, agent_run())
    status = {
        "observedGeneration": 1,
        "conditions": [condition("Ready", "False", "SchemaBehind", "run agentrun migrate")],
        "workers": {"replicas": 3, "readyReplicas": 2, "desiredReplicas": 3, "busy": 1, "summary": "2/3"},
        "queue": {"stream": "s", "group": "workers", "undelivered": 7, "inFlight": 2, "reclaimable": 0, "deadLettered": 1},
        "gateway": {"url": "http://support-gateway", "replicas": 2, "readyReplicas": 2},
        "schema": {"required": 2, "present": 1},
    }
    stored = await kube.patch("agentruns", namespace, "support", {"status": status}, subresource="status")
    await kube.create("crontasks", namespace, read(CRDS / "examples" / "valid" / "crontask-minimal.yaml"))
    fired = {
        "observedGeneration": 1,
        "conditions": [condition("Accepted", "True", "Accepted", "stored")],
        "lastScheduleTime": NOW,
        "lastOutcome": "skipped_overlap",
        "lastSuccessfulTime": NOW,
        "nextScheduleTime": "2126-01-01T09:00:00Z",
        "nextScheduleTimes": [f"2126-01-0{day}T09:00:00Z" for day in (1, 2, 3)],
        "recentSlots": [{"slot": NOW, "outcome": "skipped_overlap"}],
        "active": ["01a22a2b-72f6-70d0-a893-282eb34a3487"],
    }
    shown = await kube.patch("crontasks", namespace, "report", {"status": fired}, subresource="status")

    assert shown["status"] == fired
    assert stored["status"] == status
    assert stored["metadata"]["generation"] == 1
    header, row = kubectl("get", "arun", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "WORKERS", "BACKLOG", "SCHEMA", "AGE"]
    assert row.split()[:-1] == ["support", "False", "SchemaBehind", "2/3", "7", "1"]
    assert "run agentrun migrate" in kubectl("get", "agentrun", "-n", namespace, "-o", "wide")
    header, row = kubectl("get", "ctask", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "SCHEDULE", "TIMEZONE", "SUSPENDED", "LAST", "OUTCOME", "NEXT", "AGE"]
    assert row.split()[1:8] == ["0", "9", "*", "*", "MON-FRI", "Etc/UTC", "false"]
    assert row.split()[9:11] == ["skipped_overlap", "2126-01-01T09:00:00Z"]
    both = kubectl("get", "agents", "-n", namespace, "-o", "name").split()
    assert both == ["agentrun.agentrun.dev/support", "crontask.agentrun.dev/report"]


async def test_the_server_publishes_what_each_field_means(crds_applied: KubeServer, kube: Kube, kubectl: Kubectl) -> None:
    assert "How long an attempt owns its run without renewing" in kubectl("explain", "arun.spec.workers.leaseSeconds")
    assert "enum: Managed, External" in kubectl("explain", "arun.spec.scaling")
    assert "A schedule on which an agent is run" in " ".join(kubectl("explain", "ctask").split())

    async def published() -> bool:
        schemas = (await kube.request("GET", "/openapi/v3/apis/agentrun.dev/v1alpha1"))["components"]["schemas"]
        workers = schemas["dev.agentrun.v1alpha1.AgentRun"]["properties"]["spec"]["properties"]["workers"]["properties"]
        return bool(workers["leaseSeconds"]["default"] == 30)

    await eventually(published, within=30, what="defaults are in the published schema")


async def test_the_status_subresource_is_apart_from_the_spec(namespace: str, kube: Kube) -> None:
    made = await kube.create("agentruns", namespace, {**agent_run(), "status": {"observedGeneration": 5}})
    assert "status" not in made
    wish = {"spec": {"suspend": True}, "status": {"observedGeneration": 1}}

    changed = await kube.patch("agentruns", namespace, "support", wish, subresource="status")
    assert (changed["spec"]["suspend"], changed["status"]) == (False, {"observedGeneration": 1})
    again = await kube.patch("agentruns", namespace, "support", wish)
    assert (again["spec"]["suspend"], again["metadata"]["generation"]) == (True, 2)


async def test_conditions_are_shared_by_managers_and_checked(namespace: str, kube: Kube) -> None:
    await kube.create("agentruns", namespace, agent_run())
    target = path("agentruns", namespace, "support", "status")
    head = {"apiVersion": "agentrun.dev/v1alpha1", "kind": "AgentRun", "metadata": {"name": "support"}}

    async def say(manager: str, *conditions: dict[str, Any]) -> dict[str, Any]:
        body = {**head, "status": {"conditions": list(conditions)}}
        query = {"fieldManager": manager, "force": "true"}
        return await kube.request("PATCH", target, body=body, query=query, form="apply-patch+yaml")

    await say("agentrun-status", condition("Ready", "True", "Ready"), condition("Suspended", "True", "Suspended"))
    await say("agentrun-scaler", condition("ScalingActive", "True", "Measured"))
    left = await say("agentrun-status", condition("Ready", "True", "Ready"))

    assert {one["type"] for one in left["status"]["conditions"]} == {"Ready", "ScalingActive"}
    with pytest.raises(Refused, match="Unsupported value"):
        await say("agentrun-status", condition("Ready", "Yes", "Ready"))


async def test_nothing_given_for_an_object_brings_its_defaults_back(namespace: str, kube: Kube) -> None:
    await kube.create("agentruns", namespace, agent_run(workers={"maxReplicas": 3}))

    back = await kube.patch("agentruns", namespace, "support", {"spec": {"workers": None}})

    assert back["spec"]["workers"] == agent_run_of(back).spec.workers.model_dump(by_alias=True, exclude_none=True) | {
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}}
    }
    assert back["spec"]["workers"]["maxReplicas"] == 10


async def test_another_manager_may_own_a_part(namespace: str, kube: Kube) -> None:
    await kube.apply("agentruns", namespace, agent_run(), manager="gitops")
    part = {**agent_run(), "spec": {"workers": {"maxReplicas": 20}}}

    both = await kube.apply("agentruns", namespace, part, manager="tuning", force=False)
    after = await kube.apply("agentruns", namespace, agent_run(), manager="gitops", force=False)

    assert both["spec"]["workers"]["maxReplicas"] == after["spec"]["workers"]["maxReplicas"] == 20


@pytest.mark.parametrize(
    "tightened",
    [
        lambda spec: spec["properties"]["agent"]["properties"]["instructions"].update(maxLength=10),
        lambda spec: (
            spec["properties"]["agent"]
            .setdefault("x-kubernetes-validations", [])
            .append({"rule": "!has(self.instructions) || size(self.instructions) <= 10", "message": "too long: shorten it"})
        ),
    ],
    ids=["schema", "rule"],
)
async def test_an_object_of_an_older_schema_can_still_be_worked_with(
    tightened: Callable[[Any], None], copied: tuple[str, dict[str, Any]], namespace: str, kube: Kube
) -> None:
    name, crd = copied
    old = agent_run(agent={"model": "demo:chat", "instructions": "More than ten characters."})
    old["kind"] = crd["spec"]["names"]["kind"]
    await kube.create(name, namespace, old)
    changed = copy.deepcopy(crd)
    tightened(spec_of(changed))
    await kube.apply("customresourcedefinitions", "", changed)

    async def new_is_refused() -> bool:
        try:
            await kube.create(name, namespace, {**old, "metadata": {"name": "new"}})
        except Refused as refused:
            return refused.status == 422
        await kube.delete(name, namespace, "new")
        return False

    await eventually(new_is_refused, within=30, what="the server uses the tightened schema")

    await kube.patch(name, namespace, "support", {"spec": {"suspend": True}})
    await kube.patch(name, namespace, "support", {"status": {"observedGeneration": 2}}, subresource="status")
    await kube.patch(name, namespace, "support", {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(Refused):
        await kube.patch(name, namespace, "support", {"spec": {"agent": {"instructions": "Another one that is too long."}}})
