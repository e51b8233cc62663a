"""What stands in the way of a roll-out: each obstacle by its name, the schema gate, and the migration Job."""

from collections.abc import Callable

import pytest
from operator_world import World, present, settled, spec

from agentrun_operator.facts import (
    QueueFact,
    Refusal,
    SchemaFact,
    SecretPresence,
    SecretState,
    StoreProblem,
)
from agentrun_operator.plan import Defaults
from agentrun_operator.reasons import ConditionType, EventReason
from agentrun_operator.render.names import SERVING, Component
from agentrun_operator.resources import DEPLOYMENTS, JOBS, NETWORKPOLICIES, Ref

READY, ACCEPTED, SCHEMA, QUEUE = (
    ConditionType.READY,
    ConditionType.ACCEPTED,
    ConditionType.SCHEMA_READY,
    ConditionType.QUEUE_READY,
)
GATEWAY = ConditionType.GATEWAY_AVAILABLE


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
        lambda w: w.change(remains={Ref(DEPLOYMENTS, "team", "support-worker"): {"metadata": {"uid": "old"}}}),
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
        "no authority",
        _schema_problem(StoreProblem.BAD_CERTIFICATE),
        SCHEMA,
        "False DatabaseUrlInvalid",
        "needs sslrootcert=",
        True,
    ),
    (
        "its certificate",
        _schema_problem(StoreProblem.UNTRUSTED),
        SCHEMA,
        "False DatabaseTlsFailed",
        "certificate of Postgres",
        True,
    ),
    ("no TLS", _schema_problem(StoreProblem.NO_TLS), SCHEMA, "False DatabaseTlsFailed", "speaks no TLS", True),
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
    ("Redis, no authority", _queue_problem(StoreProblem.BAD_CERTIFICATE), QUEUE, "False RedisUrlInvalid", "ssl_ca_certs", True),
    ("Redis' certificate", _queue_problem(StoreProblem.UNTRUSTED), QUEUE, "False RedisTlsFailed", "certificate of Redis", True),
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
    assert bool(world.condition(ConditionType.STALLED)) is stalled
    assert not planned.gate_open
    if name != "Redis away":  # Redis may come after the pods
        assert planned.applies == []
        assert world.says(READY) == world.says(kind)


LASTING = [row for row in OBSTACLES if row[0] != "predecessor"]


@pytest.mark.parametrize(("change", "kind"), [(row[1], row[2]) for row in LASTING], ids=[row[0] for row in LASTING])
def test_an_obstacle_leaves_what_runs_as_it_is_and_heals(change: Change, kind: ConditionType) -> None:
    world = settled()
    before, children = world.observed, dict(world.observed.children)
    change(world)
    world.reconcile()
    assert world.says(READY)[0] != "True"
    assert world.says(GATEWAY) == ("True", "Available")
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
    world.pass_time(-600)  # whatever the clock of the controllers says
    world.end_jobs("Complete")
    world.pass_time(600)
    planned = world.reconcile()
    assert world.says(SCHEMA) == ("Unknown", "Migrating"), "the database may have answered before the Job ended"
    assert planned.requeue_after == 2.0
    world.change(migrated_seconds=60.0)
    world.reconcile()
    assert world.says(SCHEMA) == ("False", "ImageTooOld")
    assert world.condition(SCHEMA)["message"].endswith("use an image of the operator's version")
    world.change(migrated_seconds=0.0)  # an operator that has just started
    assert world.reconcile().status is None


# --- Redis ---------------------------------------------------------------------------------------------------------------------------


def serve_with(world: World) -> set[str]:
    return {world.image_of(part) for part in SERVING}


UNUSABLE = [StoreProblem.REFUSED, StoreProblem.BAD_URL, StoreProblem.UNTRUSTED, StoreProblem.TOO_OLD, StoreProblem.EVICTS]


@pytest.mark.parametrize("url", ["redis://:p[w@redis:6379/0", "redis://other:6380/0"])
@pytest.mark.parametrize("problem", UNUSABLE)
def test_a_redis_that_must_not_be_used_is_not_rolled_out_over_a_working_system(problem: StoreProblem, url: str) -> None:
    world = settled()
    children = dict(world.observed.children)
    world.secret("redis", present(url))
    world.change(queue=QueueFact(problem))
    planned = world.reconcile()
    assert (planned.applies, planned.deletes, dict(world.observed.children)) == ([], [], children)
    assert (planned.gate_open, planned.schema_ready) == (False, True)
    assert world.says(READY)[0] == "False"
    assert world.condition(READY)["message"].endswith("; pods that run keep the Redis that they have")


def test_a_redis_that_is_away_keeps_nothing_up_but_a_change_to_it() -> None:
    world = settled()
    world.change(queue=QueueFact(StoreProblem.UNREACHABLE))
    world.edit(image="agentrun:2")
    world.settle()
    assert serve_with(world) == {"agentrun:2"}, "pods start without it"
    children = dict(world.observed.children)
    world.secret("redis", present("redis://other:6380/0"))
    world.edit(image="agentrun:3")
    planned = world.reconcile()
    assert (planned.applies, dict(world.observed.children)) == ([], children)
    assert world.says(READY) == ("Unknown", "RedisUnreachable")
    assert world.condition(READY)["message"].endswith("; pods that run keep the Redis that they have")
    world.change(queue=QueueFact())
    world.settle()
    assert serve_with(world) == {"agentrun:3"}
    assert world.says(READY) == ("True", "Ready")


def test_redis_may_come_after_the_pods_of_a_new_agent_run() -> None:
    world = World()
    world.change(queue=QueueFact(StoreProblem.UNREACHABLE))
    world.settle()
    assert world.says(GATEWAY) == ("True", "Available")
    assert world.says(READY) == ("Unknown", "RedisUnreachable")


def test_without_a_redis_that_may_be_used_no_migration_begins() -> None:
    world = World()
    world.schema(0)
    world.change(queue=QueueFact(StoreProblem.TOO_OLD))
    planned = world.reconcile()
    assert planned.applies == []
    assert world.says(READY) == ("False", "RedisTooOld")
    assert world.says(SCHEMA) == ("Unknown", "NotEvaluated")
