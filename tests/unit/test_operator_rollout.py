"""Whether what should run does run: roll-outs, workers, and suspension."""

from collections.abc import Callable
from typing import Any

import pytest
from operator_world import World, migrated, present, settled, spec

from agentrun_operator.facts import Counters, QueueFact, ScalingFact, ScalingState, SecretPresence, SecretState, StoreProblem
from agentrun_operator.plan import plan
from agentrun_operator.pod_troubles import AGAIN_SECONDS
from agentrun_operator.reasons import ConditionType, EventReason
from agentrun_operator.render.labels import CREATING
from agentrun_operator.render.names import SERVING, Component

READY = ConditionType.READY
GATEWAY, WORKERS, SCALING = (
    ConditionType.GATEWAY_AVAILABLE,
    ConditionType.WORKERS_AVAILABLE,
    ConditionType.SCALING_ACTIVE,
)


# --- workers -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "scaling", "replicas"),
    [
        ({}, None, 0),
        ({"workers": {"minReplicas": 3}}, None, 3),
        ({"workers": {"minReplicas": 1}}, ScalingFact(ScalingState.ACTIVE, 5), 5),
        ({"workers": {"minReplicas": 3}, "suspend": True}, ScalingFact(ScalingState.ACTIVE, 5), 0),
        ({"scaling": {"mode": "External"}}, None, 1),
        ({"workers": {"minReplicas": 2}, "scaling": {"mode": "External"}}, None, 2),
        ({"workers": {"minReplicas": 3}}, ScalingFact(ScalingState.ACTIVE, 1), 3),
        ({"workers": {"maxReplicas": 4}}, ScalingFact(ScalingState.ACTIVE, 9), 4),
    ],
)
def test_workers_begin_with_the_number_that_is_wanted(
    changes: dict[str, Any], scaling: ScalingFact | None, replicas: int
) -> None:
    world = migrated(**changes)
    world.change(scaling=scaling)
    planned = world.reconcile()
    (worker,) = [apply for apply in planned.applies if apply.ref == world.deployment(Component.WORKER)]
    assert worker.first_replicas == replicas
    assert "replicas" not in worker.body["spec"]
    assert [a.first_replicas for a in planned.applies if a is not worker] == [None] * (len(planned.applies) - 1)


def test_an_unfinished_creation_is_gone_on_with() -> None:
    world = settled()
    worker = world.deployment(Component.WORKER)
    world.touch(worker, lambda body: body["metadata"].setdefault("annotations", {}).update({CREATING: "true"}))
    (apply,) = [apply for apply in plan(world.observed, now=world.now, defaults=world.defaults).applies if apply.ref == worker]
    assert (apply.first_replicas is not None, apply.live is not None) == (True, True)


def test_workers_that_wake_from_zero_do_not_take_ready_away_and_those_that_fail_do() -> None:
    world = settled()
    assert world.says(WORKERS) == ("True", "ScaledToZero")
    world.scale(2)
    world.reconcile()
    world.come_up(ready=0)
    world.set_status(
        world.deployment(Component.GATEWAY),
        {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2},
    )
    world.set_status(
        world.deployment(Component.SCHEDULER),
        {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2},
    )
    planned = world.reconcile()
    assert world.says(WORKERS) == ("Unknown", "Starting")
    assert world.says(READY) == ("True", "Ready")
    assert planned.requeue_after == AGAIN_SECONDS, "pods are not watched"
    world.pass_time(121)
    planned = world.reconcile()
    assert world.says(WORKERS) == ("False", "Unavailable")
    assert world.says(READY) == ("False", "Unavailable")
    assert "kubectl describe pods" in world.condition(READY)["message"]
    assert [event.reason for event in planned.events] == [EventReason.NOT_READY]
    world.come_up()
    world.reconcile()
    assert world.says(READY) == ("True", "Ready")


def test_a_gateway_that_goes_away_is_said_at_once() -> None:
    world = settled()
    world.come_up(ready=0)
    world.reconcile()
    assert world.says(GATEWAY) == ("False", "Unavailable")
    assert world.says(READY) == ("False", "Unavailable")


