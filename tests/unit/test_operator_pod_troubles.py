"""Why pods do not start: what is read of them, and where it is said."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from operator_world import START, World, settled

from agentrun_operator.facts import Object, SecretPresence, SecretState
from agentrun_operator.pod_troubles import AGAIN_SECONDS, CRASH_SECONDS, again_after, may_be_in_trouble
from agentrun_operator.pod_troubles import troubles as troubles_of
from agentrun_operator.reasons import ConditionType
from agentrun_operator.render.names import Component, component
from agentrun_operator.resources import JOBS, Ref
from agentrun_operator.steady_text import steady

READY, GATEWAY, SCHEMA = ConditionType.READY, ConditionType.GATEWAY_AVAILABLE, ConditionType.SCHEMA_READY
NO_IMAGE = "the image nope:1 cannot be pulled; check its name, the registry, and spec.imagePullSecrets"


def pod(part: str, made: int = 1, **state: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": part, **({"batch.kubernetes.io/job-name": "job"} if part == "migrate" else {})}
    return {
        "metadata": {"name": f"{part}-{made}", "labels": labels, "creationTimestamp": f"2026-01-01T00:00:0{made}Z"},
        "status": {"containerStatuses": [{"name": part, "image": "nope:1", "state": state}]},
    }


def troubles(pods: list[dict[str, Any]], children: Mapping[Ref, Object] | None = None) -> dict[str, str]:
    return troubles_of(pods, children or {}, now=START + timedelta(hours=1))


def at(seconds: float) -> str:
    """So long ago."""
    return (START + timedelta(hours=1, seconds=-seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    found = troubles(pods)
    assert found["job"] == "agentrun: migration 0002: no such table"
    assert "a log line" not in found["worker"]


@pytest.mark.parametrize(
    "said",
    [
        "0/1 nodes are available: 1 Insufficient cpu, 3 node(s) had untolerated taint {a: }. preemption: 0/1 nodes are available",
        "0/9 nodes are available: 2 node(s) had untolerated taint {a: }, 7 Insufficient cpu. preemption: 0/9 nodes are available",
    ],
)
def test_pods_that_no_node_takes_say_so_however_many_nodes_there_are(said: str) -> None:
    found = pod("worker")
    found["status"] = {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": said}]}
    assert troubles([found]) == {
        "worker": "no node has room for its pods (Insufficient cpu, node(s) had untolerated taint {a: })"
    }


def test_a_claim_that_is_missing_is_named() -> None:
    found, said = pod("gateway"), 'persistentvolumeclaim "files" not found'
    found["status"] = {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": said}]}
    assert troubles([found]) == {"gateway": f"no node has room for its pods ({said})"}


CRASH = "its container ends soon after each start, with exit code 3; kubectl logs --previous -n team -l "
ENDED = {"exitCode": 3, "reason": "Error", "finishedAt": at(20)}


def serving(
    part: str = "worker", *, last: dict[str, Any] | None = None, template: str | None = None, **state: Any
) -> dict[str, Any]:
    found = pod(part, **state)
    found["metadata"] |= {"namespace": "team", "uid": "0b1f2c3d-1111-4222-8333-444455556666"}
    found["metadata"]["labels"]["app.kubernetes.io/instance"] = "support"
    if template:
        found["metadata"]["annotations"] = {"agentrun.dev/template-digest": template}
    if last:
        found["status"]["containerStatuses"][0]["lastState"] = {"terminated": last}
    return found


@pytest.mark.parametrize("part", ["gateway", "worker", "scheduler"])
@pytest.mark.parametrize(
    ("state", "last"),
    [
        ({"terminated": ENDED}, None),
        ({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 1m20s restarting failed container"}}, ENDED),
        ({"running": {"startedAt": at(5)}}, ENDED),
    ],
)
def test_a_container_that_crashes_says_the_same_in_each_phase(part: str, state: dict[str, Any], last: dict[str, Any]) -> None:
    labels = f"app.kubernetes.io/instance=support,app.kubernetes.io/component={part}"
    assert troubles([serving(part, last=last, **state)]) == {part: f"{CRASH}{labels}"}


def test_a_container_that_crashed_long_ago_or_is_ready_is_no_trouble() -> None:
    runs = serving(last=ENDED, running={"startedAt": at(CRASH_SECONDS + 1)})
    assert troubles([runs]) == {}
    ready = serving(last=ENDED, running={"startedAt": at(5)})
    ready["status"]["containerStatuses"][0]["ready"] = True
    assert troubles([ready]) == {}


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("gateway", "; raise spec.gateway.resources.limits"),
        ("worker", "; raise spec.workers.resources.limits, or lower spec.workers.concurrency"),
        ("scheduler", ""),
    ],
)
def test_a_container_without_enough_memory_says_so(part: str, remedy: str) -> None:
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    said = f"its container needs more memory than it may use (OOMKilled){remedy}"
    assert troubles([serving(part, last=killed, waiting={"reason": "CrashLoopBackOff"})]) == {part: said}


def test_a_program_that_is_missing_is_named() -> None:
    said = 'exec: "agentrun": executable file not found in $PATH: unknown'
    ended = {"exitCode": 128, "reason": "StartError", "message": said}
    assert troubles([serving(last=ended, waiting={"reason": "CrashLoopBackOff"})]) == {
        "worker": f"its container cannot start ({said})"
    }


def test_a_pod_that_waits_for_its_volumes_names_what_they_need() -> None:
    found = serving(waiting={"reason": "ContainerCreating"})
    found["spec"] = {
        "volumes": [{"configMap": {"name": "modules"}}, {"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "c"}}]
    }
    conditions = [
        {"type": "PodReadyToStartContainers", "status": "False"},
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(60)},
    ]
    found["status"]["conditions"] = conditions
    assert troubles([found]) == {}, "mounting takes its time"
    conditions[1]["lastTransitionTime"] = at(180)
    said = "its pods wait for volumes or network on their nodes; check that these are there: ConfigMap modules, claim c"
    assert troubles([found]) == {"worker": said}


def test_a_pod_that_a_node_has_ended_counts_until_another_takes_its_place() -> None:
    evicted = serving()
    evicted["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    said = "its pod was ended (Evicted: The node was low on resource: memory)"
    assert troubles([evicted]) == {"worker": said}
    assert troubles([evicted, serving(running={})]) == {}


ID = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


RESERVED = 'failed to reserve container name "worker_worker-1_team_{uid}_{number}": name is reserved for "{container}"'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [
                RESERVED.format(uid="0b1f2c3d-1111-4222-8333-444455556666", number=number, container=container)
                for number, container in ((1, ID), (17, ID[::-1]))
            ],
            'failed to reserve container name "worker_…_team_…_…": name is reserved for "…"',
        ),
        (
            [f"at {when}: no space left on device" for when in ("2026-01-01T00:00:01Z", "2026-01-01T00:00:02.123+02:00")],
            "at …: no space left on device",
        ),
    ],
)
def test_ids_names_and_times_in_a_message_make_no_news(messages: list[str], said: str) -> None:
    for message in messages:
        waits = serving(waiting={"reason": "CreateContainerError", "message": message})
        assert troubles([waits]) == {"worker": said}


@pytest.mark.parametrize("word", ["secret-0123456789", "team/database", "facade", "deadbeefcafe", "port 8080", "1500Mi"])
def test_names_that_people_gave_stay(word: str) -> None:
    assert steady(f'secret "{word}" not found.') == f'secret "{word}" not found'


@pytest.mark.parametrize("word", ["redis-202611301122", "202611301122", "sha-deadbeefcafe0123", "db-2026-11-30", "a_1"])
@pytest.mark.parametrize("kind", ["secret", "configmap", "Secret", "ConfigMap"])
def test_names_of_secrets_and_configmaps_stay_whatever_they_look_like(kind: str, word: str) -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    assert steady(f'{kind} "{word}" not found; image {digest}') == f'{kind} "{word}" not found; image …'
    assert steady(f"couldn't find key url in {kind} shop/{word}") == f"couldn't find key url in {kind} shop/{word}"
    assert steady(f'MountVolume failed: references non-existent {kind} "shop/{word}"').endswith(f'{kind} "shop/{word}"')


def test_a_name_that_is_left_out_is_left_out_of_a_secrets_name_too() -> None:
    assert steady('secret "token-of-pod-1" not found', names=("pod-1",)) == 'secret "token-of-…" not found'


def test_a_quota_that_keeps_pods_from_being_made_is_passed_on_without_what_changes() -> None:
    world = settled()
    ref = component(world.key, Component.WORKER)
    for name, used in (("support-worker-5d-abcde", 3), ("support-worker-5d-fghij", 4)):
        said = f'pods "{name}" is forbidden: exceeded quota: q, requested: pods=1, used: pods={used}, limited: pods=3'
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": said}
        world.set_status(ref, {"unavailableReplicas": 1, "conditions": [failure]})
        assert troubles([], world.observed.children) == {
            "worker": "its pods are refused (pods is forbidden: exceeded quota: q, requested: pods=1, limited: pods=3)"
        }


def test_pods_of_a_former_template_are_not_what_is_said() -> None:
    world = settled()
    template = world.observed.children[component(world.key, Component.WORKER)]["spec"]["template"]
    present = template["metadata"]["annotations"]["agentrun.dev/template-digest"]
    old = serving(template="former", waiting={"reason": "CreateContainerConfigError", "message": "of the former one"})
    new = serving(template=present, waiting={"reason": "CreateContainerConfigError", "message": "of the present one"})
    assert troubles([old], world.observed.children) == {}
    assert troubles([new, old], world.observed.children) == {"worker": "of the present one"}


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


def test_what_some_pods_suffer_from_is_said_while_others_are_up() -> None:
    world = settled()
    world.change(troubles={"gateway": NO_IMAGE})
    world.reconcile()
    assert world.says(GATEWAY) == ("True", "Available")
    assert NO_IMAGE in world.condition(GATEWAY)["message"]
    assert world.says(READY) == ("True", "Ready")


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
