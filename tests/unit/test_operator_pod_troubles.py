"""Why pods do not start: what is read of them, and where it is said."""

from typing import Any

import pytest
from operator_world import World, settled

from agentrun_operator.facts import SecretPresence, SecretState
from agentrun_operator.pod_troubles import AGAIN_SECONDS, again_after, may_be_in_trouble, troubles
from agentrun_operator.reasons import ConditionType
from agentrun_operator.render.names import Component, component
from agentrun_operator.resources import JOBS, Ref

READY, GATEWAY, SCHEMA = ConditionType.READY, ConditionType.GATEWAY_AVAILABLE, ConditionType.SCHEMA_READY
NO_IMAGE = "the image nope:1 cannot be pulled; check its name, the registry, and spec.imagePullSecrets"


def pod(part: str, made: int = 1, **state: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": part, **({"batch.kubernetes.io/job-name": "job"} if part == "migrate" else {})}
    return {
        "metadata": {"name": f"{part}-{made}", "labels": labels, "creationTimestamp": f"2026-01-01T00:00:0{made}Z"},
        "status": {"containerStatuses": [{"name": part, "image": "nope:1", "state": state}]},
    }


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("ErrImagePull", "rpc error: code = NotFound", NO_IMAGE),
        ("ImagePullBackOff", "Back-off pulling image", NO_IMAGE),
        ("InvalidImageName", "x", "nope:1 is no name of an image; correct spec.image"),
        ("CreateContainerConfigError", 'secret "model" not found', 'secret "model" not found'),
    ],
)
def test_a_container_that_waits_says_why_in_a_line_that_stays_the_same(reason: str, message: str, said: str) -> None:
    assert troubles([pod("gateway", waiting={"reason": reason, "message": message})]) == {"gateway": said}


def test_a_container_that_is_being_made_or_runs_is_no_trouble() -> None:
    assert troubles([pod("gateway", waiting={"reason": "ContainerCreating"}), pod("worker", running={})]) == {}


def test_a_migration_says_the_last_line_of_its_last_pod() -> None:
    pods = [
        pod("migrate", 2, terminated={"exitCode": 2, "message": "applied 0001\nagentrun: migration 0002: no such table\n"}),
        pod("migrate", 1, terminated={"exitCode": 2, "message": "earlier"}),
        pod("worker", terminated={"exitCode": 2, "message": "a log line with a time"}),
    ]
    assert troubles(pods) == {"job": "agentrun: migration 0002: no such table"}


def test_pods_that_no_node_takes_say_so() -> None:
    found = pod("worker")
    said = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available"
    found["status"] = {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": said}]}
    assert troubles([found]) == {"worker": "no node has room for its pods (0/1 nodes are available: 1 Insufficient cpu)"}


def test_pods_are_looked_at_only_while_some_are_missing() -> None:
    world = settled()
    for ref in [ref for ref in world.observed.children if ref.resource == JOBS]:
        world.remove(ref)
    assert not may_be_in_trouble(world.observed.children)
    world.set_status(component(world.key, Component.WORKER), {"replicas": 1, "unavailableReplicas": 1})
    assert may_be_in_trouble(world.observed.children)


def test_looks_at_pods_come_less_and_less_often() -> None:
    assert [again_after(age) for age in (0, 10, 20, 40, 300, 600, 86_400)] == [10, 10, 10, 20, 150, 300, 300]
    ages = [age / 2 for age in range(4000)]
    assert sorted(map(again_after, ages)) == [again_after(age) for age in ages], "never sooner than before"


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_what_lasts_is_looked_at_seldom_and_what_is_new_soon(part: str) -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    world.migrate()
    world.reconcile()
    ref = component(world.key, Component(part))
    world.set_status(ref, {**world.observed.children[ref]["status"], "unavailableReplicas": 1})
    world.change(troubles={part: NO_IMAGE}, troubled_seconds=1800.0)
    assert world.reconcile().requeue_after == 300.0
    world.change(troubled_seconds=0.0)
    assert world.reconcile().requeue_after == AGAIN_SECONDS


def test_the_condition_of_a_failed_migration_names_the_statement() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    (job,) = world.jobs
    said = "agentrun: migration 0003_x.sql: no such table; the statement is: ALTER TABLE x"
    world.change(troubles={"former": "agentrun: of a former image", job: said})
    world.reconcile()
    assert "former" not in world.condition(SCHEMA)["message"]
    assert "the statement is: ALTER TABLE x" in world.condition(SCHEMA)["message"]
    world.end_jobs("Failed", "BackoffLimitExceeded")
    world.reconcile()
    assert world.says(READY) == ("False", "MigrationFailed")
    assert "the statement is: ALTER TABLE x" in world.condition(READY)["message"]
    assert "kubectl logs" in world.condition(READY)["message"]


def test_an_image_that_cannot_be_pulled_is_said_by_the_condition() -> None:
    world = World()
    for _ in range(3):
        world.reconcile()
        world.migrate()
    world.change(troubles={"gateway": NO_IMAGE})
    planned = world.reconcile()
    assert world.says(GATEWAY) == ("Unknown", "Starting")
    assert NO_IMAGE in world.condition(READY)["message"]
    assert planned.requeue_after is not None and planned.requeue_after <= AGAIN_SECONDS


def test_a_volume_of_a_secret_that_is_missing_keeps_pods_from_being_made_and_names_it() -> None:
    world = World()
    world.edit(podTemplate={"volumes": [{"name": "files", "secret": {"secretName": "files"}}]})
    world.secret("files", SecretState(SecretPresence.NO_SECRET), key="")
    assert world.reconcile().applies == []
    assert world.says(READY) == ("False", "SecretMissing")
    assert "the Secret files (spec.podTemplate.volumes) is not there" in world.condition(READY)["message"]


def test_the_job_waits_for_its_pod_with_looks_at_it() -> None:
    world = World()
    world.reconcile()
    (job,) = world.jobs
    world.set_status(Ref(JOBS, world.key.namespace, job), {"active": 1})
    planned = world.reconcile()
    assert planned.requeue_after == AGAIN_SECONDS
