"""What people get wrong: `kubectl describe` says it in one line within 30 s, nothing half-made stays, and it heals when it is mended."""

import pytest
from waiting import eventually

from harness import agents
from harness.shop import MADE, WORK, Shop
from harness.system import STORES_NAMESPACE

pytestmark = pytest.mark.full

WITHIN = 30.0
"""Seconds until it is said."""


def made(shop: Shop, kinds: str = MADE) -> list[str]:
    """What there is of the AgentRun `jobs`."""
    return shop.kubectl("get", kinds, "-n", shop.namespace, "-l", "agentrun.dev/agentrun=jobs", "-o", "name").split()


async def heals(shop: Shop, *, within: float = 90) -> None:
    """It becomes Ready without a further touch, and works."""
    shop.ready("jobs", within=within)
    gateway = shop.gateway("jobs")
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)
    gateway.close()


async def test_a_secret_that_is_missing_is_named_with_its_key(shop: Shop) -> None:
    good = shop.kubectl.get("secret", "redis", shop.namespace)["data"]["url"]
    shop.kubectl.delete("secret", "redis", shop.namespace)
    shop.apply(agents.agent_run("jobs", WORK))
    said = await shop.says("jobs", "SecretMissing", within=WITHIN)
    assert "the Secret redis (spec.redis.secretRef) is not there; create it with the key url" in said
    assert made(shop) == []

    shop.apply(agents.secret("redis", {"uri": "redis://x"}))
    said = await shop.says("jobs", "SecretKeyMissing", within=WITHIN)
    assert "has no key url" in said
    assert made(shop) == []

    shop.kubectl("patch", "secret", "redis", "-n", shop.namespace, "--type=merge", "-p", f'{{"data": {{"url": "{good}"}}}}')
    await heals(shop)


async def test_a_database_that_cannot_be_used_is_told_apart_and_heals_by_its_secret_alone(shop: Shop) -> None:
    role = shop.namespace.replace("-", "_")
    shop.psql(f"CREATE ROLE {role} LOGIN PASSWORD 'good-word'")
    shop.psql(f'ALTER DATABASE "{shop.namespace}" OWNER TO {role}')
    right = shop.database_url(role, "good-word")
    wrong = {
        "DatabaseUrlInvalid": "postgres.stores/nothing",
        "DatabaseUnreachable": right.replace(f"@postgres.{STORES_NAMESPACE}:5432", f"@nowhere.{STORES_NAMESPACE}:5432"),
        "DatabaseRefused": shop.database_url(role, "bad-word"),
    }
    for number, (reason, url) in enumerate(wrong.items()):
        shop.apply(agents.secret("database", {"url": url}))
        if number == 0:
            shop.apply(agents.agent_run("jobs", WORK))
        said = await shop.says("jobs", reason, within=WITHIN)
        assert "Secret database, key url" in said
        assert "-word" not in said, "a password is never shown"
        assert made(shop) == []
    shop.apply(agents.secret("database", {"url": shop.database_url(role, "good-word").replace(":5432", ":5433")}))
    await shop.says("jobs", "DatabaseUnreachable", within=WITHIN)

    shop.apply(agents.secret("database", {"url": right}))
    await heals(shop)


async def test_a_redis_that_cannot_be_used_is_told_apart_and_heals_by_its_secret_alone(shop: Shop) -> None:
    wrong = {"RedisUrlInvalid": "valkey.stores", "RedisRefused": f"redis://nobody:wrong@valkey.{STORES_NAMESPACE}:6379/0"}
    for number, (reason, url) in enumerate(wrong.items()):
        shop.apply(agents.secret("redis", {"url": url}))
        if number == 0:
            shop.apply(agents.agent_run("jobs", WORK))
        said = await shop.says("jobs", reason, within=WITHIN, kind="QueueReady")
        assert "Secret redis, key url" in said
        assert made(shop, "deployments,services,pods") == []
    shop.apply(agents.secret("redis", {"url": f"redis://nowhere.{STORES_NAMESPACE}:6379/0"}))
    await shop.says("jobs", "RedisUnreachable", within=WITHIN)

    shop.apply(agents.secret("redis", {"url": shop.system.redis_url}))
    await heals(shop)


async def test_stores_that_are_away_are_said_and_come_back_without_a_touch(shop: Shop) -> None:
    shop.kubectl("scale", "-n", STORES_NAMESPACE, "deployment/valkey", "--replicas=0")
    try:
        await eventually(
            lambda: not shop.kubectl.items("pods", STORES_NAMESPACE, labels="app=valkey"), within=60, what="Redis is away"
        )
        shop.apply(agents.agent_run("jobs", WORK))
        await shop.says("jobs", "RedisUnreachable", within=WITHIN)
    finally:
        shop.kubectl("scale", "-n", STORES_NAMESPACE, "deployment/valkey", "--replicas=1")
        shop.kubectl("rollout", "status", "-n", STORES_NAMESPACE, "deployment/valkey", "--timeout=60s", within=90)
    await heals(shop, within=120)


async def test_an_image_that_cannot_be_pulled_is_named_and_leaves_nothing_behind(shop: Shop) -> None:
    missing = "registry.invalid/agents:1"
    shop.apply(agents.agent_run("jobs", WORK, image=missing))
    await eventually(
        lambda: f"the image {missing} cannot be pulled" in shop.condition("jobs", "Ready")[1], within=WITHIN, what="named"
    )
    said = shop.condition("jobs", "Ready")[1]
    assert said in shop.kubectl("describe", "arun", "jobs", "-n", shop.namespace)
    assert made(shop, "deployments,services") == []
    (job,) = made(shop, "jobs")

    shop.change("jobs", image=shop.system.image)
    await heals(shop)
    assert job not in made(shop, "jobs")
    assert all(pod["spec"]["containers"][0]["image"] == shop.system.image for pod in shop.kubectl.items("pods", shop.namespace))

    # An image without a migration of its own: the pods of the former one serve on.
    shop.change("jobs", database={"migrations": "Verify"}, image=missing)
    await eventually(
        lambda: f"the image {missing} cannot be pulled" in shop.condition("jobs", "Ready")[1], within=WITHIN, what="named"
    )
    gateway = shop.gateway("jobs")
    assert gateway.request("GET", "/v1/runs").status_code == 200
    shop.change("jobs", image=shop.system.image)
    await heals(shop)


async def test_secrets_of_the_agent_and_of_volumes_are_named_too(shop: Shop) -> None:
    document = agents.agent_run("jobs", {**WORK, "secretRefs": [{"name": "model"}]})
    document["spec"]["podTemplate"]["volumes"].append({"name": "files", "secret": {"secretName": "files"}})
    shop.apply(document)
    said = await shop.says("jobs", "SecretMissing", within=WITHIN)
    assert "the Secret model (spec.agent.secretRefs)" in said
    shop.apply(agents.secret("model", {"MODEL_KEY": "x"}))
    await eventually(
        lambda: "the Secret files (spec.podTemplate.volumes)" in shop.condition("jobs", "Ready")[1], within=WITHIN, what="named"
    )
    assert made(shop) == []
    shop.apply(agents.secret("files", {"file": "x"}))
    await heals(shop)
