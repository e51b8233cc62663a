"""Which stores are asked for demand and reaped: those that the pods have, whatever the Secrets say meanwhile."""

from dataclasses import replace

import pytest
from operator_world import START, URLS, World, present, settled

from agentrun_operator.facts import QueueFact, SchemaFact, SecretPresence, SecretState, StoreProblem
from agentrun_operator.following import followed
from agentrun_operator.plan import Plan
from agentrun_operator.render.names import Component
from agentrun_operator.targets import Target

OLD_REDIS, OLD_DATABASE = URLS[("redis", "url")], URLS[("database", "url")]
NEW_REDIS, NEW_DATABASE = "redis://new:6379/0", "postgresql://u:p@new:5432/x"


def look(world: World, last: Target | None) -> tuple[Target | None, Plan]:
    before = world.observed
    planned = world.reconcile()
    return followed(before, planned, last), planned


def running() -> tuple[World, Target]:
    world = settled()
    target, _ = look(world, None)
    assert target is not None
    assert (target.redis_url, target.database_url, target.schema_ready) == (OLD_REDIS, OLD_DATABASE, True)
    return world, target


def test_a_new_agent_run_is_followed_before_it_has_pods() -> None:
    world = World()
    target, _ = look(world, None)
    assert target is not None and target.redis_url == OLD_REDIS


def test_both_secrets_change_with_a_mistake_in_one() -> None:
    world, last = running()
    world.secret("redis", present(NEW_REDIS))
    world.secret("database", present("postgresql://nobody@nowhere/x"))
    world.change(schema=SchemaFact(required=2, problem=StoreProblem.REFUSED))
    target, planned = look(world, last)
    assert not planned.gate_open
    assert target == last
    assert look(world, None)[0] is None, "an operator that has just started does not know the former URL: it holds"

    world.secret("database", present(NEW_DATABASE))
    world.schema(2)
    for _ in range(3):
        before, target = target, look(world, target)[0]
        world.migrate()
        world.come_up()
    assert before is not None and target is not None
    assert (target.redis_url, target.database_url) == (NEW_REDIS, NEW_DATABASE)


def test_the_new_stores_are_asked_once_the_deployments_have_them() -> None:
    world, last = running()
    world.secret("redis", present(NEW_REDIS))
    target, planned = look(world, last)
    assert planned.gate_open and target == last, "written in this reconcile, seen in the next"
    target, _ = look(world, target)
    assert target == replace(last, redis_url=NEW_REDIS)


def test_a_deployment_that_could_not_be_changed_keeps_the_former_stores() -> None:
    world, last = running()
    former = world.observed.children[world.deployment(Component.WORKER)]
    world.secret("redis", present(NEW_REDIS))
    target, _ = look(world, last)
    world.change(children={**world.observed.children, world.deployment(Component.WORKER): former})
    assert look(world, target)[0] == last


@pytest.mark.parametrize("name", ["redis", "database"])
def test_a_secret_that_vanishes_is_not_forgotten_nor_what_the_spec_says(name: str) -> None:
    world, last = running()
    world.secret(name, SecretState(SecretPresence.NO_SECRET))
    world.change(schema=None if name == "database" else world.observed.schema)
    world.edit(workers={"maxReplicas": 3}, suspend=True)
    target, planned = look(world, last)
    assert not planned.gate_open
    assert target is not None
    assert (target.redis_url, target.database_url, target.schema_ready) == (OLD_REDIS, OLD_DATABASE, True)
    assert (target.bounds.max_replicas, target.suspended) == (3, True)


def test_lost_runs_are_reaped_while_another_secret_is_missing() -> None:
    world, last = running()
    world.secret("api-keys", SecretState(SecretPresence.NO_SECRET), key="api-keys")
    target, planned = look(world, last)
    assert not planned.gate_open
    assert target == last
    assert look(world, None)[0] == last, "the stores are known: a restart changes nothing"


def test_a_spec_that_cannot_be_read_changes_nothing() -> None:
    world, last = running()
    world.change(manifest=None, error="spec.x: is wrong", secrets={}, schema=None, queue=None)
    assert look(world, last)[0] == last
    assert look(world, None)[0] is None


def test_a_successor_does_not_get_the_stores_of_its_predecessor() -> None:
    _, last = running()
    successor = World(now=START)
    successor.secret("redis", SecretState(SecretPresence.NO_SECRET))
    assert look(successor, replace(last, uid="another"))[0] is None


def test_an_unusable_redis_that_is_not_rolled_out_is_not_asked() -> None:
    world, last = running()
    world.secret("redis", present(NEW_REDIS))
    world.change(queue=QueueFact(StoreProblem.TOO_OLD))
    for _ in range(3):
        target, _ = look(world, last)
        assert target == last
