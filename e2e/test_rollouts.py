"""Roll-outs while work goes on: a new image, new secrets, a new operator. No run is lost, and none is done twice."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from waiting import eventually

from agentrun.domain import keys
from harness import agents
from harness.gateway import Gateway, text_of
from harness.images import retag
from harness.shop import WORK, Shop
from harness.watching import every_pod

pytestmark = pytest.mark.full

RUNS = 20
SECONDS = 40
"""Longer than it takes until the last old pod has ended: what an agent does in its very last moment there could be done twice."""


async def submit_and_begin(shop: Shop, gateway: Gateway, count: int, seconds: float) -> list[str]:
    """Runs of so many seconds, all of them running."""
    gateway.open()
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: str(gateway.submit(f"{seconds}")["run_id"]), range(count)))
    await eventually(
        lambda: int(shop.psql("SELECT count(*) FROM runs WHERE status = 'running'")) == count, within=60, what="all have begun"
    )
    return runs


async def test_a_new_image_is_rolled_out_during_twenty_long_runs_which_are_handed_back_and_done_once(
    shop: Shop, say: Callable[[str], None]
) -> None:
    second = retag(shop.system, "second")
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 2, "concurrency": 10, "drainSeconds": 2})
    runs = await submit_and_begin(shop, gateway, RUNS, SECONDS)

    shop.change("jobs", image=second)
    shop.ready("jobs", within=180)

    await shop.done(gateway, runs, within=120)
    ended = shop.outcomes()
    say(f"attempts: {ended}")
    assert ended.pop("finished") == RUNS
    assert ended.pop("handed_back") == RUNS, "so long a run does not fit into 2 s of draining"
    assert not ended, "no attempt was lost"
    for part in ("gateway", "worker", "scheduler"):
        assert {pod["spec"]["containers"][0]["image"] for pod in shop.pods("jobs", part)} == {second}


@pytest.mark.parametrize("store", ["database", "redis"])
async def test_a_password_of_a_store_is_changed_during_runs_which_go_on(shop: Shop, store: str) -> None:
    role = shop.namespace.replace("-", "_")
    if store == "database":
        shop.psql(f"CREATE ROLE {role} LOGIN PASSWORD 'old'")
        shop.psql(f'ALTER DATABASE "{shop.namespace}" OWNER TO {role}')
    else:
        shop.system.valkey("ACL", "SETUSER", role, "on", ">old", "~*", "&*", "+@all")
    shop.apply(agents.secret(store, {"url": url_of(shop, store, role, "old")}))
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 2, "concurrency": 4, "drainSeconds": 2})
    before = shop.uids("jobs")
    runs = await submit_and_begin(shop, gateway, 8, 15)

    if store == "database":
        shop.psql(f"ALTER ROLE {role} PASSWORD 'new'")
    else:
        shop.system.valkey("ACL", "SETUSER", role, "resetpass", ">new")
    shop.apply(agents.secret(store, {"url": url_of(shop, store, role, "new")}))

    await eventually(lambda: not set(before) & set(shop.uids("jobs")), within=120, what="all pods are replaced")
    shop.ready("jobs", within=90)
    runs.append(gateway.submit("0.1")["run_id"])
    await shop.done(gateway, runs, within=120)
    assert set(shop.outcomes()) <= {"finished", "handed_back"}, "no attempt was lost"


def url_of(shop: Shop, store: str, role: str, password: str) -> str:
    """Of a store, for a role."""
    if store == "database":
        return shop.database_url(role, password)
    return shop.system.redis_url.replace("redis://", f"redis://{role}:{password}@")


async def test_secrets_of_the_agent_and_of_volumes_are_changed_and_the_pods_that_use_them_roll(shop: Shop) -> None:
    document = agents.agent_run("jobs", {**WORK, "secretRefs": [{"name": "model"}]}, workers={"minReplicas": 1})
    document["spec"]["podTemplate"]["volumes"].append({"name": "files", "secret": {"secretName": "files"}})
    shop.apply(agents.secret("model", {"MODEL_KEY": "old-key"}), agents.secret("files", {"file": "x"}), document)
    shop.ready("jobs", within=90)
    gateway = shop.gateway("jobs")
    before = shop.uids("jobs")
    assert "old-key" in await said(gateway, "env MODEL_KEY")

    shop.apply(agents.secret("model", {"MODEL_KEY": "new-key"}))
    workers = {name for name in before if "-worker-" in name}
    await eventually(lambda: not workers & set(shop.uids("jobs")), within=90, what="the workers are replaced")
    shop.ready("jobs", within=90)
    assert "new-key" in await said(gateway, "env MODEL_KEY")
    assert set(before) - set(shop.uids("jobs")) == workers, "and nobody else"

    shop.apply(agents.secret("files", {"file": "y"}))
    await eventually(lambda: not set(before) & set(shop.uids("jobs")), within=120, what="all pods are replaced")
    shop.ready("jobs", within=90)
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


async def said(gateway: Gateway, message: str) -> str:
    """What the agent answers."""
    return text_of(await gateway.events(str(gateway.submit(message)["run_id"])))


async def test_api_keys_are_rotated_without_a_roll_out(shop: Shop) -> None:
    gateway = shop.agent("jobs", WORK)
    before = shop.uids("jobs")
    key, record = keys.generate(os.urandom(keys.RANDOM_BYTES), user="second", scopes=keys.Scope, created=datetime.now(UTC))
    shop.apply(agents.secret("api-keys", {"api-keys": keys.record_line(record)}))
    for pod in shop.pods("jobs", "gateway"):  # for haste: the kubelet looks at a changed pod at once, and at others each minute
        shop.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", shop.namespace, "look=now")

    second = Gateway(shop.kubectl, shop.namespace, "jobs", key)
    try:
        await eventually(lambda: second.request("GET", "/v1/runs").status_code == 200, within=120, what="the new key is known")
        await eventually(lambda: gateway.request("GET", "/v1/runs").status_code == 401, within=120, what="the old one is not")
        run = second.submit("0.1")["run_id"]
        await eventually(lambda: second.run(run)["status"] == "succeeded", within=60, what="a run under the new key")
    finally:
        second.close()
    assert {name: uid for name, uid in shop.uids("jobs").items() if name in before} == before, "no pod was replaced"


async def test_he_02_a_new_operator_leaves_pods_with_an_image_of_their_own_alone_and_takes_the_others_along(shop: Shop) -> None:
    shop.allowed.operators_replaced = True
    chart, second = shop.system.chart, retag(shop.system, "second")
    shop.system.new_database(f"{shop.namespace}-b")
    shop.apply(agents.secret("database-b", {"url": shop.system.database_url(f"{shop.namespace}-b")}))
    gateway = shop.agent("own", WORK, image=shop.system.image, workers={"minReplicas": 1, "concurrency": 4})
    shop.agent("follows", WORK, database={"secretRef": {"name": "database-b", "key": "url"}}, workers={"minReplicas": 1})
    runs = await submit_and_begin(shop, gateway, 3, 15)
    before, generation = shop.uids("own"), shop.generations("own")
    selectors = {part: selector(shop, f"follows-{part}") for part in ("gateway", "worker", "scheduler")}
    operators = {pod["metadata"]["name"] for pod in chart.operator_pods()}

    with every_pod(shop.kubectl, shop.namespace) as seen:
        await eventually(lambda: seen.created("worker"), within=20, what="the watch has begun")
        chart.install(image=second)
        replaced = {pod["metadata"]["name"] for pod in chart.operator_pods() if "deletionTimestamp" not in pod["metadata"]}
        assert len(replaced) == 2 and not operators & replaced
        await eventually(lambda: second in images_of(shop, "follows"), within=60, what="the other one comes along")
        shop.ready("follows", within=90)
        chart.rollback()
        await eventually(lambda: shop.system.image in images_of(shop, "follows"), within=60, what="and goes back")
        shop.ready("follows", within=90)

        assert shop.uids("own") == before
        assert shop.generations("own") == generation
        assert {name for name in seen.created("worker") if name.startswith("own-")} <= set(before)
    assert {part: selector(shop, f"follows-{part}") for part in selectors} == selectors
    await shop.done(gateway, runs, within=60)
    assert shop.outcomes() == {"finished": 3}


def images_of(shop: Shop, name: str) -> set[str]:
    """The images that the Deployments of an AgentRun ask for."""
    found = shop.kubectl.items("deployments", shop.namespace, labels=f"agentrun.dev/agentrun={name}")
    return {one["spec"]["template"]["spec"]["containers"][0]["image"] for one in found}


def selector(shop: Shop, name: str) -> str:
    """The selector of a Deployment."""
    return json.dumps(shop.kubectl.get("deployment", name, shop.namespace)["spec"]["selector"], sort_keys=True)
