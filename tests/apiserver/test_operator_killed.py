"""SIGKILL of the operator's process after each of the writes that bring up, change or replace an AgentRun; a fresh process goes on."""

import asyncio
import contextlib
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kube_client import Document, Kube, agent_run, comes_up, play_kubelet
from kube_servers import KubeServer
from store_servers import Databases
from waiting import eventually, rests

from agentrun.store import cron_tasks
from agentrun.store.pool import create_pool

KINDS = ("deployments", "services", "configmaps", "jobs", "poddisruptionbudgets", "networkpolicies")
TOGETHER = 3
"""AgentRuns that are brought up at the same time, each by an operator of its own."""
MOST = 60


class Life:
    """One AgentRun in a namespace of its own, from its creation to Ready."""

    def __init__(self, kube: Kube, namespace: str, start: Any) -> None:
        self.kube = kube
        self.namespace = namespace
        self.database_url = self.redis_url = ""
        self._start = start

    async def operator(self, lease: str, *, failpoints: str = "", **more: str) -> Any:
        """With a Lease of its own: that of the killed one need not run out. `more` are variables of its environment."""
        environment = {"AGENTRUN_OPERATOR_LEASE": lease, **more}
        return await self._start(self.namespace, environment=environment, failpoints=failpoints, ready=False)

    async def is_ready(self) -> bool:
        """As it is now, not as it was before an edit."""
        await play_kubelet(self.kube, self.namespace, migrates=True)
        found = await self.kube.get("agentruns", self.namespace, "a")
        ready = await self.kube.condition(self.namespace, "a", "Ready")
        return ready is not None and (ready["status"], ready["observedGeneration"]) == ("True", found["metadata"]["generation"])

    async def edit(self, spec: Document) -> None:
        await self.kube.patch("agentruns", self.namespace, "a", {"spec": spec})

    async def killed_after(self, number: int, process: Any, *, done: Callable[[], Awaitable[bool]] | None = None) -> bool:
        """Waits until the operator has killed itself after so many writes. False: it was `done` (Ready) before."""

        async def is_over() -> bool:
            return process.returncode is not None or await (done or self.is_ready)()

        await eventually(is_over, within=60, what=f"it is killed after write {number}, or done")
        assert process.returncode in (None, -9), process.log_tail()
        return process.returncode is not None

    async def objects(self) -> list[tuple[str, Document]]:
        """With their kinds in the plural."""
        mine = "app.kubernetes.io/managed-by=agentrun-operator"
        return [(kind, one) for kind in KINDS for one in await self.kube.list(kind, self.namespace, labels=mine)]

    async def versions(self) -> dict[str, str]:
        found = [*await self.objects(), ("agentruns", await self.kube.get("agentruns", self.namespace, "a"))]
        return {f"{kind}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for kind, one in found}

    async def shape(self) -> Counter[str]:
        """How many objects there are of each kind and name; names without the hash at their end."""
        hashed = re.compile(r"(?<=-config|migrate)-\w+$")
        return Counter(f"{kind}/{hashed.sub('', one['metadata']['name'])}" for kind, one in await self.objects())


@contextlib.asynccontextmanager
async def life(kube: Kube, databases: Databases, redis_url: str, start: Any) -> AsyncIterator[Life]:
    namespace = f"t-{uuid.uuid4().hex[:10]}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    async with databases.migrated() as url:
        await kube.store_secrets(namespace, database_url=url, redis_url=redis_url)
        await kube.create("agentruns", namespace, agent_run("a", workers={"minReplicas": 2}))
        one = Life(kube, namespace, start)
        one.database_url, one.redis_url = url, redis_url
        yield one
        await kube.delete("namespaces", "", namespace)


@pytest.mark.slow
async def test_an_operator_that_is_killed_after_any_of_its_first_writes_leaves_the_rest_to_the_next(
    operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    places = asyncio.Semaphore(TOGETHER)
    async with life(kube, databases, redis_url, operator_process) as undisturbed:
        process = await undisturbed.operator("one")
        await eventually(undisturbed.is_ready, within=180, what="the undisturbed one is Ready")  # waits for the fork server
        expected = await undisturbed.shape()
        process.kill()

    async def killed_after(number: int) -> bool:
        """Whether there were as many writes until it was Ready."""
        async with places, life(kube, databases, redis_url, operator_process) as one:
            first = await one.operator("one", failpoints=f"operator.kube.written=kill@{number}")
            if not await one.killed_after(number, first):
                first.kill()
                return False
            before = {body["metadata"]["uid"] for _, body in await one.objects()}

            second = await one.operator("two")
            await eventually(one.is_ready, within=60, what=f"the next one makes it Ready after write {number}")
            assert await one.shape() == expected, f"after write {number}"
            found = await one.objects()
            assert before <= {body["metadata"]["uid"] for _, body in found}, "what was made is kept"
            (worker,) = [body for kind, body in found if kind == "deployments" and body["metadata"]["name"] == "a-worker"]
            assert worker["spec"]["replicas"] == 2
            assert "agentrun.dev/creating" not in worker["metadata"].get("annotations", {})
            assert second.returncode is None
            second.kill()
            return True

    deaths, more = 0, True
    while more:
        assert deaths < MOST, "it never comes to an end"
        killed = await asyncio.gather(*(killed_after(deaths + number) for number in range(1, TOGETHER + 1)))
        deaths, more = deaths + sum(killed), all(killed)
    assert deaths > len(expected), "each object is a write at least"


BEFORE = {"image": "agentrun:1", "gateway": {"replicas": 2}, "networkPolicy": {"enabled": True}, "workers": {"retries": 3}}
AFTER = {"image": "agentrun:2", "gateway": {"replicas": 1}, "networkPolicy": {"enabled": False}, "workers": {"retries": 7}}
"""A migration, a new ConfigMap, three roll-outs, and objects that are not wanted any more."""


async def uids(one: Life, kind: str) -> dict[str, str]:
    return {body["metadata"]["name"]: body["metadata"]["uid"] for found, body in await one.objects() if found == kind}


@pytest.mark.slow
async def test_an_operator_that_is_killed_after_any_write_of_an_update_leaves_the_rest_to_the_next(
    operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    shapes: list[Counter[str]] = []
    deaths: list[int] = []

    async def lane(number: int) -> None:
        """One AgentRun that is changed and changed back, each time with a kill three writes later."""
        async with life(kube, databases, redis_url, operator_process) as one:
            await one.edit(BEFORE)
            operator = await one.operator("0")
            await eventually(one.is_ready, within=180, what="it is Ready")
            deployments = await uids(one, "deployments")
            before = await settled_shape(one)
            while True:
                operator.kill()
                await one.edit(AFTER)
                operator = await one.operator(f"first-{number}", failpoints=f"operator.kube.written=kill@{number}")
                killed = await one.killed_after(number, operator)
                if killed:
                    deaths.append(number)
                    operator = await one.operator(f"second-{number}")
                await eventually(one.is_ready, within=60, what=f"it is Ready after write {number}")
                shapes.append(await settled_shape(one))
                assert await uids(one, "deployments") == deployments, "changed, not made anew"
                images = {
                    container["image"]
                    for kind, body in await one.objects()
                    if kind == "deployments"
                    for container in body["spec"]["template"]["spec"]["containers"]
                }
                assert images == {"agentrun:2"}
                if not killed:
                    operator.kill()
                    return
                number += TOGETHER
                assert number < MOST, "it never comes to an end"
                await one.edit(BEFORE)
                await eventually(one.is_ready, within=60, what="it is as it was")
                assert await settled_shape(one) == before

    await asyncio.gather(*(lane(number) for number in range(1, TOGETHER + 1)))
    assert all(shape == shapes[0] for shape in shapes), shapes
    assert set(deaths) >= set(range(1, 9)), "a migration, a ConfigMap, three Deployments twice or more, a status"


async def templates(one: Life) -> dict[str, Document]:
    """The pod templates of the Deployments by their names."""
    return {body["metadata"]["name"]: body["spec"]["template"] for kind, body in await one.objects() if kind == "deployments"}


def _named(url: str) -> str:
    """Another URL of the same database."""
    return f"{url}{'&' if '?' in url else '?'}application_name=other"


async def _has_image(one: Life, image: str) -> bool:
    images = {container["image"] for found in (await templates(one)).values() for container in found["spec"]["containers"]}
    return await one.is_ready() and images == {image}


async def _has_a_new_secret(one: Life, former: dict[str, Document]) -> bool:
    """All pods have the same Secrets, and not those that `former` had."""
    digests = [
        {found["metadata"]["annotations"]["agentrun.dev/secrets-digest"] for found in these.values()}
        for these in (await templates(one), former)
    ]
    return await one.is_ready() and len(digests[0]) == 1 and digests[0].isdisjoint(digests[1])


async def _is_suspended(one: Life, suspended: bool) -> bool:
    ready = await one.is_ready()
    found = await one.kube.condition(one.namespace, "a", "Suspended")
    worker = await one.kube.get("deployments", one.namespace, "a-worker")
    if not suspended:
        return ready and found is None and worker["spec"]["replicas"] == 2
    return not ready and found is not None and found["status"] == "True" and worker["spec"]["replicas"] == 0


@dataclass(frozen=True)
class Change:
    """Something that is done to an AgentRun, or undone, and when that is in effect."""

    make: Callable[[Life, bool], Awaitable[object]]
    is_made: Callable[[Life, bool, dict[str, Document]], Awaitable[bool]]
    """With the templates that there were before."""
    writes: int
    """That it takes at least."""


CHANGES = {
    "image": Change(
        lambda one, done: one.edit({"image": "agentrun:2" if done else "agentrun:1"}),
        lambda one, done, _former: _has_image(one, "agentrun:2" if done else "agentrun:1"),
        writes=6,
    ),
    "secret": Change(
        lambda one, done: one.kube.secret(one.namespace, "database", url=_named(one.database_url) if done else one.database_url),
        lambda one, _done, former: _has_a_new_secret(one, former),
        writes=6,
    ),
    "suspend": Change(
        lambda one, done: one.edit({"suspend": done}),
        lambda one, done, _former: _is_suspended(one, done),
        writes=4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHANGES))
async def test_an_operator_that_is_killed_after_any_write_of_one_change_leaves_the_rest_to_the_next(
    name: str, operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    change = CHANGES[name]
    shapes: list[Counter[str]] = []
    deaths: list[int] = []

    async def lane(number: int) -> None:
        """One AgentRun to which it is done and undone, each time with a kill three writes later."""
        async with life(kube, databases, redis_url, operator_process) as one:
            await one.edit({"image": "agentrun:1", "workers": {"minReplicas": 2, "maxReplicas": 3}})
            operator = await one.operator("0")
            await eventually(one.is_ready, within=180, what="it is Ready")
            deployments = await uids(one, "deployments")
            before = await settled_shape(one)
            while True:
                operator.kill()
                former = await templates(one)
                await change.make(one, True)
                operator = await one.operator(f"first-{number}", failpoints=f"operator.kube.written=kill@{number}")
                killed = await one.killed_after(number, operator, done=lambda former=former: change.is_made(one, True, former))
                if killed:
                    deaths.append(number)
                    operator = await one.operator(f"second-{number}")
                await eventually(
                    lambda former=former: change.is_made(one, True, former), within=60, what=f"{name} after {number}"
                )
                shapes.append(await settled_shape(one))
                assert await uids(one, "deployments") == deployments, "changed, not made anew"
                if not killed:
                    operator.kill()
                    return
                number += TOGETHER
                assert number < MOST, "it never comes to an end"
                former = await templates(one)
                await change.make(one, False)
                await eventually(lambda former=former: change.is_made(one, False, former), within=60, what="it is as it was")
                assert await settled_shape(one) == before

    await asyncio.gather(*(lane(number) for number in range(1, TOGETHER + 1)))
    assert all(shape == shapes[0] for shape in shapes), shapes
    assert set(deaths) >= set(range(1, change.writes + 1)), deaths


async def settled_shape(one: Life) -> Counter[str]:
    """What there is, ConfigMaps aside, when nothing waits to be pruned: the ConfigMaps that Deployments mount, and the Job of this image.

    A Deployment that a change does not concern keeps its ConfigMap.
    """

    async def shape() -> Counter[str] | None:
        await one.is_ready()
        objects = await one.objects()
        templates = [body["spec"]["template"]["spec"] for kind, body in objects if kind == "deployments"]
        mounted = {volume["configMap"]["name"] for spec in templates for volume in spec["volumes"] if "configMap" in volume}
        there = {body["metadata"]["name"] for kind, body in objects if kind == "configmaps"}
        found = Counter({name: count for name, count in (await one.shape()).items() if not name.startswith("configmaps/")})
        return found if there == mounted and found["jobs/a-migrate"] == 1 else None

    found = await eventually(shape, within=60, what="what is not wanted any more is gone")
    assert found is not None
    return found


@pytest.mark.slow
async def test_an_operator_that_is_killed_while_a_successor_takes_the_place_of_a_deleted_one(
    operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    deaths: list[int] = []

    async def lane(number: int) -> None:
        async with life(kube, databases, redis_url, operator_process) as one:
            operator = await one.operator("0")
            await eventually(one.is_ready, within=180, what="it is Ready")
            expected = await settled_shape(one)
            while True:
                operator.kill()
                await kube.delete("agentruns", one.namespace, "a")
                made = await kube.create("agentruns", one.namespace, agent_run("a", workers={"minReplicas": 2}))
                operator = await one.operator(f"first-{number}", failpoints=f"operator.kube.written=kill@{number}")
                killed = await one.killed_after(number, operator)
                if killed:
                    deaths.append(number)
                    operator = await one.operator(f"second-{number}")
                await eventually(one.is_ready, within=60, what=f"the successor is Ready after write {number}")
                assert await settled_shape(one) == expected
                owners = {body["metadata"]["ownerReferences"][0]["uid"] for _, body in await one.objects()}
                assert owners == {made["metadata"]["uid"]}
                if not killed:
                    operator.kill()
                    return
                number += TOGETHER
                assert number < MOST, "it never comes to an end"

    await asyncio.gather(*(lane(number) for number in range(1, TOGETHER + 1)))
    assert set(deaths) >= set(range(1, 9)), "a migration, a ConfigMap, three Deployments twice or more, a status"


async def test_a_deletion_takes_no_write_of_the_operator_after_which_it_could_be_killed(
    operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    async with life(kube, databases, redis_url, operator_process) as one:
        operator = await one.operator("one", AGENTRUN_OPERATOR_RESYNC_SECONDS="1")
        await eventually(one.is_ready, within=180, what="it is Ready")
        await rests(one.versions, turns=lambda: full_lists(operator), count=2, within=60, what="what the operator writes")
        before = await writes(operator)
        await kube.delete("agentruns", one.namespace, "a")

        async def gone() -> bool:
            return not await one.objects()

        await eventually(gone, within=60, what="the children are collected")
        lists = await full_lists(operator)

        async def looked() -> bool:
            return await full_lists(operator) >= lists + 3

        await eventually(looked, within=60, what="the operator has looked at all that there is")
        assert await gone()
        assert await writes(operator) == before
        operator.kill()


async def full_lists(operator: Any) -> float:
    return float((await operator.metrics())["agentrun_operator_resync_seconds_count"])


async def writes(operator: Any) -> float:
    """But for those of the Lease, which are PUTs."""
    found = await operator.metrics()
    return sum(found.total("agentrun_operator_api_requests_total", method=method) for method in ("PATCH", "POST", "DELETE"))


TASK_STEPS: dict[str, Document] = {
    "made": {"agentRunRef": {"name": "a"}, "schedule": "0 3 * * *", "input": "report"},
    "edited": {"agentRunRef": {"name": "a"}, "schedule": "30 4 * * *", "input": "report"},
    "moved": {"agentRunRef": {"name": "b"}, "schedule": "30 4 * * *", "input": "report"},
    "deleted": {},
}
"""The spec of a CronTask after each step."""


async def take_step(one: Life, name: str) -> None:
    """An AgentRun's name cannot be changed in a CronTask: one that moves is made anew."""
    spec = TASK_STEPS[name]
    if name == "edited":
        await one.kube.patch("crontasks", one.namespace, "t", {"spec": spec})
        return
    if name != "made":
        await one.kube.delete("crontasks", one.namespace, "t")
    if spec:
        body = {"apiVersion": "agentrun.dev/v1alpha1", "kind": "CronTask", "metadata": {"name": "t"}, "spec": spec}
        await one.kube.create("crontasks", one.namespace, body)


async def rows_of(pools: dict[str, Any]) -> dict[tuple[str, int], tuple[str, str, Any]]:
    """Of each CronTask that is fired, and its generation: by which AgentRun, its schedule, and from when on."""
    found = [
        (agent, row.schedule) for agent, pool in pools.items() for row in await cron_tasks.all_of(pool) if not row.deleted_at
    ]
    rows = {(str(one.uid), one.generation): (agent, json.loads(one.spec)["schedule"], one.slots_from) for agent, one in found}
    assert len(rows) == len(found), f"two databases fire the same: {found}"
    return rows


async def is_told(one: Life, task: Document) -> bool:
    """Whether its status is that of its spec."""
    status = task.get("status") or {}
    minute, hour, *_ = task["spec"]["schedule"].split()
    times = [slot[10:] for slot in status.get("nextScheduleTimes", [])]
    accepted = await one.kube.condition(one.namespace, "t", "Accepted", plural="crontasks")
    generation = task["metadata"]["generation"]
    return (
        accepted is not None
        and (accepted["status"], accepted["observedGeneration"]) == ("True", generation)
        and status["observedGeneration"] == generation
        and times == [f"T{int(hour):02}:{int(minute):02}:00Z"] * 3
    )


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("operator.crontask.stored=kill@1", marks=pytest.mark.slow),
        pytest.param("operator.crontask.stored=kill@2", marks=pytest.mark.slow),
        "operator.kube.written=kill@1",
    ],
)
async def test_an_operator_that_is_killed_while_it_stores_a_crontask_leaves_the_rest_to_the_next(
    point: str, operator_process: Any, crds_applied: KubeServer, kube: Kube, databases: Databases, redis_url: str
) -> None:
    async with life(kube, databases, redis_url, operator_process) as one, databases.migrated() as other:
        pools = {"a": await create_pool(one.database_url, 1), "b": await create_pool(other, 1)}
        await kube.secret(one.namespace, "of-b", url=other)
        await kube.create("agentruns", one.namespace, agent_run("b", database={"secretRef": {"name": "of-b"}}))
        operator = await one.operator("0")
        for name in ("a", "b"):
            await eventually(lambda name=name: comes_up(kube, one.namespace, name), within=180, what=f"{name} is Ready")

        async def is_right() -> bool:
            task, rows = await kube.find("crontasks", one.namespace, "t"), await rows_of(pools)
            if task is None:
                return not rows
            spec, key = task["spec"], (task["metadata"]["uid"], task["metadata"]["generation"])
            wanted = {key: (spec["agentRunRef"]["name"], spec["schedule"])}
            return {found: row[:2] for found, row in rows.items()} == wanted and await is_told(one, task)

        deaths = set()
        for step in TASK_STEPS:
            operator.kill()
            await take_step(one, step)
            operator = await one.operator(f"first-{step}", failpoints=point)
            if await one.killed_after(1, operator, done=is_right):
                deaths.add(step)
                left = await rows_of(pools)
                operator = await one.operator(f"second-{step}")
                await eventually(is_right, within=60, what=f"row and status are right: {step}")
                now = await rows_of(pools)
                assert all(now[key] == left[key] for key in now.keys() & left.keys()), "a row that was right is kept as it is"
        operator.kill()
        for pool in pools.values():
            await pool.close()
        if point == "operator.crontask.stored=kill@1":
            assert deaths >= {"made", "edited", "moved"}, "a status is written only after that"
        assert deaths
