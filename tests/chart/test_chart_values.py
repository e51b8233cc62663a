"""What the chart takes: its schema is closed, names what is wrong, agrees with the operator's settings, and is described."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_blocks import blocks

from agentrun_operator.settings import OperatorSettings

CHART = Path(__file__).parents[2] / "charts" / "agentrun"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

# Parts of Kubernetes objects that the API server checks.
OF_KUBERNETES = {
    "affinity": {"nodeAffinity", "podAffinity", "podAntiAffinity"},
    "valueFrom": {"secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"},
    "peers": {"namespaceSelector", "podSelector", "ipBlock"},
    "others": {"labelSelector", "extraVolumes[]", "global"},
}


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in the schema, with a path that names them."""
    yield path, node
    for name, member in node.get("properties", {}).items():
        yield from nodes(member, f"{path}.{name}".lstrip("."))
    if isinstance(node.get("items"), dict):
        yield from nodes(node["items"], f"{path}[]")


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def at(values: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def test_the_schema_is_closed() -> None:
    opened = [path for path, node in nodes(SCHEMA) if node.get("type") == "object" and "additionalProperties" not in node]

    assert {path.rpartition(".")[2] for path in opened} == set().union(*OF_KUBERNETES.values())


def test_every_value_has_a_default_and_is_required() -> None:
    """So that a null, which takes a default away, is refused by name."""
    blocks = [(path, node) for path, node in nodes(SCHEMA) if "required" in node and "[]" not in path]
    assert len(blocks) > 10

    for path, node in blocks:
        values = at(VALUES, path) if path else VALUES
        assert set(node["required"]) == set(values) == set(node["properties"]) - {"global"}, path


def test_every_value_is_described() -> None:
    leaves = [node for path, node in nodes(SCHEMA) if path and "[]" not in path and "required" not in node]
    described = [node for node in leaves if node.get("description")]

    inner = {id(member) for node in leaves for member in node.get("properties", {}).values()}
    inner |= {id(member) for node in leaves for one in node.get("properties", {}).values() for _, member in nodes(one)}
    assert [node for node in leaves if node not in described and id(node) not in inner] == []
    assert len(described) > 50


def test_readme_and_descriptions_are_made_from_the_values() -> None:
    spec = importlib.util.spec_from_file_location("describe", CHART / "describe.py")
    assert spec is not None and spec.loader is not None
    describe = importlib.util.module_from_spec(spec)
    sys.modules["describe"] = describe
    spec.loader.exec_module(describe)

    for file, content in describe.outputs().items():
        assert file.read_text(encoding="utf-8") == content, f"{file.name} is old: run `make chart`"


REFUSED = [
    ({"replicaCuont": 3}, "'replicaCuont' not allowed"),
    ({"operator": {"tick": 3}}, "at '/operator': additional properties 'tick'"),
    ({"metrics": {"prometheusRule": {"enable": True}}}, "at '/metrics/prometheusRule': additional properties 'enable'"),
    ({"replicaCount": 0}, "/replicaCount"),
    ({"replicaCount": "two"}, "/replicaCount"),
    ({"nameOverride": "Upper_Case"}, "/nameOverride"),
    ({"fullnameOverride": "f" * 64}, "/fullnameOverride"),
    ({"watchNamespaces": "team-a"}, "/watchNamespaces"),
    ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces"),
    ({"watchNamespaces": [""]}, "/watchNamespaces/0"),
    ({"image": {"tag": 17}}, "/image/tag"),
    ({"image": {"repository": ""}}, "/image/repository"),
    ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ({"imagePullSecrets": ["registry"]}, "/imagePullSecrets/0"),
    ({"defaultImage": "a b"}, "/defaultImage"),
    ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
    ({"operator": {"workers": 65}}, "/operator/workers"),
    ({"operator": {"tickSeconds": 0}}, "/operator/tickSeconds"),
    ({"operator": {"leaseSeconds": 2.5}}, "/operator/leaseSeconds"),
    ({"operator": {"renewSeconds": 15}}, "operator.renewSeconds < operator.leaseSeconds"),
    ({"operator": {"retrySeconds": 10}}, "operator.retrySeconds < operator.renewSeconds"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0"),
    ({"extraEnv": [{"name": "A", "value": 1}]}, "/extraEnv/0/value"),
    ({"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "/extraVolumes/0/name"),
    ({"extraVolumeMounts": [{"name": "ca"}]}, "/extraVolumeMounts/0"),
    ({"resources": {"requests": {"memory": "lots"}}}, "/resources/requests/memory"),
    ({"resources": {"request": {}}}, "/resources"),
    ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "/podLabels"),
    ({"commonLabels": {"app.kubernetes.io/instance": "mine"}}, "/commonLabels"),
    ({"commonLabels": {"a": "not a label"}}, "/commonLabels/a"),
    ({"podAnnotations": {"a": True}}, "/podAnnotations/a"),
    ({"tolerations": [{"effect": "Never"}]}, "/tolerations/0/effect"),
    ({"affinity": {"nodes": {}}}, "/affinity"),
    ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "/topologySpreadConstraints/0"),
    ({"serviceAccount": {"create": "yes"}}, "/serviceAccount/create"),
    ({"rbac": {"create": 1}}, "/rbac/create"),
    ({"crds": {"keepJobSeconds": -1}}, "/crds/keepJobSeconds"),
    ({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts"),
    ({"networkPolicy": {"storePorts": [70000]}}, "/networkPolicy/storePorts/0"),
    ({"networkPolicy": {"ingressFrom": [{"from": {}}]}}, "/networkPolicy/ingressFrom/0"),
    ({"networkPolicy": {"extraEgress": [{"port": 1}]}}, "/networkPolicy/extraEgress/0"),
    ({"service": {"port": 0}}, "/service/port"),
    ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "/metrics/serviceMonitor/interval"),
    ({"metrics": {"prometheusRule": {"alertLabels": {"severity": "low"}}}}, "/metrics/prometheusRule/alertLabels"),
]


@pytest.mark.parametrize(("values", "named"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_wrong_is_named(refusal: Any, values: dict[str, Any], named: str) -> None:
    assert named in refusal(values)


NUMBERS = sorted(
    path for path, node in nodes(SCHEMA) if node.get("type") in ("integer", "number") and "[]" not in path and "." in path
)


@pytest.mark.parametrize("path", [*NUMBERS, "replicaCount"])
def test_he_05_large_numbers_are_plain_digits_or_refused_by_name(render: Any, refusal: Any, path: str) -> None:
    node = next(node for where, node in nodes(SCHEMA) if where == path)
    for number in (1048576, 86400000):
        fits = number <= node["maximum"]
        for given in ((nested(path, number),), (None, "--set", f"{path}={number}")):
            if fits:
                assert str(number) in json.dumps(render(*given))
            else:
                assert "/" + path.replace(".", "/") in refusal(*given)


def test_he_05_numbers_reach_the_operator_as_it_reads_them(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {name: node["maximum"] for name, node in SCHEMA["properties"]["operator"]["properties"].items() if "maximum" in node}
    given = {**most, "renewSeconds": 599.5, "retrySeconds": 0.25}
    found = render({"operator": given, "tolerations": [{"operator": "Exists", "tolerationSeconds": 86400000}]})
    (pod,) = (one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment")
    assert pod["tolerations"][0]["tolerationSeconds"] == 86400000
    environment = {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}
    assert environment["AGENTRUN_OPERATOR_RESYNC_SECONDS"] == "86400"

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read = OperatorSettings().model_dump()
    assert {name: read[_field(name)] for name in given} == given


def test_the_operator_is_told_everything_that_can_be_set(render: Any) -> None:
    (deployment,) = (one for one in render() if one["kind"] == "Deployment")
    told = {one["name"] for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    known = {field.validation_alias for field in OperatorSettings.model_fields.values()}

    assert told <= known
    assert known - told == {"KUBECONFIG", "AGENTRUN_OPERATOR_HEALTH_HOST"}


@pytest.mark.parametrize("name", sorted(SCHEMA["properties"]["operator"]["properties"]))
def test_the_chart_has_the_defaults_and_bounds_of_the_operator(name: str) -> None:
    ours, field = SCHEMA["properties"]["operator"]["properties"][name], OperatorSettings.model_fields[_field(name)]
    bounds: dict[str, Any] = {}
    for rule in field.metadata:
        for keyword, member in (("minimum", "ge"), ("exclusiveMinimum", "gt"), ("maximum", "le")):
            if hasattr(rule, member):
                bounds[keyword] = getattr(rule, member)

    assert VALUES["operator"][name] == field.default
    assert {keyword: ours[keyword] for keyword in ("minimum", "exclusiveMinimum", "maximum") if keyword in ours} == bounds
    if "enum" in ours:
        assert ours["enum"] == list(field.annotation.__args__)  # type: ignore[union-attr]


def _field(value: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in value)


BLOCKS = [path for path, node in nodes(SCHEMA) if "required" in node and "[]" not in path]


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path or "all")
def test_he_06_a_null_is_refused_by_name(refusal: Any, path: str) -> None:
    names = list(at(VALUES, path) if path else VALUES)
    nothing = dict.fromkeys(names)
    said = refusal(nested(path, nothing) if path else nothing)

    assert f"at '{'/' + path.replace('.', '/') if path else ''}': missing propert" in said
    assert all(f"'{name}'" in said for name in names)


def test_he_06_an_empty_block_is_the_default(render: Any) -> None:
    empty = {path: {} for path in BLOCKS if path and "." not in path}
    assert len(empty) > 5

    assert render(empty) == render()


@pytest.mark.parametrize("path", ["resources.limits", "resources.requests", "crds.resources.limits"])
def test_he_06_what_may_be_left_out_is_taken_away_by_a_null(render: Any, path: str) -> None:
    text = json.dumps(render(nested(path, None)))

    assert text != json.dumps(render())
    assert "null" not in text
    assert "<nil>" not in text


def test_he_06_nothing_is_null_in_the_output(render: Any) -> None:
    every = {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule")}
    for values in ({}, {"watchNamespaces": ["a"]}, {"metrics": every}):
        text = json.dumps(render(values))
        assert "null" not in text
        assert "<nil>" not in text
        assert "%!" not in text


@pytest.mark.parametrize(
    "block",
    [
        block
        for heading in ("TLS to the stores", "Network")
        for block in blocks("docs/operations.md", heading, "yaml")
        if "values of the chart" in block
    ],
    ids=["TLS", "ports"],
)
def test_values_in_the_documentation_are_taken(render: Any, block: str) -> None:
    values = yaml.safe_load(block)
    (operator,) = (one for one in render(values) if one["kind"] == "Deployment")
    (policy,) = (
        one
        for one in render(values)
        if one["kind"] == "NetworkPolicy" and one["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
    )
    for volume in values.get("extraVolumes", ()):
        assert volume in operator["spec"]["template"]["spec"]["volumes"]
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert set(values.get("networkPolicy", {}).get("storePorts", ())) <= ports
