"""Alerts and monitors: they speak of metrics that exist, and each alert has its runbook."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrun.telemetry import REGISTRY
from agentrun_operator import metrics  # the operator's own are in the registry once this is imported

ROOT = Path(__file__).parents[2]
ALERTS = yaml.safe_load((ROOT / "charts" / "agentrun" / "alerts.yaml").read_text())
ON = {"metrics": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule")}}
# Labels that Prometheus or the PodMonitor adds.
ADDED = {"namespace", "job", "pod", "agentrun"}


def known() -> dict[str, set[str]]:
    """Names of samples, and the labels that they have."""
    assert metrics.SYNCED
    found: dict[str, set[str]] = {}
    for collector in list(REGISTRY._collector_to_names):
        labels = set(getattr(collector, "_labelnames", ()))
        for name in REGISTRY._collector_to_names[collector]:
            found[name] = labels
    return found


def rules(render: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    (rule,) = (one for one in render(values) if one["kind"] == "PrometheusRule")
    return list(rule["spec"]["groups"][0]["rules"])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_exist(alert: dict[str, str]) -> None:
    samples, expression = known(), alert["expr"]
    names = set(re.findall(r"\bagentrun_[a-z_]+", expression))
    assert names
    assert names <= samples.keys()
    available = set().union(*(samples[name] for name in names)) | ADDED
    matched = set(re.findall(r"[{,]([a-z_]+)(?:=~|!=|!~|=)", expression))
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    shown = set(re.findall(r"\$labels\.(\w+)", alert["summary"]))
    assert matched | grouped <= available
    assert shown <= grouped, "a label that is summed away is empty in the text"


def test_values_of_labels_in_alerts_exist() -> None:
    """Those that the code writes in more than one way; a misspelt one would never fire."""
    text = "\n".join(file.read_text() for room in ("services", "operator") for file in (ROOT / room).rglob("*.py"))
    for label, values in re.findall(r"(result|status)!?=~?\"([a-z0-9.|]+)\"", str(ALERTS)):
        for value in values.split("|"):
            assert re.fullmatch(r"\d.*", value) or f'"{value}"' in text, (label, value)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {file.stem: file.read_text() for file in (ROOT / "docs" / "runbooks").glob("*.md")}

    assert pages.keys() == {alert["alert"] for alert in ALERTS}
    for name, page in pages.items():
        assert page.startswith(f"# {name}\n"), name
        assert "**Effect.**" in page and "**What to do**" in page, name
        assert set(re.findall(r"\bAgentrun[A-Z]\w+", page)) <= pages.keys(), name


def test_rules_name_the_operators_own_pods(render: Any) -> None:
    found = rules(render, {**ON, "fullnameOverride": "bots"})

    assert len(found) == len(ALERTS)
    assert not any("OPERATOR" in rule["expr"] for rule in found)
    assert found[0]["expr"] == 'absent(agentrun_operator_synced{namespace="agentrun-system",job="bots"})'
    assert "{{ $labels.queue }}" in str([rule["annotations"]["summary"] for rule in found])


def test_labels_and_the_place_of_the_runbooks_can_be_set(render: Any) -> None:
    rule = {"enabled": True, "alertLabels": {"team": "a"}, "runbooks": "https://wiki.example/runbooks/"}
    first = rules(render, {"metrics": {"prometheusRule": rule}})[0]

    assert first["labels"] == {"severity": "critical", "team": "a"}
    assert first["annotations"]["runbook_url"] == "https://wiki.example/runbooks/AgentrunOperatorDown.md"


def test_an_alert_has_no_url_of_a_runbook_that_nobody_could_open(render: Any) -> None:
    assert not any("runbook_url" in rule["annotations"] for rule in rules(render, ON))


def test_monitors_are_off_unless_asked_for(render: Any) -> None:
    kinds = {one["kind"] for one in render(ON)} - {one["kind"] for one in render()}

    assert kinds == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_the_service_monitor_finds_the_service(render: Any) -> None:
    found = render(ON)
    (monitor,) = (one for one in found if one["kind"] == "ServiceMonitor")
    services = [one for one in found if one["kind"] == "Service"]
    selected = [
        one for one in services if monitor["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]

    assert selected == services
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in services[0]["spec"]["ports"]]


def test_the_pod_monitor_looks_where_the_operator_works(render: Any) -> None:
    def where(values: dict[str, Any]) -> Any:
        (monitor,) = (one for one in render({**ON, **values}) if one["kind"] == "PodMonitor")
        return monitor["spec"]["namespaceSelector"]

    assert where({}) == {"any": True}
    assert where({"watchNamespaces": ["a", "b"]}) == {"matchNames": ["a", "b"]}