def test_scaling_changes_no_condition_and_no_template() -> None:
    world = settled()
    for replicas in (3, 7, 1, 0):
        world.scale(replicas)
        world.reconcile()
        world.come_up()
        planned = world.reconcile()
        assert world.says(READY) == ("True", "Ready")
        assert planned.events == []
        assert world.observed.children[world.deployment(Component.WORKER)]["spec"]["replicas"] == replicas


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        (None, "Unknown Pending"),
        (ScalingFact(ScalingState.ACTIVE, 2), "True DemandKnown"),
        (ScalingFact(ScalingState.UNKNOWN_DEMAND, 2), "Unknown DemandUnknown"),
        (ScalingFact(ScalingState.FOREIGN_SCALER), "False ForeignScaler"),
        (ScalingFact(ScalingState.EXTERNAL), "False External"),
    ],
)
def test_scaling_active_says_what_the_scaler_does(fact: ScalingFact | None, says: str) -> None:
    world = settled()
    world.change(scaling=fact)
    world.reconcile()
    assert " ".join(world.says(SCALING)) == says
    assert world.says(READY) == ("True", "Ready")


def test_counters_of_the_scaler_are_in_status() -> None:
    world = settled()
    world.change(
        scaling=ScalingFact(ScalingState.ACTIVE, 2, Counters(undelivered=4, in_flight=3, reclaimable=1, busy=2, dead_lettered=7))
    )
    world.reconcile()
    status = world.observed.raw["status"]
    assert status["queue"] == {
        "stream": "agentrun:{team/support}:runs",
        "group": "workers",
        "undelivered": 4,
        "inFlight": 3,
        "reclaimable": 1,
        "deadLettered": 7,
    }
    assert (status["workers"]["desiredReplicas"], status["workers"]["busy"], status["workers"]["summary"]) == (2, 2, "0/2")
    assert status["schema"] == {"required": 2, "present": 2}
    assert status["gateway"] == {"url": "http://support-gateway.team.svc", "replicas": 2, "readyReplicas": 2}


# --- the first start, and roll-outs that do not end ----------------------------------------------------------------------------------


def _late_secret(world: World) -> None:
    world.secret("redis", SecretState(SecretPresence.NO_SECRET))
    world.reconcile()
    world.pass_time(600)
    world.secret("redis", present("redis://redis.example:6379/0"))
    world.reconcile()


def _long_migration(world: World) -> None:
    world.reconcile()
    world.pass_time(7200)


@pytest.mark.parametrize("delay", [_late_secret, _long_migration])
def test_pods_have_their_time_to_start_whatever_delayed_the_deployments(delay: Callable[[World], None]) -> None:
    world = World(spec(workers={"minReplicas": 1}))
    delay(world)
    world.migrate()
    told = []
    for seconds in (0, 1, 60, 58):
        world.pass_time(seconds)
        told += world.reconcile().events
        assert (world.says(GATEWAY), world.says(WORKERS)) == (("Unknown", "Starting"), ("Unknown", "Starting"))
    assert [event for event in told if event.warning] == []
    world.pass_time(2)
    told = world.reconcile().events
    assert (world.says(GATEWAY), world.says(WORKERS)) == (("False", "Unavailable"), ("False", "Unavailable"))
    assert [event.reason for event in told] == [EventReason.NOT_READY]


def _stuck(world: World) -> None:
    """The new pods do not come up; those before them serve on."""
    for part in SERVING:
        ref = world.deployment(part)
        body = world.observed.children[ref]
        wanted = body["spec"].get("replicas", 1)
        given_up = {
            "type": "Progressing",
            "status": "False",
            "reason": "ProgressDeadlineExceeded",
            "message": f'ReplicaSet "{ref.name}-5d" has timed out progressing.',
        }
        pods = {"replicas": wanted + 1, "updatedReplicas": 1, "readyReplicas": wanted, "availableReplicas": wanted}
        world.set_status(ref, {"observedGeneration": body["metadata"]["generation"], **pods, "conditions": [given_up]})


