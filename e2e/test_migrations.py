"""Migrations that fail and are mended: what runs serves on, and no pod of the new image is ever created before its schema is there."""

import re

import pytest
from waiting import eventually

from harness import agents
from harness.images import derive
from harness.shop import WORK, Shop
from harness.watching import every_pod

pytestmark = pytest.mark.full

NEXT = "store/migrations/0999_next.sql"
STATEMENT = "ALTER TABLE no_such_table ADD COLUMN extra int"
BROKEN = f"-- Two steps; the second one cannot be done.\nALTER TABLE runs ADD COLUMN extra int;\n{STATEMENT};\n"
MENDED = "ALTER TABLE runs ADD COLUMN extra int;\n"


async def test_mg_04_mg_05_a_migration_fails_old_pods_serve_no_new_pod_is_ever_made_and_a_mended_image_heals(
    shop: Shop,
) -> None:
    broken, mended = derive(shop.system, "broken", {NEXT: BROKEN}), derive(shop.system, "mended", {NEXT: MENDED})
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    before = shop.uids("jobs")
    shop.allowed.error("migrate", 'agentrun: migration 0999_next.sql: relation "no_such_table" does not exist')

    with every_pod(shop.kubectl, shop.namespace) as seen:
        await eventually(lambda: len(seen.created("worker")) == 1, within=20, what="the watch has begun")
        shop.change("jobs", image=broken)
        said = await shop.says("jobs", "MigrationFailed", within=120)
        assert STATEMENT in said and "0999_next.sql" in said
        assert shop.condition("jobs", "Stalled") == ("MigrationFailed", said)
        await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=30)
        assert shop.uids("jobs") == before, "what ran before runs on, and nothing else"
        assert shop.psql("SELECT count(*) FROM information_schema.columns WHERE column_name = 'extra'") == "0"

        shop.change("jobs", image=mended)
        shop.ready("jobs", within=120)
        await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)

        for part in ("gateway", "worker", "scheduler"):
            images = set(seen.created(part).values())
            assert images == {shop.system.image, mended}, f"the watch saw {images} of the {part}"
        assert {shop.system.image, broken, mended} == set(seen.created("migrate").values())

    # MG-05: the schema is one additive step ahead now, and the image before it starts and serves.
    shop.change("jobs", image=shop.system.image)
    shop.ready("jobs", within=120)
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


async def test_mg_04_a_role_without_rights_is_named_and_a_deleted_job_runs_again_when_it_has_them(shop: Shop) -> None:
    role = shop.namespace.replace("-", "_")
    shop.allowed.error("migrate", "agentrun: .*permission denied for schema public")
    shop.psql(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'")
    shop.apply(agents.secret("database", {"url": shop.database_url(role, "weak")}))
    with every_pod(shop.kubectl, shop.namespace) as seen:
        await eventually(seen.pods, within=20, what="the watch has begun")
        shop.apply(agents.agent_run("jobs", WORK))
        said = await shop.says("jobs", "MigrationFailed", within=120)
        assert "permission denied for schema public" in said and "CREATE TABLE IF NOT EXISTS schema_versions" in said
        assert not any(seen.created(part) for part in ("gateway", "worker", "scheduler"))

        shop.psql(f'ALTER DATABASE "{shop.namespace}" OWNER TO {role}')
        shop.kubectl("delete", "jobs", "-n", shop.namespace, "-l", "agentrun.dev/agentrun=jobs", "--wait")
        shop.ready("jobs", within=90)
        assert set(seen.created("worker").values()) <= {shop.system.image}


async def test_mg_04_with_verify_the_condition_has_the_command_and_after_it_the_pods_come(shop: Shop) -> None:
    shop.apply(agents.agent_run("jobs", WORK, database={"migrations": "Verify"}))
    said = await shop.says("jobs", "MigrationNeeded", within=30)
    assert "run: agentrun migrate" in said
    assert shop.pods("jobs", "gateway") == shop.pods("jobs", "migrate") == []

    given = dict(re.findall(r"(AGENTRUN_\w+)=(\S+)", said))
    (secret, key), (image,) = re.findall(r"Secret (\S+), key (\S+)", said)[0], re.findall(r"\(image (\S+)\)", said)
    by_hand(shop, image, given, secret, key)

    shop.ready("jobs", within=90)
    gateway = shop.gateway("jobs")
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


def by_hand(shop: Shop, image: str, variables: dict[str, str], secret: str, key: str) -> None:
    """Runs `agentrun migrate` as a person would, with what the condition said."""
    from_secret = {"name": "DATABASE_URL", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    env = [*({"name": name, "value": value} for name, value in variables.items()), from_secret]
    shop.apply(agents.pod("by-hand", image, ["agentrun", "migrate"], env=env))
    shop.kubectl.wait("pod/by-hand", "jsonpath={.status.phase}=Succeeded", shop.namespace, within=60)
