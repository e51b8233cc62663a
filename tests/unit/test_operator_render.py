"""The bodies of an AgentRun's objects."""

import itertools
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_world import KEY, URLS, World, present, spec

from agentrun.manifests import agent_run_of, parse
from agentrun_operator.objects import desired_objects, migration_objects, names_wanted, ref_of
from agentrun_operator.render import names, policies
from agentrun_operator.render.config import FILE, PodConfig, pod_manifest
from agentrun_operator.render.labels import labels, selector
from agentrun_operator.render.names import Component, name_of
from agentrun_operator.resources import DEPLOYMENTS, JOBS, NETWORKPOLICIES, Key
from agentrun_operator.situation import Defaults, Situation

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def situation(**changes: Any) -> Situation:
    world = World(spec(**changes))
    return Situation(world.observed, Defaults("agentrun:own"), world.now)


def everything(**changes: Any) -> list[dict[str, Any]]:
    found = situation(**changes)
    return [*desired_objects(found), *migration_objects(found)]


def pods_of(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [body["spec"]["template"] for body in bodies if ref_of(body).resource in (DEPLOYMENTS, JOBS)]


# --- names ---------------------------------------------------------------------------------------------------------------------------

LONG = "a" * 60
KO_12 = [
    "a",
    "a" * 52,
    "a" * 53,
    "a" * 63,
    "a" * 64,
    "a" * 253,
    f"{LONG}b",
    f"{LONG}c",
    "with.dots",
    "with-dots",
    "9lives",
    "a.b.c",
]


def test_ko_12_names_of_any_length_give_distinct_valid_children() -> None:
    refs = [ref for name in KO_12 for ref in names.fixed(Key("n", name))]
    found = [(ref.resource, ref.name) for ref in refs]
    assert all(LABEL.fullmatch(name) for _, name in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", KO_12)
def test_ko_12_label_values_fit(name: str) -> None:
    for value in [*labels(name, Component.WORKER).values(), *selector(name, Component.WORKER).values()]:
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)


@given(st.lists(st.from_regex(r"[a-z]([-a-z0-9.]{0,120}[a-z0-9])?", fullmatch=True), min_size=2, max_size=5, unique=True))
def test_ko_12_two_names_never_meet(agent_runs: list[str]) -> None:
    made = {name: name_of(name, "migrate-12345678") for name in agent_runs}
    assert len(set(made.values())) == len(agent_runs)
    assert all(LABEL.fullmatch(name) for name in made.values())


def test_short_names_are_plain() -> None:
    assert name_of("support", "worker") == "support-worker"


# --- selectors -----------------------------------------------------------------------------------------------------------------------


def test_he_02_selectors_hold_nothing_that_a_new_version_changes() -> None:
    for body in everything():
        chosen = body["spec"].get("selector") if "spec" in body else None
        if ref_of(body).resource == DEPLOYMENTS:
            assert chosen is not None
            part = body["metadata"]["labels"]["app.kubernetes.io/component"]
            assert chosen == {"matchLabels": {"app.kubernetes.io/instance": "support", "app.kubernetes.io/component": part}}


def test_he_02_selectors_stay_the_same_whatever_the_spec_says() -> None:
    one = {ref_of(body): body["spec"].get("selector") for body in desired_objects(situation()) if "spec" in body}
    other = {
        ref_of(body): body["spec"].get("selector")
        for body in desired_objects(situation(image="other:9", podTemplate={"labels": {"version": "9"}}))
        if "spec" in body
    }
    assert one == other


def test_each_selector_finds_its_own_pods_only() -> None:
    bodies = everything()
    pods = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template["metadata"]["labels"]
        for template in pods_of(bodies)
    }
    assert set(pods) == {part.value for part in Component}
    for part, (name, carried) in itertools.product(Component, pods.items()):
        matches = selector("support", part).items() <= carried.items()
        assert matches is (name == part.value)


