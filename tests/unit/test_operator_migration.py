"""The migration Job: when it runs, what waits for it, and what is said about it."""

from typing import Any

import pytest
from operator_world import World, present, settled, spec

from agentrun_operator.facts import SchemaFact
from agentrun_operator.pod_troubles import AGAIN_SECONDS
from agentrun_operator.reasons import ConditionType
from agentrun_operator.render.names import SERVING
from agentrun_operator.resources import DEPLOYMENTS, JOBS, NETWORKPOLICIES, Ref

READY, SCHEMA, GATEWAY = ConditionType.READY, ConditionType.SCHEMA_READY, ConditionType.GATEWAY_AVAILABLE


def deployments(world: World) -> dict[Ref, Any]:
    return {ref: body for ref, body in world.observed.children.items() if ref.resource == DEPLOYMENTS}


def serve_with(world: World) -> set[str]:
    return {world.image_of(part) for part in SERVING}


def at_work(world: World) -> None:
    """The pods of all Jobs run."""
    for ref in world.observed.children:
        if ref.resource == JOBS:
            world.set_status(ref, {"active": 1, "ready": 1})


def test_a_new_image_migrates_before_it_is_rolled_out_also_where_this_operator_needs_nothing_more() -> None:
    world = settled()
    world.edit(image="agentrun:newer-than-the-operator")
    planned = world.reconcile()
    assert {apply.ref.resource for apply in planned.applies} == {NETWORKPOLICIES, JOBS}
    assert serve_with(world) == {"agentrun:1"}
    assert world.says(GATEWAY) == ("True", "Available")
    assert planned.schema_ready, "what runs goes on, and so does looking after it"
    world.migrate()
    world.settle()
    assert serve_with(world) == {"agentrun:newer-than-the-operator"}


def test_an_image_that_has_migrated_is_not_asked_again_when_its_job_is_gone_or_other_things_change() -> None:
    world = settled()
    (job,) = world.jobs
    world.remove(Ref(JOBS, "team", job))
    assert world.reconcile().applies != []
    assert (world.jobs, world.says(READY)) == ([], ("True", "Ready"))
    world.edit(podTemplate={"labels": {"team": "x"}})
    world.settle()
    world.secret("redis", present("redis://elsewhere:6380/0"))
    world.settle()
    assert (world.jobs, world.says(READY)) == ([], ("True", "Ready"))
    world.secret("database", present("postgresql://elsewhere/x"))
    world.reconcile()
    assert world.says(READY) == ("Unknown", "Migrating"), "another database"
    assert world.jobs != []


def test_going_back_to_the_image_that_serves_needs_no_migration() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    world.end_jobs("Failed", "BackoffLimitExceeded")
    world.reconcile()
    assert world.says(READY) == ("False", "MigrationFailed")
    world.edit(image="agentrun:1")
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    assert world.jobs == []


def unowned(world: World) -> None:
    world.change(schema=SchemaFact(required=2, present=2, oldest_accepted=1, owner=None))


def test_a_database_that_is_reserved_for_nobody_is_reserved_by_the_migration() -> None:
    world = World()
    unowned(world)
    world.reconcile()
    assert world.says(SCHEMA) == ("Unknown", "Migrating")
    assert len(world.jobs) == 1
    assert deployments(world) == {}
    world.end_jobs("Complete")
    world.reconcile()
    assert deployments(world) == {}, "the answer of the database is awaited"
    world.schema(2)
    world.settle()
    assert world.says(READY) == ("True", "Ready")


def test_with_verify_the_command_reserves_the_database() -> None:
    world = World(spec(database={"secretRef": {"name": "database"}, "migrations": "Verify"}))
    unowned(world)
    planned = world.reconcile()
    assert (planned.applies, world.says(SCHEMA)) == ([], ("False", "MigrationNeeded"))
    message = world.condition(SCHEMA)["message"]
    assert message.startswith("the database is reserved for no AgentRun yet; run: agentrun migrate (image agentrun:1)")
    assert "Secret database, key url and AGENTRUN_NAMESPACE=team AGENTRUN_NAME=support" in message


def test_a_migration_at_work_ends_before_the_next_begins() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    (former,) = world.jobs
    at_work(world)
    for labels in ({"a": "1"}, {"a": "2"}):
        world.edit(podTemplate={"labels": labels})
        planned = world.reconcile()
        assert (planned.applies, planned.deletes, world.jobs) == ([], [], [former])
        assert world.says(READY) == ("Unknown", "Migrating")
        assert f"the Job {former} of an earlier spec is to end before the next one begins" in world.condition(SCHEMA)["message"]
    world.end_jobs("Complete")
    world.reconcile()
    assert len(world.jobs) == 1
    assert world.jobs != [former]


def test_a_migration_at_work_is_not_cut_off_by_going_back() -> None:
    world = settled()
    world.edit(image="agentrun:2")
    world.reconcile()
    former = world.jobs
    assert len(former) == 1
    at_work(world)
    world.edit(image="agentrun:1")
    for _ in range(2):
        world.reconcile()
        world.come_up()
    assert (world.jobs, world.says(READY)) == (former, ("True", "Ready"))
    world.end_jobs("Complete")
    world.reconcile()
    assert world.jobs == []


def test_a_migration_whose_pod_cannot_start_gives_way_to_the_next() -> None:
    world = World(spec(image="agentrun:mistyped"))
    world.reconcile()
    former = world.jobs
    world.set_status(Ref(JOBS, "team", former[0]), {"active": 1, "ready": 0})
    world.edit(image="agentrun:2")
    world.reconcile()
    assert len(world.jobs) == 1
    assert world.jobs != former


def test_a_migration_whose_pod_does_not_start_says_so() -> None:
    world = World()
    world.reconcile()
    (job,) = world.jobs
    world.set_status(Ref(JOBS, "team", job), {"active": 1, "ready": 0})
    planned = world.reconcile()
    assert "kubectl logs" in world.condition(SCHEMA)["message"]
    assert planned.requeue_after == AGAIN_SECONDS, "its pods are not watched"
    world.pass_time(301)
    planned = world.reconcile()
    assert world.says(READY) == ("Unknown", "Migrating")
    assert world.condition(READY)["message"] == (
        f"the pod of the Job {job} has not started for minutes; kubectl describe -n team job/{job}, and pods -l job-name={job}"
    )
    assert world.reconcile().status is None
    world.set_status(Ref(JOBS, "team", job), {"active": 1, "ready": 1})
    world.reconcile()
    assert "kubectl logs" in world.condition(SCHEMA)["message"], "hours are no reason to worry"


@pytest.mark.parametrize("url", ["postgresql://admin:p[w@db/x", "mysql://admin@db/x", "x"])
def test_a_migration_secret_that_is_no_url_is_said_before_anything_is_made(url: str) -> None:
    world = World(spec(database={"secretRef": {"name": "database"}, "migrationSecretRef": {"name": "admin", "key": "dsn"}}))
    world.secret("admin", present(url), key="dsn")
    planned = world.reconcile()
    assert (planned.applies, world.says(SCHEMA)) == ([], ("False", "DatabaseUrlInvalid"))
    assert (
        "Secret admin, key dsn (spec.database.migrationSecretRef) holds no URL of Postgres" in world.condition(READY)["message"]
    )
    world.secret("admin", present("postgresql://admin:p%5Bw@db/x"), key="dsn")
    world.settle()
    assert world.says(READY) == ("True", "Ready")
    world.secret("admin", present(url), key="dsn")
    world.settle()
    assert world.says(READY) == ("True", "Ready"), "it is not needed now"
