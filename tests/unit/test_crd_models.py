"""The typed manifests and the CRDs say the same, and both agree about the examples."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from crd_schema import of_crd, of_model

from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRunSpec, CronTaskSpec, agent_run_of, cron_task_of, parse
from agentrun.manifests.base import LABEL_KEY_PATTERN, NAME_PATTERN
from agentrun.manifests.crontask import SCHEDULE_PATTERN

CRDS = Path(__file__).parents[2] / "crds"
VALID = sorted((CRDS / "examples" / "valid").glob("*.yaml"))
INVALID = sorted((CRDS / "examples" / "invalid").glob("*.yaml"))


def crd(name: str) -> dict[str, Any]:
    return yaml.safe_load((CRDS / f"{name}.yaml").read_text())


def load(file: Path) -> Any:
    """As the operator does it. Raises ManifestError."""
    document = yaml.safe_load(file.read_text())
    if document["kind"] == "CronTask":
        return cron_task_of(document)
    run = agent_run_of(document)
    run.spec.store_secrets()
    return run


def rules(node: Any) -> list[str]:
    """All CEL rules of a schema."""
    if isinstance(node, dict):
        own = [rule["rule"] for rule in node.get("x-kubernetes-validations", [])]
        return own + [rule for member in node.values() for rule in rules(member)]
    return [rule for member in node for rule in rules(member)] if isinstance(node, list) else []


def test_the_agent_run_is_the_same_in_crd_and_model() -> None:
    assert of_crd(crd("agentruns")) == of_model(AgentRunSpec)


def test_the_cron_task_is_the_same_in_crd_and_model() -> None:
    model = of_model(CronTaskSpec)
    assert model["spec.schedule"].pop("pattern") == SCHEDULE_PATTERN  # a rule in the CRD: its message says what to write
    assert of_crd(crd("crontasks")) == model


@pytest.mark.parametrize(
    ("path", "fact", "value"),
    [
        ("workers.leaseSeconds", "maximum", 599),
        ("workers.leaseSeconds", "default", 31),
        ("agent.model", "pattern", ".*"),
        ("agent.tools", "maxItems", 3),
        ("scaling.mode", "enum", ["Managed"]),
        ("gateway.service", "description", "Another one."),
        ("podTemplate.env", "x-kubernetes-list-map-keys", ["name", "value"]),
        ("database", "required", []),
        ("gateway.resources.requests.additionalProperties", "maxLength", 5),
    ],
)
def test_a_difference_between_crd_and_model_is_seen(path: str, fact: str, value: Any) -> None:
    changed = crd("agentruns")
    node = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in path.split("."):
        node = node[name] if name == "additionalProperties" else node["properties"][name]
    assert node[fact] != value
    node[fact] = value

    assert of_crd(changed) != of_model(AgentRunSpec)


def test_patterns_that_are_rules_in_the_crds_are_those_of_the_models() -> None:
    def escaped(pattern: str) -> str:
        return f"'{pattern}'".replace("\\", "\\\\")

    run, task = rules(crd("agentruns")), rules(crd("crontasks"))
    assert [escaped(NAME_PATTERN) in " ".join(found) for found in (run, task)] == [True, True]
    assert f"self.schedule.matches({escaped(SCHEDULE_PATTERN)})" in task
    keys = [rule for rule in run if "k.matches(" in rule]
    assert keys
    assert all(escaped(LABEL_KEY_PATTERN) in rule for rule in keys)


@pytest.mark.parametrize("name", ["agentruns", "crontasks"])
def test_everything_in_a_crd_is_described_and_closed_and_bounded(name: str) -> None:
    def walk(node: dict[str, Any], path: str) -> None:
        if node.get("type") == "string":
            assert "enum" in node or "maxLength" in node or "format" in node, path
        if node.get("type") == "integer":
            assert "minimum" in node, path
        if node.get("type") == "array":
            assert {"maxItems", "x-kubernetes-list-type"} <= node.keys(), path
            walk(node["items"], f"{path}[]")
        if node.get("type") == "object" and "properties" not in node:
            assert "maxProperties" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        for rule in node.get("x-kubernetes-validations", []):
            assert rule["message"] and "messageExpression" not in rule, path
        for member, below in node.get("properties", {}).items():
            assert below["description"].endswith("."), f"{path}.{member}"
            walk(below, f"{path}.{member}")

    schema = crd(name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        walk(schema[part], part)


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
def test_a_valid_example_loads(file: Path) -> None:
    loaded = load(file)

    assert type(loaded).model_validate(loaded.as_document(), by_alias=True, by_name=False) == loaded


@pytest.mark.parametrize("file", [file for file in VALID if "agentrun-" in file.name], ids=lambda file: file.stem)
def test_a_valid_agent_run_is_a_manifest_outside_kubernetes_too(file: Path) -> None:
    (run,) = parse(file.read_text(), source=file.name)

    assert run == load(file)


@pytest.mark.parametrize("file", INVALID, ids=lambda file: file.stem)
def test_an_invalid_example_is_refused(file: Path) -> None:
    assert file.read_text().startswith("# expect: ")
    with pytest.raises(ManifestError):
        load(file)


def test_the_full_example_gives_every_field() -> None:
    def given(document: Any, path: str) -> set[str]:
        if isinstance(document, list):
            return {path}.union(*(given(item, f"{path}[]") for item in document))
        if isinstance(document, dict):
            return {path}.union(*(given(member, f"{path}.{name}") for name, member in document.items()))
        return {path}

    for file, model in (("agentrun-full", AgentRunSpec), ("crontask-full", CronTaskSpec)):
        document = yaml.safe_load((CRDS / "examples" / "valid" / f"{file}.yaml").read_text())
        assert of_model(model).keys() - given(document["spec"], "spec") <= {
            "spec.agent.entrypoint",  # excludes model
            "spec.podTemplate.affinity.nodeAffinity",
            "spec.podTemplate.affinity.podAffinity",
        }


def test_what_the_server_writes_is_no_fault_of_a_manifest() -> None:
    document = yaml.safe_load((CRDS / "examples" / "valid" / "agentrun-minimal.yaml").read_text())
    seen = copy.deepcopy(document)
    seen["metadata"] |= {"namespace": "dev", "uid": "1", "resourceVersion": "1", "generation": 2, "managedFields": []}
    seen["status"] = {"observedGeneration": 2}

    assert agent_run_of(seen) == agent_run_of(document)
    assert parse(yaml.safe_dump(seen), source="x") == [agent_run_of(document)]


def test_an_object_s_fault_is_told_without_a_file() -> None:
    document = yaml.safe_load((CRDS / "examples" / "valid" / "crontask-minimal.yaml").read_text())
    document["spec"]["schedule"] = "60 * * * *"

    with pytest.raises(ManifestError, match=r"^spec\.schedule: '60 \* \* \* \*' is not valid; expected: minute, hour, day"):
        cron_task_of(document)
