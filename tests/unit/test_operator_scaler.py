"""The scaler against an API server in memory: what it writes, when it holds, and what it leaves alone."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrun.bus.lag import Demand
from agentrun.control.scaling import Bounds
from agentrun.maintenance.reaper import Limits
from agentrun_operator.autoscalers import HPAS, Autoscalers
from agentrun_operator.cache import ObjectCache
from agentrun_operator.deletion_cost import COST
from agentrun_operator.facts import ScalingState
from agentrun_operator.kube import Conflict, Forbidden, Listing, NotFound, Unavailable
from agentrun_operator.reasons import EventReason
from agentrun_operator.replicas import aim, busy_workers, is_settled
from agentrun_operator.resources import DEPLOYMENTS, PODS, Key, Ref, Resource
from agentrun_operator.sampler import Sample
from agentrun_operator.scaler import Scaler
from agentrun_operator.targets import Mode, Target

KEY = Key("shop", "support")
WORKER = Ref(DEPLOYMENTS, "shop", "support-worker")
BOUNDS = Bounds(0, 10, 1, 60, 300)
TARGET = Target(
    key=KEY,
    uid="uid-1",
    redis_url="redis://r",
    database_url="postgresql://d",
    bounds=BOUNDS,
    limits=Limits(30, 30, 1, 3),
    worker=WORKER,
    scheduler=Ref(DEPLOYMENTS, "shop", "support-scheduler"),
)
Body = dict[str, Any]


class MemoryKube:
    """The worker Deployment, its pods and autoscalers; `calls` are the writes in their order."""

    def __init__(self) -> None:
        self.deployment: Body | None = None
        self.pods: dict[str, Body] = {}
        self.hpas: list[Body] | None = []
        self.calls: list[tuple[str, str, Any]] = []
        self.error: Exception | None = None
        self.reads = 0

    async def get(self, _ref: Ref) -> Body | None:
        self.reads += 1
        return self.deployment

    async def list(
        self, resource: Resource, *, namespace: str | None = None, labels: str | None = None, limit: int = 500
    ) -> Listing:
        if resource == HPAS:
            if self.hpas is None:
                raise Forbidden("no")
            return Listing(self.hpas, "1")
        assert (resource, namespace) == (PODS, "shop")
        assert labels == "app.kubernetes.io/component=worker,app.kubernetes.io/instance=support"
        return Listing([*self.pods.values()], "1")

    async def apply(self, ref: Ref, body: Body, *, manager: str, subresource: str | None = None) -> Body:
        if self.error is not None:
            raise self.error
        assert self.deployment is not None
        assert (ref, manager, body["metadata"]["uid"]) == (WORKER, "agentrun-scaler", self.deployment["metadata"]["uid"])
        assert set(body) == {"metadata", "spec"} and set(body["spec"]) == {"replicas"}
        replicas = body["spec"]["replicas"]
        self.calls.append(("replicas", ref.name, replicas))
        self.deployment = deployment(replicas, generation=self.deployment["metadata"]["generation"] + 1)
        self.deployment["metadata"]["annotations"] = dict(body["metadata"].get("annotations") or {})
        return self.deployment

    async def merge_patch(self, ref: Ref, body: Body, *, subresource: str | None = None) -> Body:
        if ref.name not in self.pods:
            raise NotFound("gone")
        cost = body["metadata"]["annotations"][COST]
        self.calls.append(("cost", ref.name, cost))
        annotations = {} if cost is None else {COST: cost}
        self.pods[ref.name]["metadata"]["annotations"] = annotations
        return self.pods[ref.name]

    @property
    def writes(self) -> Sequence[int]:
        return [value for kind, _, value in self.calls if kind == "replicas"]

    def costs(self) -> dict[str, str | None]:
        return {name: pod["metadata"]["annotations"].get(COST) for name, pod in self.pods.items()}


def deployment(replicas: int, /, *, generation: int = 1, owner: str = "uid-1", **status: Any) -> Body:
    """One whose pods are all there."""
    selector = {"app.kubernetes.io/instance": "support", "app.kubernetes.io/component": "worker"}
    return {
        "metadata": {
            "name": "support-worker",
            "namespace": "shop",
            "uid": "d-1",
            "generation": generation,
            "resourceVersion": str(generation),
            "ownerReferences": [{"uid": owner, "controller": True}],
        },
        "spec": {"replicas": replicas, "selector": {"matchLabels": selector}},
        "status": {
            "observedGeneration": generation,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "availableReplicas": replicas,
            **status,
        },
    }


def pod(name: str, *, ready: bool = True, cost: str | None = None) -> Body:
    return {
        "metadata": {"name": name, "annotations": {COST: cost} if cost else {}},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


class Stage:
    """One AgentRun, a clock, and samples by hand."""

    def __init__(self, kube: MemoryKube, target: Target = TARGET) -> None:
        self.kube, self.target = kube, target
        self.now = 1000.0
        self.cache = ObjectCache()
        self.changed: list[Key] = []
        self.events: list[tuple[EventReason, str]] = []
        self.autoscalers = Autoscalers(kube, clock=lambda: self.now)  # type: ignore[arg-type]
        self.scaler = Scaler(
            kube,  # type: ignore[arg-type]
            self.cache,
            self.autoscalers,
            on_change=self.changed.append,
            on_event=lambda _key, reason, message: self.events.append((reason, message)),
            clock=lambda: self.now,
        )
        self.scaler.watch(target)

    async def sample(
        self,
        waiting: int | None,
        *,
        held: Mapping[str, int] | None = None,
        after: float = 2.0,
        reclaimable: int = 0,
        age: float | None = None,
    ) -> None:
        """A tick `after` seconds later; what it begins is done when this returns."""
        self.now += after
        self.see()
        held = held or {}
        demand = None if waiting is None else Demand(waiting, sum(held.values()) - reclaimable, reclaimable)
        self.scaler.on_sample(KEY, Sample(self.now, demand, held, age_seconds=age))
        for _ in range(50):
            await asyncio.sleep(0)

    def see(self) -> None:
        """The cache learns of what the API server has."""
        if self.kube.deployment is not None:
            self.cache.put(DEPLOYMENTS, self.kube.deployment)

    @property
    def replicas(self) -> int:
        assert self.kube.deployment is not None
        return int(self.kube.deployment["spec"]["replicas"])

    @property
    def state(self) -> ScalingState:
        fact = self.scaler.fact(KEY)
        assert fact is not None
        return fact.state


@pytest.fixture
def kube() -> MemoryKube:
    made = MemoryKube()
    made.deployment = deployment(0)
    return made


@pytest.fixture
def stage(kube: MemoryKube) -> Stage:
    return Stage(kube)


def workers(*numbers: int) -> dict[str, int]:
    """Consumers of the worker pods of these numbers, each with one entry."""
    return {f"support-worker-abc-{number}-1a2b3c4d": 1 for number in numbers}


async def test_sc_01_one_waiting_run_wakes_a_pool_at_zero(stage: Stage) -> None:
    await stage.sample(1)
    assert stage.replicas == 1


async def test_sc_02_what_was_never_delivered_counts_and_is_answered_in_one_step(stage: Stage) -> None:
    await stage.sample(7)
    assert stage.kube.writes == [7]


async def test_sc_02_busy_workers_stay_with_nothing_waiting(stage: Stage) -> None:
    await stage.sample(4)
    for _ in range(300):
        await stage.sample(0, held=workers(1, 2, 3, 4))
    assert stage.replicas == 4


async def test_sc_03_no_demand_means_the_minimum(kube: MemoryKube) -> None:
    stage = Stage(kube, replace(TARGET, bounds=replace(BOUNDS, min_replicas=2)))
    await stage.sample(0)
    assert stage.kube.writes == [2]


async def test_nothing_is_written_while_the_number_is_right(stage: Stage) -> None:
    for _ in range(100):
        await stage.sample(0)
    assert stage.kube.calls == []


async def test_unknown_demand_holds_the_count_and_says_so_and_recovers(stage: Stage) -> None:
    await stage.sample(3)
    for _ in range(600):
        await stage.sample(None)
    assert stage.replicas == 3
    assert stage.state is ScalingState.UNKNOWN_DEMAND
    await stage.sample(5)
    assert stage.replicas == 5
    assert stage.state is ScalingState.ACTIVE


async def test_a_stream_that_was_made_anew_asks_for_more_workers_and_never_for_less(kube: MemoryKube) -> None:
    stage = Stage(kube, replace(TARGET, bounds=replace(BOUNDS, scale_down_stabilization_seconds=0, cooldown_seconds=0)))
    await stage.sample(3)
    await stage.sample(0, age=1)
    await stage.sample(1, age=3)
    assert stage.replicas == 3
    assert stage.state is ScalingState.UNKNOWN_DEMAND
    await stage.sample(5, age=5)
    assert stage.replicas == 5
    assert stage.state is ScalingState.ACTIVE
    stage.kube.deployment = deployment(9, generation=7)
    await stage.sample(5, age=7)
    assert stage.replicas == 9, "kubectl scale"
    await stage.sample(0, after=22, age=29)
    assert stage.replicas == 9
    await stage.sample(0, age=31)
    assert stage.replicas == 0


async def test_a_stream_that_was_made_when_there_was_no_worker_hides_none(kube: MemoryKube) -> None:
    stage = Stage(kube, replace(TARGET, bounds=replace(BOUNDS, scale_down_stabilization_seconds=0, cooldown_seconds=0)))
    await stage.sample(0, age=0)
    await stage.sample(3, age=2)
    await stage.sample(0, age=4)
    assert stage.kube.writes == [3, 0]
    await stage.sample(3, age=6)
    await stage.sample(0, age=1)
    assert stage.kube.writes == [3, 0, 3], "made anew while there were three"


async def test_down_after_the_stabilization_and_to_zero_after_the_cooldown(stage: Stage) -> None:
    await stage.sample(5)
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(5)}
    down = {}
    for _ in range(200):
        await stage.sample(0)
        down.setdefault(stage.replicas, stage.now - 1002)
    assert [*down] == [5, 1, 0]
    assert 58 <= down[1] <= 62
    assert 298 <= down[0] <= 302


async def test_sc_06_a_backlog_on_the_threshold_does_not_swing(kube: MemoryKube) -> None:
    stage = Stage(kube, replace(TARGET, bounds=replace(BOUNDS, target_per_worker=10)))
    for turn in range(20):
        await stage.sample(9 if turn % 2 == 0 else 11)
    assert stage.kube.writes == [1, 2]


async def test_sc_05_idle_pods_go_first_and_costs_are_there_before_the_number_falls(stage: Stage) -> None:
    await stage.sample(4)
    stage.kube.calls.clear()
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(4)}
    while not stage.kube.writes:
        await stage.sample(0, held=workers(2))
    assert [call[0] for call in stage.kube.calls] == ["cost"] * 4 + ["replicas"]
    assert stage.kube.writes == [1]
    costs = stage.kube.costs()
    assert costs.pop("support-worker-abc-2") == "1000"
    assert set(costs.values()) == {"-1000"}

    stage.kube.pods = {"support-worker-abc-2": stage.kube.pods["support-worker-abc-2"]}
    await stage.sample(0, held=workers(2))
    assert stage.kube.costs() == {"support-worker-abc-2": None}, "a cost would be wrong at the next scale-in"


async def test_sc_05_more_busy_workers_than_wanted_end_their_work_first(kube: MemoryKube) -> None:
    stage = Stage(kube, replace(TARGET, bounds=replace(BOUNDS, target_per_worker=10)))
    await stage.sample(40)
    stage.kube.calls.clear()
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(4)}
    for _ in range(100):
        await stage.sample(0, held=workers(0, 1, 2, 3))
    assert stage.kube.calls == [], "all four are busy"
    await stage.sample(0, held=workers(0, 3))
    assert stage.kube.writes == [2]


async def test_a_lower_maximum_holds_whoever_is_busy(stage: Stage) -> None:
    await stage.sample(4)
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(4)}
    stage.scaler.watch(replace(TARGET, bounds=replace(BOUNDS, max_replicas=2)))
    for _ in range(40):
        await stage.sample(0, held=workers(0, 1, 2, 3))
    assert stage.replicas == 2


@pytest.mark.parametrize(
    "unfinished",
    [
        {"observedGeneration": 0},
        {"updatedReplicas": 3},
        {"unavailableReplicas": 1, "conditions": [{"type": "Progressing", "reason": "ReplicaSetUpdated"}]},
        {"replicas": 6, "updatedReplicas": 2},
    ],
)
async def test_no_scale_in_during_a_roll_out(stage: Stage, unfinished: Body) -> None:
    stage.kube.deployment = deployment(5, **unfinished)
    for _ in range(300):
        await stage.sample(0)
    assert stage.kube.writes == []
    stage.kube.deployment = deployment(5, generation=2)
    await stage.sample(0)
    assert stage.kube.writes == [0]


async def test_a_roll_out_does_not_delay_more_workers(stage: Stage) -> None:
    stage.kube.deployment = deployment(2, updatedReplicas=1, unavailableReplicas=1)
    await stage.sample(6)
    assert stage.kube.writes == [6]


async def test_pods_without_room_after_a_finished_roll_out_do_not_stop_a_scale_in(stage: Stage) -> None:
    finished = [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
    stage.kube.deployment = deployment(5, unavailableReplicas=3, availableReplicas=2, conditions=finished)
    for _ in range(300):
        await stage.sample(0)
    assert stage.replicas == 0


async def test_a_busy_pod_that_is_not_ready_is_not_risked(stage: Stage) -> None:
    finished = [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
    stage.kube.deployment = deployment(3, unavailableReplicas=1, conditions=finished)
    names = [f"support-worker-abc-{n}" for n in range(3)]
    stage.kube.pods = {name: pod(name, ready=name != names[1]) for name in names}
    for _ in range(100):
        await stage.sample(0, held=workers(1))
    assert stage.kube.writes == []
    stage.kube.pods[names[1]] = pod(names[1])
    await stage.sample(0, held=workers(1))
    assert stage.kube.writes == [1]


async def test_kubectl_scale_is_corrected_up_and_down(stage: Stage) -> None:
    await stage.sample(3)
    stage.kube.deployment = deployment(0, generation=7)
    await stage.sample(3)
    assert stage.replicas == 3
    stage.kube.deployment = deployment(9, generation=9)
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(9)}
    await stage.sample(0, held=workers(0, 1, 2))
    assert stage.replicas == 3


async def test_sc_08_a_new_scaler_takes_no_worker_away_at_once(kube: MemoryKube) -> None:
    kube.deployment = deployment(5)
    stage = Stage(kube)
    await stage.sample(0)
    await stage.sample(None)
    await stage.sample(0)
    assert kube.calls == []


async def test_costs_left_by_a_process_that_was_killed_go_away_and_those_of_others_stay(kube: MemoryKube) -> None:
    kube.deployment = deployment(3)
    kube.pods = {"a": pod("a", cost="-1000"), "b": pod("b", cost="1000"), "c": pod("c", cost="7")}
    stage = Stage(kube)
    await stage.sample(3)
    assert kube.costs() == {"a": None, "b": None, "c": "7"}
    kube.calls.clear()
    await stage.sample(3)
    assert kube.calls == []


async def test_a_cost_that_somebody_else_gave_stays_and_its_busy_pod_is_not_risked(stage: Stage) -> None:
    await stage.sample(3)
    names = [f"support-worker-abc-{n}" for n in range(3)]
    stage.kube.pods = {name: pod(name, cost="7" if name == names[2] else None) for name in names}
    stage.kube.calls.clear()
    for _ in range(60):
        await stage.sample(0, held=workers(2))
    assert stage.kube.calls == [], "a cost of ours would not save it"
    while not stage.kube.writes:
        await stage.sample(0, held=workers(1))
    assert stage.kube.costs() == {names[0]: "-1000", names[1]: "1000", names[2]: "7"}
    stage.kube.pods = {name: stage.kube.pods[name] for name in names[1:]}
    stage.kube.deployment = deployment(1, generation=9)
    await stage.sample(0, held=workers(1))
    assert stage.kube.costs() == {names[1]: None, names[2]: "7"}


async def test_only_a_known_demand_takes_away_what_somebody_else_has_added(stage: Stage) -> None:
    """The decision alone does not hold here: it is about the number that was wanted, not about what is there."""
    await stage.sample(2)
    stage.kube.deployment = deployment(5, generation=7)
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(5)}
    for _ in range(100):
        await stage.sample(None)
    assert stage.replicas == 5
    await stage.sample(2)
    assert stage.replicas == 2


async def test_who_is_busy_is_not_taken_from_an_old_sample(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the Deployment takes long: meanwhile an idle worker may have taken work."""
    await stage.sample(3)
    stage.kube.deployment = deployment(5, generation=7)
    stage.kube.pods = {f"support-worker-abc-{n}": pod(f"support-worker-abc-{n}") for n in range(5)}
    get = stage.kube.get

    async def slowly(ref: Ref) -> Body | None:
        stage.now += 5.1
        return await get(ref)

    monkeypatch.setattr(stage.kube, "get", slowly)
    await stage.sample(3)
    assert stage.kube.writes == [3]
    monkeypatch.undo()
    await stage.sample(3)
    assert stage.kube.writes == [3, 3]