def test_a_roll_out_that_does_not_end_is_said_with_what_to_look_at() -> None:
    world = settled(workers={"minReplicas": 1})
    world.edit(image="agentrun:no-such")
    world.reconcile()
    world.migrate()
    world.reconcile()
    assert world.says(READY) == ("False", "RollingOut")
    _stuck(world)
    told = world.reconcile().events
    assert world.says(READY) == ("False", "RollOutFailed")
    assert world.says(ConditionType.STALLED) == ("True", "RollOutFailed")
    assert world.says(GATEWAY) == ("True", "Available")
    message = world.condition(READY)["message"]
    assert '(ReplicaSet "support-gateway-5d" has timed out progressing)' in message
    assert "kubectl describe pods -n team -l app.kubernetes.io/instance=support,app.kubernetes.io/component=gateway" in message
    assert [(event.reason, event.warning) for event in told] == [(EventReason.NOT_READY, True)]
    world.scale(3)  # the scaler goes on, and its change is no news
    world.pass_time(3600)
    planned = world.reconcile()
    assert (world.says(READY), planned.events) == (("False", "RollOutFailed"), [])
    world.edit(image="agentrun:2")
    for _ in range(2):
        world.reconcile()
        world.migrate()
    world.reconcile()
    assert world.says(READY) == ("False", "RollingOut"), "what the controllers say is still of the former template"
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    assert not world.condition(ConditionType.STALLED)


# --- suspension ----------------------------------------------------------------------------------------------------------------------

SUSPENDED = ConditionType.SUSPENDED


def _told(world: World) -> list[EventReason]:
    events = [event.reason for planned in world.plans for event in planned.events]
    return [reason for reason in events if reason in (EventReason.SUSPENDED, EventReason.RESUMED)]


def test_suspended_is_said_while_the_gateways_refuse_messages() -> None:
    world = settled()
    world.edit(suspend=True)
    world.reconcile()
    world.reconcile()
    assert (world.condition(SUSPENDED), world.says(READY)) == ({}, ("False", "RollingOut"))
    world.come_up()
    world.reconcile()
    assert world.says(SUSPENDED) == ("True", "Suspended")
    assert world.says(READY) == ("False", "Suspended")
    assert world.says(SCALING) == ("False", "Suspended")
    assert world.says(GATEWAY) == ("True", "Available")
    world.edit(image="agentrun:2")
    for _ in range(3):
        world.reconcile()
        world.migrate()
        assert world.says(SUSPENDED) == ("True", "Suspended"), "old and new gateways refuse them"
    world.settle()
    world.edit(suspend=False)
    world.reconcile()
    world.reconcile()
    assert world.says(SUSPENDED) == ("True", "Suspended")
    assert "is not set any more; messages are refused until the gateway is replaced" in world.condition(SUSPENDED)["message"]
    world.settle()
    assert (world.condition(SUSPENDED), world.says(READY)) == ({}, ("True", "Ready"))
    assert _told(world) == [EventReason.SUSPENDED, EventReason.RESUMED]


def test_a_closed_gate_keeps_suspend_from_the_gateways_and_that_is_what_is_said() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    world.end_jobs("Failed")
    world.reconcile()
    children = dict(world.observed.children)
    world.edit(suspend=True)
    world.reconcile()
    assert dict(world.observed.children) == children
    assert (world.condition(SUSPENDED), world.says(READY)) == ({}, ("False", "MigrationFailed"))
    assert world.condition(READY)["message"].endswith(
        "; until then spec.suspend ends the workers only, and the gateway goes on taking messages"
    )
    world.edit(image="agentrun:1")
    world.settle()
    assert world.says(SUSPENDED) == ("True", "Suspended")
    world.change(queue=QueueFact(StoreProblem.TOO_OLD))
    world.edit(suspend=False)
    world.settle()
    assert world.says(SUSPENDED) == ("True", "Suspended"), "the gateways still refuse messages"
    assert _told(world) == [EventReason.SUSPENDED]


def test_workers_that_somebody_else_scales_are_not_said_to_be_gone() -> None:
    world = settled(scaling={"mode": "External"}, suspend=False)
    world.edit(suspend=True)
    world.settle()
    assert "workers end when they are done and nothing else scales them" in world.condition(SUSPENDED)["message"]
    world.scale(0)
    world.come_up()
    world.reconcile()
    assert world.condition(SUSPENDED)["message"].endswith("no new messages are taken, and there are no workers")