# --- pods ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", pods_of(everything()), ids=lambda template: template["spec"]["containers"][0]["name"])
def test_pods_meet_the_restricted_standard(template: dict[str, Any]) -> None:
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {"name": "agentrun-tmp", "emptyDir": {}} in pod["volumes"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert len({variable["name"] for variable in container["env"]}) == len(container["env"])


def test_no_value_of_a_secret_is_in_any_object() -> None:
    text = yaml.safe_dump(everything())
    assert not [url for url in URLS.values() if len(url) > 5 and url in text]
    assert "u:p@" not in text


def test_workers_get_their_drain_time_and_a_margin() -> None:
    found = {ref_of(body): body for body in everything(workers={"drainSeconds": 100})}
    worker = found[names.component(KEY, Component.WORKER)]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 115
    assert "replicas" not in worker["spec"]


@pytest.mark.parametrize(("given", "replicas"), [({}, 2), ({"scheduler": {"replicas": 3}}, 3)])
def test_there_are_as_many_schedulers_as_the_spec_says(given: dict[str, Any], replicas: int) -> None:
    found = {ref_of(body): body for body in everything(**given)}
    assert found[names.component(KEY, Component.SCHEDULER)]["spec"]["replicas"] == replicas


def test_the_pod_template_of_the_spec_is_added_and_does_not_replace_what_is_ours() -> None:
    template = {
        "labels": {"team": "x"},
        "annotations": {"note": "y"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "topologySpreadConstraints": [{"topologyKey": "zone"}],
        "env": [{"name": "HOME", "value": "/data"}, {"name": "MODE", "value": "x"}],
        "volumes": [{"name": "code", "configMap": {"name": "tools"}}, {"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "code", "mountPath": "/code"}, {"name": "data", "mountPath": "/data", "readOnly": False}],
    }
    secrets = [{"name": "registry"}]
    for pod in pods_of(everything(podTemplate=template, imagePullSecrets=secrets, imagePullPolicy="Always")):
        assert pod["metadata"]["labels"]["team"] == "x"
        assert pod["metadata"]["annotations"]["note"] == "y"
        assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
        assert pod["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
        assert list(pod["spec"]["affinity"]) == ["nodeAffinity"]
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("zone", "ScheduleAnyway")
        assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "support"
        (container,) = pod["spec"]["containers"]
        assert [variable["value"] for variable in container["env"] if variable["name"] == "HOME"] == ["/data"]
        assert {"name": "code", "configMap": {"name": "tools"}} in pod["spec"]["volumes"]
        assert {"name": "data", "mountPath": "/data", "readOnly": False} in container["volumeMounts"]
        assert pod["spec"]["imagePullSecrets"] == secrets
        assert container["imagePullPolicy"] == "Always"


def test_the_migration_uses_the_stronger_role() -> None:
    database = {"secretRef": {"name": "database"}, "migrationSecretRef": {"name": "admin", "key": "dsn"}}
    (job,) = [body for body in migration_objects(situation(database=database)) if body["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["migrate"]
    assert {"name": "DATABASE_URL", "valueFrom": {"secretKeyRef": {"name": "admin", "key": "dsn"}}} in container["env"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


# --- configuration -------------------------------------------------------------------------------------------------------------------


def test_qw_05_pods_run_the_images_own_program_with_arguments_alone() -> None:
    templates = [body["spec"]["template"]["spec"] for body in everything() if body["kind"] in ("Deployment", "Job")]
    containers = [one for spec in templates for one in (*spec["containers"], *spec.get("initContainers", ()))]
    assert [one.get("command") for one in containers] == [None] * len(containers)
    assert sorted(one["args"] for one in containers if one["args"] != ["migrate"]) == [["gateway"], ["scheduler"], ["worker"]]


def test_the_configuration_is_a_manifest_that_pods_can_read() -> None:
    (body,) = [body for body in everything(workers={"retries": 7}, suspend=True) if body["kind"] == "ConfigMap"]
    (manifest,) = parse(body["data"][FILE], source="test")
    assert (manifest.spec.workers.retries, manifest.spec.suspend, manifest.spec.agent.model) == (7, True, "demo:chat")
    assert (manifest.metadata.namespace, manifest.metadata.name) == (KEY.namespace, KEY.name)


def test_defaults_and_what_no_pod_reads_are_left_out_so_that_older_pods_understand_it() -> None:
    filled_in = World(spec()).observed.manifest
    assert filled_in is not None
    raw = {**World().observed.raw, "spec": filled_in.spec.model_dump(mode="json", by_alias=True, exclude_none=True)}
    manifest = agent_run_of(raw)
    assert pod_manifest(manifest)["spec"] == {"agent": {"model": "demo:chat"}}
    assert PodConfig.of(manifest) == PodConfig.of(filled_in)


# --- policies ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("postgresql://u:p@db/x", [5432]),
        ("postgresql://u:p@db:6000/x", [6000]),
        ("postgresql://u:p@one:6000,two/x?target_session_attrs=any", [5432, 6000]),
        ("postgresql://u:p%40@[::1]:7000/x", [7000]),
        ("postgresql://u@[::1]/x", [5432]),
        ("postgresql://u@db/x?port=6001", [5432, 6001]),
        ("postgresql://u@db:notaport/x", [5432]),
        ("postgresql://u:p[w@db:6000/x", [5432]),
        ("postgresql://[::1:6000/x", [5432]),
        ("", [5432]),
    ],
)
def test_ports_are_those_of_the_url(url: str, ports: list[int]) -> None:
    assert policies.ports_of(url, default=5432) == ports


def test_connections_are_refused_but_those_that_are_needed() -> None:
    egress = [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 8443}]}]
    found = {
        body["metadata"]["name"]: body["spec"]
        for body in everything(networkPolicy={"egress": egress})
        if ref_of(body).resource == NETWORKPOLICIES
    }
    assert set(found) == {f"support-{part}" for part in Component}
    for name, policy in found.items():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["egress"][0] == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
        further = [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 8443}]}]
        assert policy["egress"][2:] == ([] if name == "support-migrate" else further)
    assert found["support-gateway"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8080}]}]
    assert "ingress" not in found["support-migrate"]
    assert found["support-migrate"]["egress"][1] == {"ports": [{"protocol": "TCP", "port": 5432}]}
    assert found["support-worker"]["egress"][1] == {
        "ports": [{"protocol": "TCP", "port": 5432}, {"protocol": "TCP", "port": 6379}]
    }


def test_https_is_allowed_unless_the_spec_says_something_else() -> None:
    (worker,) = [
        body for body in everything() if ref_of(body).resource == NETWORKPOLICIES and body["metadata"]["name"] == "support-worker"
    ]
    assert worker["spec"]["egress"][2:] == [{"ports": [{"protocol": "TCP", "port": 443}]}]


@pytest.mark.parametrize(
    "changes",
    [{}, {"networkPolicy": {"enabled": False}}, {"database": {"secretRef": {"name": "database"}, "migrations": "Verify"}}],
    ids=["all", "no policies", "verify"],
)
def test_names_that_must_be_free_are_those_of_the_objects(changes: dict[str, Any]) -> None:
    found = situation(**changes)
    assert names_wanted(found) == {ref_of(body) for body in desired_objects(found)}


def test_a_migration_has_a_name_of_its_own_for_each_image_schema_and_secret() -> None:
    world = World()
    marks = set()
    for image, required, url in itertools.product(("a", "b"), (1, 2), ("postgresql://x/1", "postgresql://x/2")):
        world.edit(image=image)
        world.schema(0, required=required)
        world.secret("database", present(url))
        marks.add(Situation(world.observed, Defaults(), world.now).migration.name)
    assert len(marks) == 8