async def test_mode_external_writes_nothing(kube: MemoryKube) -> None:
    kube.deployment = deployment(2)
    stage = Stage(kube, replace(TARGET, mode=Mode.EXTERNAL))
    await stage.sample(9)
    assert kube.calls == []
    assert stage.state is ScalingState.EXTERNAL


@pytest.mark.parametrize("who", ["External", "an autoscaler"])
async def test_what_others_begin_to_scale_is_handed_over_awake(kube: MemoryKube, who: str) -> None:
    """A HorizontalPodAutoscaler does nothing for a Deployment at zero, and the demand that would raise it is not looked at any more."""
    target = replace(TARGET, bounds=replace(BOUNDS, min_replicas=0))
    stage = Stage(kube, target)
    await stage.sample(0)
    if who == "External":
        target = replace(target, mode=Mode.EXTERNAL)
        stage.scaler.watch(target)
    else:
        kube.hpas = [hpa()]
        await stage.autoscalers.refresh()
    for _ in range(3):
        await stage.sample(9)
    assert kube.writes == [1]
    kube.deployment = owned(deployment(0, generation=9), "keda-operator")
    kube.reads = 0
    for _ in range(20):
        await stage.sample(0)
    stage = Stage(kube, target)  # an operator that has just started
    await stage.autoscalers.refresh()
    for _ in range(20):
        await stage.sample(0)
    assert kube.writes == [1], "this zero is somebody else's"
    assert kube.reads == 2, "it is looked at once by each operator"


