"""What the chart makes: names, selectors, pods, policies, hooks."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_servers import KubeError, KubeServer

from agentrun import __version__

CHART = Path(__file__).parents[2] / "charts" / "agentrun"
ALL_METRICS = {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule")}
NAMESPACED = {"watchNamespaces": ["team-a", "team-b"]}
LONG = "a" * 50

Document = dict[str, Any]


def by_kind(found: list[Document], kind: str) -> list[Document]:
    return [one for one in found if one["kind"] == kind]


def hooks(document: Document) -> set[str]:
    return set((document["metadata"].get("annotations") or {}).get("helm.sh/hook", "").split(",")) - {""}


def the(found: list[Document], kind: str, name: str) -> Document:
    """The one object of the release, or of its hooks before an installation, with this name."""
    (one,) = (one for one in by_kind(found, kind) if one["metadata"]["name"] == name and "pre-delete" not in hooks(one))
    return one


def pods(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """All pods with their labels: name of the object, and metadata and spec."""
    for one in found:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one
        elif one["kind"] in ("Deployment", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]


def test_helm_finds_nothing_wrong(helm: Any) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_chart_is_of_the_products_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == __version__


def test_the_operator_runs_twice_and_is_spread(render: Any) -> None:
    spec = the(render(), "Deployment", "agentrun")["spec"]

    assert spec["replicas"] == 2
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == spec["selector"]
    (budget,) = by_kind(render(), "PodDisruptionBudget")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": spec["selector"]}


def test_nothing_but_the_operator_has_replicas(render: Any) -> None:
    found = render({"metrics": ALL_METRICS})

    assert [one["metadata"]["name"] for one in found if "replicas" in one.get("spec", {})] == ["agentrun"]


def test_no_crd_is_part_of_the_chart(render: Any) -> None:
    assert not (CHART / "crds").exists()
    assert by_kind(render(None, "--include-crds"), "CustomResourceDefinition") == []


@pytest.mark.parametrize("values", [{}, NAMESPACED, {"nameOverride": "x"}, {"metrics": ALL_METRICS}], ids=str)
def test_he_02_selectors_are_the_same_in_every_version(render: Any, tmp_path: Path, values: Document) -> None:
    newer = tmp_path / "agentrun"
    shutil.copytree(CHART, newer)
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**meta, "version": "0.9.0", "appVersion": "0.9.0"}))

    def selectors(chart: Path) -> list[Any]:
        wanted = ("selector", "podSelector")
        return [
            (one["kind"], one["metadata"]["name"], {name: one["spec"][name] for name in wanted if name in one["spec"]})
            for one in render(values, chart=chart)
            if "spec" in one
        ]

    assert selectors(newer) == selectors(CHART)
    assert "0.9.0" not in str(selectors(newer))
    assert "agentrun-0.9.0" in str(render(values, chart=newer)), "the other version was not rendered"


def test_selectors_find_the_pods_that_they_are_for(render: Any) -> None:
    found = render({"podLabels": {"team": "a"}, "commonLabels": {"cost": "b"}})
    operator = the(found, "Deployment", "agentrun")["spec"]["template"]["metadata"]["labels"]

    for kind, name, path in (
        ("Service", "agentrun", ("selector",)),
        ("NetworkPolicy", "agentrun", ("podSelector", "matchLabels")),
        ("PodDisruptionBudget", "agentrun", ("selector", "matchLabels")),
    ):
        node = the(found, kind, name)["spec"]
        for member in path:
            node = node[member]
        assert node.items() <= operator.items()
    others = [pod["metadata"]["labels"] for name, pod in pods(found) if name != "agentrun"]
    assert len(others) == 3
    service = the(found, "Service", "agentrun")["spec"]["selector"]
    assert not any(service.items() <= labels.items() for labels in others)


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("agentrun", {}, "agentrun"),
        ("prod", {}, "prod-agentrun"),
        ("prod", {"nameOverride": "bots"}, "prod-bots"),
        ("prod", {"fullnameOverride": "bots"}, "bots"),
    ],
)
def test_names_follow_the_release(render: Any, release: str, values: Document, name: str) -> None:
    the(render(values, release=release), "Deployment", name)


@pytest.mark.parametrize("values", [{}, {"nameOverride": "n" * 63}, {"fullnameOverride": "f" * 63}, NAMESPACED], ids=str)
def test_names_and_labels_are_at_most_63_long(render: Any, values: Document) -> None:
    found = render({**values, "metrics": ALL_METRICS}, release=LONG)

    for one in found:
        assert len(one["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())
    assert len({(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found}) >= len(found) - 1


def test_long_names_that_differ_only_at_the_end_stay_apart(render: Any) -> None:
    ends = {by_kind(render(None, release=LONG + end), "Deployment")[0]["metadata"]["name"] for end in ("xxa", "xxb")}

    assert len(ends) == 2


def test_labels_and_placement_reach_all_pods(render: Any) -> None:
    placement = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "registry"}],
    }
    found = render({**placement, "commonLabels": {"cost-center": "7"}})

    assert all(one["metadata"]["labels"]["cost-center"] == "7" for one in found)
    for name, pod in pods(found):
        for member, value in placement.items():
            assert pod["spec"][member] == value, name


def test_a_digest_takes_the_place_of_the_tag(render: Any) -> None:
    digest = "sha256:" + "0" * 64
    found = render({"image": {"repository": "r.example/agentrun", "digest": digest, "tag": "1"}})

    assert {container["image"] for _, pod in pods(found) for container in pod["spec"]["containers"]} == {
        f"r.example/agentrun@{digest}"
    }


def test_agentruns_without_an_image_get_the_operators(render: Any) -> None:
    def image(**values: Any) -> str:
        (container,) = the(render(values), "Deployment", "agentrun")["spec"]["template"]["spec"]["containers"]
        return next(one["value"] for one in container["env"] if one["name"] == "AGENTRUN_OPERATOR_IMAGE")

    assert image() == f"agentrun:{__version__}"
    assert image(defaultImage="mine:1") == "mine:1"


def test_he_07_rendering_is_repeatable(helm: Any) -> None:
    command = ("template", "agentrun", str(CHART))

    assert helm(*command) == helm.__wrapped__(*command)
    assert by_kind(list(filter(None, yaml.safe_load_all(helm(*command)))), "Secret") == []


def test_he_08_the_job_of_the_crds_is_replaced_and_its_log_stays(render: Any) -> None:
    found = render()
    job = the(found, "Job", "agentrun-crds")

    assert hooks(job) == {"pre-install", "pre-upgrade"}
    assert job["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "a pod that failed keeps its log"


def test_the_rights_of_the_crd_job_come_before_it_and_go_after_it(render: Any) -> None:
    found = [one for one in render() if hooks(one) == {"pre-install", "pre-upgrade"}]
    weights = {one["kind"]: int(one["metadata"]["annotations"]["helm.sh/hook-weight"]) for one in found}

    assert set(weights) == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "NetworkPolicy", "Job"}
    assert max(weight for kind, weight in weights.items() if kind != "Job") < weights["Job"]
    assert weights["ClusterRole"] < weights["ClusterRoleBinding"]
    policies = {one["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for one in found if one["kind"] != "Job"}
    assert policies == {"before-hook-creation,hook-succeeded"}


def test_an_uninstall_takes_the_job_away_without_starting_a_pod(render: Any) -> None:
    (job,) = (one for one in by_kind(render(), "Job") if "pre-delete" in hooks(one))

    assert job["metadata"]["name"] == the(render(), "Job", "agentrun-crds")["metadata"]["name"]
    assert job["spec"]["completions"] == 0
    assert job["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"


def test_an_uninstall_takes_the_operators_lease_away(render: Any) -> None:
    (lease,) = by_kind(render(), "Lease")
    (container,) = the(render(), "Deployment", "agentrun")["spec"]["template"]["spec"]["containers"]

    assert lease["metadata"]["name"] == next(one["value"] for one in container["env"] if one["name"] == "AGENTRUN_OPERATOR_LEASE")
    assert hooks(lease) == {"post-delete"}, "were it part of the release, a lease that an operator has made would stop an upgrade"
    assert lease["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"


@pytest.mark.parametrize("values", [{"crds": {"install": False}}, NAMESPACED], ids=str)
def test_without_the_crd_job_nothing_of_it_is_there_and_the_notes_say_what_to_do(
    render: Any, helm: Any, values: Document
) -> None:
    found = render(values)

    assert by_kind(found, "Job") == []
    assert not any("crds" in one["metadata"]["name"] for one in found)
    assert "crds | kubectl apply" in notes(helm, values)


def notes(helm: Any, values: Document) -> str:
    command = ("install", "prod", str(CHART), "--namespace", "ns", "--dry-run=client", "--values", "-")
    return str(helm(*command, values=yaml.safe_dump(values))).partition("NOTES:")[2]


def test_the_notes_say_the_next_command(helm: Any) -> None:
    said = notes(helm, {})

    assert "kubectl --namespace ns rollout status deployment/prod-agentrun" in said
    assert "helm test prod --namespace ns" in said
    assert "kubectl get agentruns --all-namespaces" in said
    assert "docker run" not in said
    assert "kubectl get agentruns --namespace team-a" in notes(helm, NAMESPACED)


def test_the_network_policies_refuse_what_is_not_named(render: Any) -> None:
    found = by_kind(render({"networkPolicy": {"apiServerPorts": [6443], "storePorts": [5433]}}), "NetworkPolicy")
    operator = the(found, "NetworkPolicy", "agentrun")["spec"]

    assert all(one["spec"]["policyTypes"] == ["Ingress", "Egress"] for one in found)
    assert operator["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8081}]}]
    ports = sorted(port["port"] for rule in operator["egress"] for port in rule["ports"])
    assert ports == [53, 53, 5433, 6443]
    covered = [one["spec"]["podSelector"]["matchLabels"] for one in found]
    for name, pod in pods(render()):
        assert any(labels.items() <= pod["metadata"]["labels"].items() for labels in covered), name
    assert by_kind(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


def test_who_may_read_metrics_can_be_narrowed_but_helm_test_still_gets_in(render: Any) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    found = render({"networkPolicy": {"ingressFrom": [peer]}})
    (rule,) = the(found, "NetworkPolicy", "agentrun")["spec"]["ingress"]

    assert peer in rule["from"]
    test = dict(pods(found))["agentrun-test"]["metadata"]["labels"]
    assert any(one["podSelector"]["matchLabels"].items() <= test.items() for one in rule["from"] if "podSelector" in one)


def test_probes_ask_where_the_operator_answers(render: Any) -> None:
    (container,) = the(render(), "Deployment", "agentrun")["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    environment = {one["name"]: one.get("value") for one in container["env"]}

    assert environment["AGENTRUN_OPERATOR_HEALTH_PORT"] == str(port["containerPort"])
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}


def test_every_container_has_a_read_only_root_and_resources(render: Any) -> None:
    for name, pod in pods(one for one in render() if "pre-delete" not in hooks(one)):
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert "memory" in container["resources"]["limits"], name


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=str)
def test_a_real_api_server_takes_all_of_it_under_the_restricted_standard(
    render: Any, api_server: KubeServer, values: Document
) -> None:
    spaces = ["agentrun-system", "team-a", "team-b"]
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}} for name in spaces]
    api_server.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(namespaces))
    found = render(values)
    in_pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}", "namespace": spaces[0]}, "spec": pod["spec"]}
        for number, (_, pod) in enumerate(pods(found))
    ]
    assert len(in_pods) == (2 if values else 4)

    api_server.kubectl("apply", "--server-side", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump_all([*found, *in_pods]))

    in_pods[0]["spec"]["securityContext"].pop("runAsNonRoot")
    with pytest.raises(KubeError, match='violates PodSecurity "restricted'):
        api_server.kubectl("apply", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(in_pods[0]))
