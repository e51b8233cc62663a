"""What is decided for one AgentRun, without any server."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from operator_world import KEY, World, present, spec

from agentrun_operator.facts import (
    Counters,
    QueueFact,
    Refusal,
    ScalingFact,
    ScalingState,
    SchemaFact,
    SecretPresence,
    SecretState,
    StoreProblem,
)
from agentrun_operator.plan import Defaults, plan
from agentrun_operator.reasons import ALWAYS_PRESENT, ConditionType, EventReason
from agentrun_operator.render import names
from agentrun_operator.render.labels import CREATING
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


def settled(**changes: Any) -> World:
    world = World(spec(**changes))
    world.settle()
    assert world.says(READY) == ("True", "Ready"), world.condition(READY)
    world.plans.clear()
    return world


def test_an_agent_run_comes_up_and_then_nothing_is_written_any_more() -> None:
    world = World()
    first = world.reconcile()
    assert [apply.ref.resource for apply in first.applies][:1] == [CONFIGMAPS]
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


# --- what stands in the way ----------------------------------------------------------------------------------------------------------

Change = Callable[[World], None]


def _schema_problem(problem: StoreProblem) -> Change:
    return lambda world: world.change(schema=SchemaFact(2, problem=problem))


def _queue_problem(problem: StoreProblem) -> Change:
    return lambda world: world.change(queue=QueueFact(problem))


def _secret(name: str, presence: SecretPresence, key: str = "url") -> Change:
    return lambda world: world.secret(name, SecretState(presence), key=key)


OBSTACLES: list[tuple[str, Change, ConditionType, str, str, bool]] = [
    # name, change, condition, "status reason", a piece of the message, Stalled
    (
        "spec of another version",
        lambda w: w.change(manifest=None, error="spec.x: unknown field; remove it"),
        ACCEPTED,
        "False InvalidSpec",
        "remove it",
        True,
    ),
    (
        "no image",
        lambda w: (w.edit(image=None), setattr(w, "defaults", Defaults("")))[0],
        ACCEPTED,
        "False ImageMissing",
        "set spec.image",
        True,
    ),
    (
        "name taken",
        lambda w: w.change(foreign=frozenset({Ref(DEPLOYMENTS, "team", "support-worker")})),
        ACCEPTED,
        "False NameTaken",
        "Deployment team/support-worker",
        True,
    ),
    (
        "predecessor",
        lambda w: w.change(remains={Ref(DEPLOYMENTS, "team", "support-worker"): "old"}),
        ACCEPTED,
        "Unknown PredecessorRemains",
        "being removed",
        False,
    ),
    (
        "refused",
        lambda w: w.change(refusal=Refusal(Ref(DEPLOYMENTS, "team", "support-worker"), "exceeded quota")),
        ACCEPTED,
        "False ObjectRefused",
        "exceeded quota",
        True,
    ),
    (
        "no database secret",
        _secret("database", SecretPresence.NO_SECRET),
        ACCEPTED,
        "False SecretMissing",
        "Secret database (spec.database.secretRef) is not there; create it with the key url",
        False,
    ),
    (
        "no key in it",
        _secret("redis", SecretPresence.NO_KEY),
        ACCEPTED,
        "False SecretKeyMissing",
        "has no key url; add it",
        False,
    ),
    (
        "no API keys",
        _secret("api-keys", SecretPresence.NO_SECRET, "api-keys"),
        ACCEPTED,
        "False SecretMissing",
        "spec.gateway.auth.keysSecretRef",
        False,
    ),
    ("no right", _secret("redis", SecretPresence.UNKNOWN), ACCEPTED, "Unknown SecretUnreadable", "grant it get", False),
    ("database unasked", lambda w: w.change(schema=None), SCHEMA, "Unknown Pending", "not answered yet", False),
    (
        "database away",
        _schema_problem(StoreProblem.UNREACHABLE),
        SCHEMA,
        "Unknown DatabaseUnreachable",
        "Secret database, key url",
        False,
    ),
    ("wrong password", _schema_problem(StoreProblem.REFUSED), SCHEMA, "False DatabaseRefused", "check user, password", True),
    ("no URL", _schema_problem(StoreProblem.BAD_URL), SCHEMA, "False DatabaseUrlInvalid", "write postgresql://", True),
    (
        "another application",
        _schema_problem(StoreProblem.OTHER_APPLICATION),
        SCHEMA,
        "False DatabaseNotOurs",
        "belongs to another application",
        True,
    ),
    (
        "another AgentRun",
        lambda w: w.change(schema=SchemaFact(2, 2, 1, "team/sales")),
        SCHEMA,
        "False DatabaseNotOurs",
        "belongs to the AgentRun team/sales; give team/support a database of its own",
        True,
    ),
    (
        "too new",
        lambda w: w.schema(4, oldest_accepted=3),
        SCHEMA,
        "False SchemaTooNew",
        "accepts code for schema 3 or newer",
        True,
    ),
    ("Redis unasked", lambda w: w.change(queue=None), QUEUE, "Unknown Pending", "not answered yet", False),
    ("Redis away", _queue_problem(StoreProblem.UNREACHABLE), QUEUE, "Unknown RedisUnreachable", "Secret redis, key url", False),
    ("Redis refuses", _queue_problem(StoreProblem.REFUSED), QUEUE, "False RedisRefused", "check user", True),
    ("no Redis URL", _queue_problem(StoreProblem.BAD_URL), QUEUE, "False RedisUrlInvalid", "write redis://", True),
    ("old Redis", _queue_problem(StoreProblem.TOO_OLD), QUEUE, "False RedisTooOld", "Redis 7.0 or Valkey 8", True),
    ("forgetful Redis", _queue_problem(StoreProblem.EVICTS), QUEUE, "False RedisEvicts", "noeviction", True),
]


@pytest.mark.parametrize(("name", "change", "kind", "says", "piece", "stalled"), OBSTACLES, ids=[row[0] for row in OBSTACLES])
def test_each_obstacle_is_named_with_what_to_do(
    name: str, change: Change, kind: ConditionType, says: str, piece: str, stalled: bool
) -> None:
    world = World()
    change(world)
    planned = world.reconcile()
    assert " ".join(world.says(kind)) == says
    assert piece in world.condition(kind)["message"]
    if kind is not QUEUE:
        assert planned.applies == []
        assert not planned.gate_open
    if kind is not QUEUE or not planned.gate_open:
        assert world.says(READY) == world.says(kind)
    assert bool(world.condition(ConditionType.STALLED)) is stalled


LASTING = [row for row in OBSTACLES if row[0] != "predecessor"]


@pytest.mark.parametrize(("change", "kind"), [(row[1], row[2]) for row in LASTING], ids=[row[0] for row in LASTING])
def test_an_obstacle_leaves_what_runs_as_it_is_and_heals(change: Change, kind: ConditionType) -> None:
    world = settled()
    before, children = world.observed, dict(world.observed.children)
    change(world)
    world.reconcile()
    assert world.says(READY)[0] != "True"
    assert world.says(GATEWAY) == ("True", "Available")
    if kind is not QUEUE:
        assert dict(world.observed.children) == children
    assert world.reconcile().status is None
    world.change(
        **{field: getattr(before, field) for field in ("manifest", "error", "foreign", "secrets", "schema", "queue", "refusal")}
    )
    if world.generation > 1:
        world.edit(image="agentrun:1")
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    assert not world.condition(ConditionType.STALLED)


def test_no_message_carries_a_number_that_changes() -> None:
    for name, change, *_ in LASTING:
        world = World()
        change(world)
        world.settle()
        world.pass_time(37)
        assert world.reconcile().status is None, name


# --- the schema gate -----------------------------------------------------------------------------------------------------------------


def test_mg_04_nothing_is_made_before_the_schema_is_there() -> None:
    world = World()
    world.schema(0)
    planned = world.reconcile()
    assert {apply.ref.resource for apply in planned.applies} == {NETWORKPOLICIES, JOBS}
    assert world.says(SCHEMA) == ("Unknown", "Migrating")
    assert [event.reason for event in planned.events] == [EventReason.MIGRATION_STARTED]
    assert world.reconcile().applies[:1] != []  # the policy, not the Job again
    assert all(apply.ref.resource != JOBS for apply in world.reconcile().applies)
    world.end_jobs("Complete")
    planned = world.reconcile()
    assert world.says(SCHEMA) == ("Unknown", "Migrating")
    assert planned.requeue_after is not None
    world.schema(2)
    planned = world.reconcile()
    assert EventReason.MIGRATED in [event.reason for event in planned.events]
    assert {world.deployment(part) for part in SERVING} <= set(world.observed.children)


def test_mg_04_old_pods_serve_on_while_the_migration_to_a_new_image_fails_and_it_heals() -> None:
    world = settled()
    before = {part: world.observed.children[world.deployment(part)] for part in SERVING}
    world.edit(image="agentrun:2")
    world.schema(2, required=3)
    world.reconcile()
    (job,) = world.jobs
    world.end_jobs("Failed", "Job has reached the specified backoff limit")
    planned = world.reconcile()
    assert {part: world.observed.children[world.deployment(part)] for part in SERVING} == before
    assert world.says(SCHEMA) == ("False", "MigrationFailed")
    message = world.condition(SCHEMA)["message"]
    assert f"kubectl logs -n team job/{job}" in message
    assert "Job has reached the specified backoff limit" in message
    assert [event.reason for event in planned.events] == [EventReason.MIGRATION_FAILED]
    assert world.says(GATEWAY) == ("True", "Available")
    assert world.reconcile().events == []
    world.edit(image="agentrun:3")
    world.reconcile()
    (other,) = world.jobs
    assert other != job
    assert world.says(SCHEMA) == ("Unknown", "Migrating")
    world.schema(3, required=3)
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    assert world.image_of(Component.GATEWAY) == "agentrun:3"


@pytest.mark.parametrize("change", ["secret", "pull secrets", "deleted"])
def test_a_failed_migration_runs_again_when_what_it_depends_on_changes_or_the_job_is_deleted(change: str) -> None:
    world = World()
    world.schema(0)
    world.reconcile()
    world.end_jobs("Failed")
    world.reconcile()
    assert world.says(SCHEMA) == ("False", "MigrationFailed")
    (job,) = world.jobs
    if change == "secret":
        world.secret("database", present("postgresql://other@db/x"))
    elif change == "pull secrets":
        world.edit(imagePullSecrets=[{"name": "registry"}])
    else:
        world.remove(Ref(JOBS, "team", job))
    planned = world.reconcile()
    assert [apply.ref.resource for apply in planned.applies].count(JOBS) == 1
    assert (world.jobs == [job]) is (change == "deleted")


def test_with_verify_a_person_is_told_the_command_and_no_job_is_made() -> None:
    world = World(spec(database={"secretRef": {"name": "database"}, "migrations": "Verify"}))
    world.schema(1)
    planned = world.reconcile()
    assert planned.applies == []
    assert world.says(SCHEMA) == ("False", "MigrationNeeded")
    for piece in ("agentrun migrate", "image agentrun:1", "Secret database, key url", "AGENTRUN_NAME=support"):
        assert piece in world.condition(SCHEMA)["message"]
    world.schema(2)
    world.settle()
    assert world.says(READY) == ("True", "Ready")


def test_mg_05_a_schema_ahead_within_the_accepted_range_serves_and_beyond_it_nothing_rolls() -> None:
    world = settled()
    world.schema(3, oldest_accepted=2)
    world.edit(image="agentrun:2")
    world.settle()
    assert world.image_of(Component.WORKER) == "agentrun:2"
    world.schema(4, oldest_accepted=3)
    world.edit(image="agentrun:3")
    world.reconcile()
    assert world.image_of(Component.WORKER) == "agentrun:2"
    assert world.says(READY) == ("False", "SchemaTooNew")
    assert "accepts code for schema 3 or newer" in world.condition(READY)["message"]


def test_an_image_whose_migration_leaves_the_schema_behind_is_called_too_old() -> None:
    world = World()
    world.schema(1)
    world.reconcile()
    world.end_jobs("Complete")
    world.pass_time(60)
    world.reconcile()
    assert world.says(SCHEMA) == ("False", "ImageTooOld")
    assert "use an image of the operator's version" in world.condition(SCHEMA)["message"]


# --- workers -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "scaling", "replicas"),
    [
        ({}, None, 0),
        ({"workers": {"minReplicas": 3}}, None, 3),
        ({"workers": {"minReplicas": 1}}, ScalingFact(ScalingState.ACTIVE, 5), 5),
        ({"workers": {"minReplicas": 3}, "suspend": True}, ScalingFact(ScalingState.ACTIVE, 5), 0),
        ({"scaling": {"mode": "External"}}, None, 1),
    ],
)
def test_workers_begin_with_the_number_that_is_wanted(
    changes: dict[str, Any], scaling: ScalingFact | None, replicas: int
) -> None:
    world = World(spec(**changes))
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
        {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1},
    )
    planned = world.reconcile()
    assert world.says(WORKERS) == ("Unknown", "Starting")
    assert world.says(READY) == ("True", "Ready")
    assert planned.requeue_after == pytest.approx(121)
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
    world.reconcile()
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


def test_ko_13_what_a_deleted_predecessor_left_is_removed_before_anything_is_made() -> None:
    world = World()
    world.change(remains={Ref(DEPLOYMENTS, "team", "support-worker"): "old-uid"})
    planned = world.reconcile()
    assert [(delete.ref.name, delete.uid) for delete in planned.deletes] == [("support-worker", "old-uid")]
    assert planned.applies == []
    assert planned.requeue_after == 1.0
    assert planned.events == []
    world.settle()
    assert world.says(READY) == ("True", "Ready")


def test_suspend_and_resume() -> None:
    world = settled()
    world.edit(suspend=True)
    planned = world.reconcile()
    assert EventReason.SUSPENDED in [event.reason for event in planned.events]
    world.settle()
    assert world.says(ConditionType.SUSPENDED) == ("True", "Suspended")
    assert world.says(READY) == ("False", "Suspended")
    assert world.says(SCALING) == ("False", "Suspended")
    assert world.says(GATEWAY) == ("True", "Available")
    world.edit(suspend=False)
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    assert world.condition(ConditionType.SUSPENDED) == {}
    reasons = [event.reason for planned in world.plans for event in planned.events]
    assert [reason for reason in reasons if reason in (EventReason.SUSPENDED, EventReason.RESUMED)] == [
        EventReason.SUSPENDED,
        EventReason.RESUMED,
    ]


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