def hpa(name: str = "mine", target: str = "support-worker") -> Body:
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": target}
    return {"metadata": {"name": name, "namespace": "shop"}, "spec": {"scaleTargetRef": reference}}


async def test_an_autoscaler_in_the_list_is_let_alone_until_it_is_gone(stage: Stage) -> None:
    stage.kube.hpas = [hpa(), hpa("other", "other-worker")]
    stage.kube.deployment = deployment(2)
    await stage.autoscalers.refresh()
    await stage.sample(9)
    assert stage.kube.calls == []
    assert stage.state is ScalingState.FOREIGN_SCALER
    assert [reason for reason, _ in stage.events] == [EventReason.SCALER_CONFLICT]
    stage.kube.hpas = []
    stage.now += 61
    await stage.autoscalers.refresh()
    await stage.sample(9)
    assert stage.kube.writes == [9]
    assert stage.state is ScalingState.ACTIVE


def owned(body: Body, manager: str, subresource: str = "scale") -> Body:
    body["metadata"]["managedFields"] = [
        {"manager": manager, "operation": "Update", "subresource": subresource, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    ]
    return body


async def test_where_autoscalers_cannot_be_listed_the_manager_of_replicas_tells(stage: Stage) -> None:
    stage.kube.hpas = None
    stage.kube.deployment = owned(deployment(4, generation=2), "kube-controller-manager")
    await stage.sample(9)
    await stage.sample(9)
    assert stage.kube.calls == []
    assert stage.state is ScalingState.FOREIGN_SCALER
    stage.kube.deployment = owned(deployment(4, generation=3), "kubectl")
    await stage.sample(9, after=31)
    await stage.sample(9)
    assert stage.kube.writes == [9]


async def test_an_autoscaler_is_noticed_also_while_nothing_may_be_changed(stage: Stage) -> None:
    await stage.sample(2)
    await stage.autoscalers.refresh()  # before there is one: a list that is older than the Deployment does not count
    stage.kube.hpas = [hpa()]
    stage.kube.deployment = owned(deployment(6, generation=5, observedGeneration=4), "kube-controller-manager")
    await stage.sample(2, after=0.5)
    assert stage.state is ScalingState.FOREIGN_SCALER
    assert stage.kube.writes == [2]


async def test_what_an_autoscaler_left_behind_is_corrected_when_none_is_there(stage: Stage) -> None:
    stage.kube.deployment = owned(deployment(4, generation=2), "kube-controller-manager")
    await stage.sample(9)
    assert stage.kube.writes == [9]


async def test_a_foreign_deployment_of_our_name_is_let_alone(stage: Stage) -> None:
    stage.kube.deployment = deployment(0, owner="somebody")
    await stage.sample(9)
    assert stage.kube.calls == []


async def test_a_deployment_that_is_still_being_made_is_let_alone(stage: Stage) -> None:
    assert stage.kube.deployment is not None
    stage.kube.deployment["metadata"]["annotations"] = {"agentrun.dev/creating": "1"}
    await stage.sample(9)
    assert stage.kube.calls == []


@pytest.mark.parametrize("who", ["External", "an autoscaler"])
async def test_what_others_scale_is_set_to_zero_once_when_suspended_and_woken_afterwards(kube: MemoryKube, who: str) -> None:
    bounds = replace(BOUNDS, min_replicas=2)
    target = replace(TARGET, bounds=bounds, mode=Mode.EXTERNAL if who == "External" else Mode.MANAGED)
    kube.deployment = deployment(4)
    kube.hpas = [hpa()] if who != "External" else []
    stage = Stage(kube, target)
    await stage.autoscalers.refresh()
    await stage.sample(0)
    assert kube.writes == []
    stage.scaler.watch(replace(target, suspended=True))
    for _ in range(3):
        await stage.sample(9)
    assert kube.writes == [0]
    assert kube.deployment["metadata"]["annotations"] == {"agentrun.dev/suspended": "true"}
    stage = Stage(kube, target)  # an operator that has just started
    await stage.autoscalers.refresh()
    for _ in range(3):
        await stage.sample(9)
    assert kube.writes == [0, 2]
    assert kube.deployment["metadata"]["annotations"] == {}


async def test_what_others_do_with_a_suspended_pool_is_left_alone(kube: MemoryKube) -> None:
    target = replace(TARGET, mode=Mode.EXTERNAL)
    stage = Stage(kube, replace(target, suspended=True))
    await stage.sample(1)
    assert kube.writes == [0], "made with none, and marked"
    assert kube.deployment is not None
    kube.deployment["spec"]["replicas"] = 3
    for _ in range(3):
        await stage.sample(1)
    stage.scaler.watch(target)
    await stage.sample(1)
    assert kube.writes == [0, 3]
    await stage.sample(1)
    assert kube.writes == [0, 3]


async def test_suspended_goes_to_zero_at_once_also_in_a_roll_out(stage: Stage) -> None:
    await stage.sample(5)
    stage.kube.deployment = deployment(5, generation=3, updatedReplicas=2)
    stage.scaler.watch(replace(TARGET, suspended=True))
    await stage.sample(5)
    assert stage.kube.writes == [5, 0]


async def test_a_failed_write_is_tried_again_with_pauses(stage: Stage) -> None:
    stage.kube.error = Unavailable("away")
    for _ in range(5):
        await stage.sample(2)
    stage.kube.error = Conflict("another uid")
    await stage.sample(2, after=31)
    assert stage.kube.calls == []
    stage.kube.error = None
    await stage.sample(2, after=31)
    assert stage.kube.writes == [2]


async def test_counters_change_at_most_every_fifteen_seconds_and_the_state_at_once(stage: Stage) -> None:
    await stage.sample(10)
    count = len(stage.changed)
    for waiting in range(11, 17):
        await stage.sample(waiting)
    assert len(stage.changed) == count
    for waiting in range(17, 22):
        await stage.sample(waiting)
    assert len(stage.changed) == count + 1
    await stage.sample(None)
    assert len(stage.changed) == count + 2
    fact = stage.scaler.fact(KEY)
    assert fact is not None and fact.counters is None


async def test_a_forgotten_agentrun_keeps_its_workers(stage: Stage) -> None:
    await stage.sample(3)
    stage.scaler.forget(KEY)
    for _ in range(300):
        await stage.sample(0)
    assert stage.replicas == 3


def test_aim() -> None:
    held = {"known": True, "settled": True, "busy": 0, "most": 10}
    assert aim(wanted=5, replicas=2, **held) == 5
    assert aim(wanted=1, replicas=5, **held) == 1
    assert aim(wanted=1, replicas=5, **{**held, "known": False}) == 5
    assert aim(wanted=1, replicas=5, **{**held, "settled": False}) == 5
    assert aim(wanted=1, replicas=5, **{**held, "busy": 3}) == 3
    assert aim(wanted=1, replicas=5, **{**held, "busy": 9}) == 5


def test_consumers_of_reapers_are_no_workers() -> None:
    assert busy_workers({"support-worker-abc-1-0a0b0c0d": 2, "reaper-operator-1-0a0b0c0d": 3}, "support-worker") == 1


def test_pod_names_are_cut_so_a_long_deployment_name_is_compared_as_far_as_they_keep_it() -> None:
    name = "a" * 63
    assert busy_workers({f"{name[:58]}x7k2p-0a0b0c0d": 1}, name) == 1


def test_a_deployment_that_nobody_has_looked_at_is_not_settled() -> None:
    assert not is_settled({"metadata": {"generation": 1}, "spec": {"replicas": 0}})
