"""What is decided for one AgentRun, without any server."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from operator_world import KEY, World, present, settled, spec

from agentrun_operator.facts import (
    SecretPresence,
    SecretState,
)
from agentrun_operator.plan import Defaults, plan
from agentrun_operator.reasons import ALWAYS_PRESENT, ConditionType, EventReason
from agentrun_operator.render import names
from agentrun_operator.render.names import SERVING, Component
from agentrun_operator.resources import CONFIGMAPS, DEPLOYMENTS, JOBS, NETWORKPOLICIES, PDBS, SERVICES, Ref

READY, ACCEPTED, SCHEMA, QUEUE = (
    ConditionType.READY,
    ConditionType.ACCEPTED,
    ConditionType.SCHEMA_READY,
    ConditionType.QUEUE_READY,
)
GATEWAY, WORKERS, SCALING = (
    ConditionType.GATEWAY_AVAILABLE,
    ConditionType.WORKERS_AVAILABLE,
    ConditionType.SCALING_ACTIVE,
)


def test_an_agent_run_comes_up_and_then_nothing_is_written_any_more() -> None:
    world = World()
    first = world.reconcile()
    assert {apply.ref.resource for apply in first.applies} == {NETWORKPOLICIES, JOBS}
    assert world.says(READY) == ("Unknown", "Migrating")
    world.migrate()
    second = world.reconcile()
    assert [apply.ref.resource for apply in second.applies][:1] == [CONFIGMAPS]
    assert world.says(READY) == ("Unknown", "Starting")
    world.come_up()
    world.reconcile()
    assert world.says(READY) == ("True", "Ready")
    again = world.reconcile()
    assert (again.status, list(again.events), list(again.deletes), again.requeue_after) == (None, [], [], None)


def test_all_conditions_are_there_from_the_first_moment_and_name_the_generation() -> None:
    world = World()
    world.change(schema=None, queue=None, secrets={})
    world.reconcile()
    conditions = world.observed.raw["status"]["conditions"]
    assert [condition["type"] for condition in conditions] == list(ALWAYS_PRESENT)
    assert {condition["observedGeneration"] for condition in conditions} == {1}


def test_everything_has_one_owner_in_its_own_namespace() -> None:
    world = settled()
    for ref, body in world.observed.children.items():
        assert ref.namespace == KEY.namespace
        assert [(owner["uid"], owner["controller"]) for owner in body["metadata"]["ownerReferences"]] == [
            (world.observed.uid, True)
        ]


def test_an_edited_spec_is_not_ready_until_its_pods_are_there() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    assert world.says(READY) == ("Unknown", "Migrating")
    world.migrate()
    world.reconcile()
    assert world.says(READY) == ("False", "RollingOut")
    assert world.condition(READY)["observedGeneration"] == 2
    world.reconcile()  # the controller has not seen it yet
    assert world.says(READY) == ("False", "RollingOut")
    for part in SERVING:
        world.set_status(
            world.deployment(part),
            {
                "observedGeneration": world.observed.children[world.deployment(part)]["metadata"]["generation"],
                "replicas": 3,
                "updatedReplicas": 2,
                "availableReplicas": 2,
            },
        )
    world.reconcile()
    assert world.says(READY) == ("False", "RollingOut")
    world.come_up()
    world.reconcile()
    assert world.says(READY) == ("True", "Ready")


# --- changes -------------------------------------------------------------------------------------------------------------------------


def _templates(world: World) -> dict[Component, Any]:
    return {part: world.observed.children[world.deployment(part)]["spec"]["template"] for part in SERVING}


EVERYBODY = {*SERVING}


@pytest.mark.parametrize(
    ("edit", "rolled"),
    [
        ({"image": "agentrun:2"}, EVERYBODY),
        ({"agent": {"model": "demo:chat", "instructions": "Be brief."}}, {Component.WORKER}),
        ({"workers": {"maxReplicas": 3, "minReplicas": 1}}, set()),
        ({"workers": {"retries": 5}}, {Component.WORKER, Component.SCHEDULER}),
        ({"workers": {"resources": {"requests": {"cpu": "1"}}}}, {Component.WORKER}),
        ({"scaling": {"targetPerWorker": 3}}, set()),
        ({"scheduler": {"replicas": 1}}, set()),
        ({"gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}, "maxBodyBytes": 2048}}, {Component.GATEWAY}),
        ({"gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}, "replicas": 4}}, set()),
        ({"gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}, "service": {"port": 8080}}}, set()),
        ({"networkPolicy": {"egress": []}}, set()),
        ({"podTemplate": {"labels": {"team": "x"}}}, EVERYBODY),
        ({"suspend": True}, {Component.GATEWAY, Component.SCHEDULER}),
        ({"streaming": {"flushEvents": 10}}, EVERYBODY),
    ],
)
def test_an_edit_replaces_only_the_pods_that_it_concerns(edit: dict[str, Any], rolled: set[Component]) -> None:
    world = settled()
    before = _templates(world)
    world.edit(**edit)
    planned = world.reconcile()
    if "image" in edit:
        assert _templates(world) == before, "first its migration"
        world.migrate()
        planned = world.reconcile()
    after = _templates(world)
    assert {part for part in SERVING if before[part] != after[part]} == rolled
    told = {event.message.split()[1] for event in planned.events if event.reason is EventReason.ROLLED_OUT}
    assert told == {names.component(KEY, part).name for part in rolled}


def test_a_changed_secret_replaces_all_pods_but_changed_api_keys_none() -> None:
    world = settled()
    before = _templates(world)
    world.secret("api-keys", present("{more}"), key="api-keys")
    world.reconcile()
    assert _templates(world) == before
    world.secret("redis", present("redis://elsewhere:6380/0"))
    world.reconcile()
    after = _templates(world)
    assert all(before[part] != after[part] for part in SERVING)
    ports = [rule["ports"] for rule in _policy(world, Component.WORKER)["egress"]]
    assert [{"protocol": "TCP", "port": 5432}, {"protocol": "TCP", "port": 6380}] in ports


def test_a_model_key_replaces_the_workers_only() -> None:
    world = World(spec(agent={"model": "demo:chat", "secretRefs": [{"name": "models"}]}))
    world.secret("models", SecretState(SecretPresence.PRESENT, digest="a"), key="")
    world.settle()
    before = _templates(world)
    assert before[Component.WORKER]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "models"}}]
    world.secret("models", SecretState(SecretPresence.PRESENT, digest="b"), key="")
    world.reconcile()
    assert {part for part in SERVING if before[part] != _templates(world)[part]} == {Component.WORKER}


def test_a_secret_that_is_mounted_replaces_all_pods_when_it_changes() -> None:
    world = World(spec(podTemplate={"volumes": [{"name": "certs", "secret": {"secretName": "certs"}}]}))
    world.secret("certs", SecretState(SecretPresence.PRESENT, digest="a"), key="")
    world.settle()
    before = _templates(world)
    assert world.reconcile().applies == [] or _templates(world) == before
    world.secret("certs", SecretState(SecretPresence.PRESENT, digest="b"), key="")
    planned = world.reconcile()
    assert {part for part in SERVING if before[part] != _templates(world)[part]} == set(SERVING)
    assert [event.reason for event in planned.events] == [EventReason.ROLLED_OUT] * 3
    assert planned.stores_in_use, "the stores are the same"


def test_schedules_that_nobody_looks_after_are_said_where_there_are_some() -> None:
    world = settled()
    world.change(cron_tasks_served=False)
    world.reconcile()
    assert world.condition(ACCEPTED)["message"] == "the spec can be used"
    assert world.observed.schema is not None
    world.change(schema=replace(world.observed.schema, has_schedules=True))
    world.reconcile()
    assert world.says(ACCEPTED) == ("True", "Accepted")
    assert "schedules go on although the kind CronTask is not installed: apply its CRD" in world.condition(ACCEPTED)["message"]
    assert world.says(READY) == ("True", "Ready")
    world.change(cron_tasks_served=True)
    world.reconcile()
    assert world.condition(ACCEPTED)["message"] == "the spec can be used"


def test_a_vanished_secret_keeps_everything_and_its_policies() -> None:
    world = settled()
    children = dict(world.observed.children)
    world.secret("database", SecretState(SecretPresence.NO_SECRET))
    planned = world.reconcile()
    assert (planned.applies, planned.deletes, dict(world.observed.children)) == ([], [], children)
    assert world.says(READY) == ("False", "SecretMissing")
    assert "pods that run keep running" in world.condition(READY)["message"]


def test_ko_08_drift_is_set_right_and_said() -> None:
    world = settled()
    gateway = world.deployment(Component.GATEWAY)
    world.touch(gateway, lambda body: body["spec"]["template"]["spec"]["containers"][0].update(image="foreign:9"))
    planned = world.reconcile()
    assert world.says(READY) == ("False", "RollingOut")
    assert [event.reason for event in planned.events] == [EventReason.DRIFT_CORRECTED]
    assert world.image_of(Component.GATEWAY) == "agentrun:1"


CHANGED_BY_HAND: list[tuple[Ref, Any]] = [
    (
        Ref(SERVICES, "team", "support-gateway"),
        lambda body: body["spec"]["selector"].update({"app.kubernetes.io/component": "worker"}),
    ),
    (Ref(NETWORKPOLICIES, "team", "support-worker"), lambda body: body["spec"]["egress"].pop()),
    (Ref(NETWORKPOLICIES, "team", "support-migrate"), lambda body: body["spec"]["egress"][0]["ports"].pop()),
    (Ref(PDBS, "team", "support-gateway"), lambda body: body["spec"].update(maxUnavailable=2)),
]


@pytest.mark.parametrize(("ref", "change"), CHANGED_BY_HAND, ids=[str(ref) for ref, _ in CHANGED_BY_HAND])
def test_ko_08_drift_of_any_kind_and_deletion_are_said(ref: Ref, change: Any) -> None:
    world = settled()
    before = world.observed.children[ref]
    world.touch(ref, change)
    (event,) = world.reconcile().events
    assert (event.reason, event.warning) == (EventReason.DRIFT_CORRECTED, True)
    assert event.message == f"{ref.resource.kind} {ref.name} was changed by somebody else and is set right"
    assert world.observed.children[ref]["spec"] == before["spec"]
    world.remove(ref)
    (event,) = world.reconcile().events
    assert event.reason is EventReason.DRIFT_CORRECTED
    assert event.message == f"{ref.resource.kind} {ref.name} was deleted by somebody else and is made again"
    assert world.reconcile().events == []


def test_what_follows_from_an_edit_or_a_changed_secret_is_no_drift() -> None:
    world = settled()
    keys = {"auth": {"keysSecretRef": {"name": "api-keys"}}}
    world.edit(gateway={**keys, "service": {"port": 8080}, "replicas": 1}, networkPolicy={"egress": []})
    world.settle()
    world.edit(gateway=keys)
    world.settle()
    world.secret("redis", present("redis://elsewhere:6380/0"))
    world.settle()
    assert EventReason.DRIFT_CORRECTED not in [event.reason for planned in world.plans for event in planned.events]


def test_what_an_admission_webhook_rewrites_each_time_is_not_fought_for_ever() -> None:
    world = settled()
    gateway = world.deployment(Component.GATEWAY)
    world.touch(gateway, lambda body: body["spec"]["template"]["spec"]["containers"][0].update(image="mirror/agentrun:1"))
    world.come_up()
    world.change(rewritten=frozenset({gateway}))
    planned = plan(world.observed, now=world.now, defaults=world.defaults)
    assert (planned.status, planned.events) == (None, [])


def test_what_others_add_is_no_drift() -> None:
    world = settled()

    def add(body: Any) -> None:
        body["metadata"]["labels"]["theirs"] = "x"
        template = body["spec"]["template"]
        template["spec"]["containers"].append({"name": "sidecar", "image": "proxy:1"})
        template["spec"]["containers"][0]["env"].append({"name": "THEIRS", "value": "1"})
        template["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"

    world.touch(world.deployment(Component.WORKER), add)
    assert plan(world.observed, now=world.now, defaults=world.defaults).events == []


@pytest.mark.parametrize("part", SERVING)
def test_ko_08_a_deleted_deployment_is_made_again(part: Component) -> None:
    world = settled()
    world.remove(world.deployment(part))
    told = [event for _ in range(2) for event in world.reconcile().events]
    assert [event.reason for event in told if event.reason is EventReason.DRIFT_CORRECTED] == [EventReason.DRIFT_CORRECTED]
    assert world.says(READY)[0] != "True"
    assert world.deployment(part) in world.observed.children
    world.settle()
    assert world.says(READY) == ("True", "Ready")


def test_parts_that_are_not_wanted_any_more_are_removed() -> None:
    world = settled()
    assert Ref(PDBS, "team", "support-gateway") in world.observed.children
    keys = {"auth": {"keysSecretRef": {"name": "api-keys"}}}
    world.edit(gateway={**keys, "replicas": 1}, workers={"maxReplicas": 1}, networkPolicy={"enabled": False})
    world.reconcile()
    assert [ref for ref in world.observed.children if ref.resource in (PDBS, NETWORKPOLICIES)] == []
    world.edit(gateway={**keys, "replicas": 2})
    world.reconcile()
    assert Ref(PDBS, "team", "support-gateway") in world.observed.children


def test_what_is_being_deleted_is_left_to_go_first() -> None:
    world = settled()
    service = Ref(SERVICES, "team", "support-gateway")
    world.touch(service, lambda body: body["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    planned = world.reconcile()
    assert service not in {apply.ref for apply in planned.applies} | {delete.ref for delete in planned.deletes}


def _left(name: str, uid: str, **metadata: Any) -> tuple[Ref, dict[str, Any]]:
    return Ref(DEPLOYMENTS, "team", name), {"metadata": {"name": name, "uid": uid, **metadata}}


def test_ko_13_what_a_deleted_predecessor_left_is_removed_before_anything_is_made() -> None:
    world = World()
    world.change(remains=dict([_left("support-worker", "old-uid")]))
    planned = world.reconcile()
    assert [(delete.ref.name, delete.uid) for delete in planned.deletes] == [("support-worker", "old-uid")]
    assert planned.applies == []
    assert planned.requeue_after == 5.0
    assert planned.events == []
    world.settle()
    assert world.says(READY) == ("True", "Ready")


def test_what_a_predecessor_left_is_named_and_what_goes_already_is_not_deleted_again() -> None:
    world = World()
    world.change(
        remains=dict([_left("support-worker", "b", deletionTimestamp="2026-01-01T00:00:00Z"), _left("support-gateway", "a")])
    )
    planned = world.reconcile()
    assert [delete.uid for delete in planned.deletes] == ["a"]
    message = world.condition(ACCEPTED)["message"]
    assert (
        "being removed: Deployment team/support-gateway, Deployment team/support-worker; if one stays, look at the finalizers"
        in message
    )
    world.change(remains=dict(_left(f"support-{number}", "x") for number in range(9)))
    world.reconcile()
    assert "support-4 and others; if" in world.condition(ACCEPTED)["message"]


# --- configuration -------------------------------------------------------------------------------------------------------------------


def _configs(world: World) -> dict[str, str]:
    return {
        ref.name: body["data"]["agentrun.yaml"] for ref, body in world.observed.children.items() if ref.resource == CONFIGMAPS
    }


def _mounted(world: World, part: Component) -> str:
    (name,) = [
        volume["configMap"]["name"]
        for volume in world.observed.children[world.deployment(part)]["spec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    ]
    return str(name)


def test_pods_that_run_keep_the_configuration_that_they_have_until_they_are_replaced() -> None:
    world = settled()
    ((first, text),) = _configs(world).items()
    assert re.fullmatch("support-config-[0-9a-f]{8}", first)
    world.edit(agent={"model": "demo:chat", "instructions": "Be brief."})
    world.reconcile()
    world.reconcile()  # the new pods are not there yet
    assert _configs(world)[first] == text
    (second,) = {*_configs(world)} - {first}
    assert "Be brief." in _configs(world)[second]
    assert {part: _mounted(world, part) for part in SERVING} == {
        Component.WORKER: second,
        Component.GATEWAY: first,  # it reads nothing of that, and is not replaced
        Component.SCHEDULER: first,
    }
    world.settle()
    assert {*_configs(world)} == {first, second}, "the gateway and the scheduler still have the first one"
    world.edit(streaming={"flushEvents": 10})
    world.reconcile()
    world.reconcile()
    assert {first, second} < {*_configs(world)}
    world.settle()
    assert {*_configs(world)} == {_mounted(world, part) for part in SERVING}
    assert len(_configs(world)) == 1
    assert world.says(READY) == ("True", "Ready")


def test_a_configuration_in_use_that_somebody_deletes_comes_back_or_is_replaced() -> None:
    world = settled()
    (first,) = _configs(world)
    world.remove(Ref(CONFIGMAPS, "team", first))
    assert [event.reason for event in world.reconcile().events] == [EventReason.DRIFT_CORRECTED]
    assert [*_configs(world)] == [first]
    world.edit(agent={"model": "demo:chat", "instructions": "Be brief."})
    world.settle()
    world.remove(Ref(CONFIGMAPS, "team", first))
    world.settle()
    assert _mounted(world, Component.GATEWAY) in _configs(world)
    assert world.says(READY) == ("True", "Ready")


def test_a_configuration_of_an_earlier_version_is_left_behind_and_removed() -> None:
    world = settled()
    (first,) = _configs(world)
    former = Ref(CONFIGMAPS, "team", "support-config")
    body = {**world.observed.children[Ref(CONFIGMAPS, "team", first)], "immutable": None}
    world.change(children={**world.observed.children, former: body})
    for part in SERVING:

        def mount(deployment: Any) -> None:
            deployment["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] = former.name

        world.touch(world.deployment(part), mount)
    world.reconcile()
    assert former in world.observed.children
    world.settle()
    assert [*_configs(world)] == [first]


def test_an_event_is_told_once() -> None:
    world = World()
    world.secret("redis", SecretState(SecretPresence.NO_SECRET))
    told = [event for _ in range(3) for event in world.reconcile().events]
    assert [(event.reason, event.warning) for event in told] == [(EventReason.NOT_READY, True)]
    assert "Secret redis" in told[0].message


def test_a_status_that_somebody_changed_is_written_again() -> None:
    world = settled()
    status = json.loads(json.dumps(world.observed.raw["status"]))
    status["conditions"][0]["status"] = "False"
    status["gateway"]["replicas"] = 99
    world.change(raw={**world.observed.raw, "status": status})
    assert world.reconcile().status is not None
    assert world.says(READY) == ("True", "Ready")


def test_the_plan_of_an_operator_without_an_image_of_its_own_uses_the_spec() -> None:
    world = World(spec(image=None))
    world.defaults = Defaults("agentrun:own")
    world.settle()
    assert world.image_of(Component.WORKER) == "agentrun:own"


def test_a_plan_depends_on_its_arguments_only() -> None:
    world = settled()
    assert plan(world.observed, now=world.now, defaults=world.defaults) == plan(
        replace(world.observed), now=world.now, defaults=world.defaults
    )


def _policy(world: World, part: Component) -> Any:
    return world.observed.children[names.component(KEY, part, resource=NETWORKPOLICIES)]["spec"]
