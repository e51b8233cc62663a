"""kube.py against a real API server, and against one that says no."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kube_client import Kube as AdminKube
from kube_front import is_watch, kube_front
from kube_servers import KubeServer
from waiting import eventually

from agentrun.domain.errors import ConfigurationError
from agentrun_operator.kube import (
    Conflict,
    Forbidden,
    Invalid,
    Kube,
    Listing,
    MetadataEvent,
    NotFound,
    Unavailable,
)
from agentrun_operator.kube_config import connection
from agentrun_operator.metrics import API_REQUESTS
from agentrun_operator.resources import CONFIGMAPS, DEPLOYMENTS, SECRETS, Ref


@contextlib.asynccontextmanager
async def connected(kubeconfig: Path, *, seconds: float = 10.0) -> AsyncIterator[Kube]:
    kube = await Kube.connect([kubeconfig], seconds=seconds)
    try:
        yield kube
    finally:
        await kube.aclose()


@pytest.fixture
async def client(api_server: KubeServer) -> AsyncIterator[Kube]:
    async with connected(api_server.kubeconfig) as kube:
        yield kube


@pytest.fixture
async def space(kube: AdminKube) -> AsyncIterator[str]:
    name = f"kube-{time.monotonic_ns()}"
    await kube.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    await kube.delete("namespaces", "", name)


def deployment(**spec: object) -> dict[str, object]:
    labels = {"app": "x"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    return {"spec": {"selector": {"matchLabels": labels}, "template": template, **spec}}


async def test_apply_makes_changes_and_leaves_alone(client: Kube, space: str) -> None:
    ref = Ref(CONFIGMAPS, space, "a")
    made = await client.apply(ref, {"data": {"x": "1", "y": "2"}}, manager="agentrun-operator")
    again = await client.apply(ref, {"data": {"x": "1", "y": "2"}}, manager="agentrun-operator")
    pruned = await client.apply(ref, {"data": {"x": "1"}}, manager="agentrun-operator")

    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert pruned["data"] == {"x": "1"}
    assert await client.get(ref) is not None
    assert await client.get(Ref(CONFIGMAPS, space, "absent")) is None


async def test_create_replace_patch_and_delete_say_conflict(client: Kube, space: str) -> None:
    ref = Ref(CONFIGMAPS, space, "a")
    made = await client.create(ref, {"data": {"x": "1"}})
    with pytest.raises(Conflict) as exists:
        await client.create(ref, {"data": {"x": "1"}})
    await client.merge_patch(ref, {"data": {"x": "2"}})
    with pytest.raises(Conflict) as changed:
        await client.replace(ref, made)
    with pytest.raises(Conflict):
        await client.delete(ref, uid="00000000-0000-0000-0000-000000000000")

    await client.delete(ref, uid=made["metadata"]["uid"])
    await client.delete(ref)

    assert exists.value.reason == "AlreadyExists"
    assert changed.value.reason == "Conflict"
    assert await client.get(ref) is None


async def test_what_is_made_anew_or_named_by_its_uid_touches_nothing_else(client: Kube, space: str) -> None:
    ref, other = Ref(CONFIGMAPS, space, "a"), Ref(CONFIGMAPS, space, "b")
    made = await client.apply(ref, {"data": {"x": "1"}}, manager="m", only_new=True)
    foreign = await client.create(other, {"data": {"y": "theirs"}})
    with pytest.raises(Conflict):
        await client.apply(ref, {"data": {"x": "2"}}, manager="m", only_new=True)
    with pytest.raises(Conflict):
        await client.apply(other, {"data": {"x": "2"}}, manager="m", only_new=True)
    uid = made["metadata"]["uid"]
    with pytest.raises(Conflict):
        await client.apply(other, {"metadata": {"uid": uid}, "data": {"x": "2"}}, manager="m")
    with pytest.raises(Conflict):
        await client.apply(Ref(CONFIGMAPS, space, "absent"), {"metadata": {"uid": uid}, "data": {"x": "2"}}, manager="m")
    changed = await client.apply(ref, {"metadata": {"uid": uid}, "data": {"x": "3"}}, manager="m")

    assert await client.get(other) == foreign
    assert changed["data"] == {"x": "3"}
    assert [(entry["manager"], entry["operation"]) for entry in changed["metadata"]["managedFields"]] == [("m", "Apply")]


async def test_what_is_refused_is_not_tried_again(client: Kube, space: str, api_server: KubeServer) -> None:
    before = _requests()
    with pytest.raises(Invalid, match="field not declared in schema"):
        await client.apply(Ref(DEPLOYMENTS, space, "a"), deployment(nope=1), manager="agentrun-operator")
    with pytest.raises(Invalid, match="Invalid"):
        await client.apply(Ref(DEPLOYMENTS, space, "a"), {"spec": {"replicas": 1}}, manager="agentrun-scaler")
    with pytest.raises(NotFound, match="namespaces"):
        await client.apply(Ref(CONFIGMAPS, "absent", "a"), {"data": {}}, manager="agentrun-operator")
    async with connected(api_server.kubeconfig_of("operator")) as stranger:
        with pytest.raises(Forbidden):
            await stranger.get(Ref(CONFIGMAPS, space, "a"))
    assert _requests() - before == 4


def _requests() -> float:
    """All requests of this process' clients, each try by itself."""
    (family,) = API_REQUESTS.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


async def test_a_list_is_complete_over_its_pages(client: Kube, space: str) -> None:
    for number in range(5):
        await client.create(Ref(CONFIGMAPS, space, f"c{number}"), {"metadata": {"labels": {"odd": str(number % 2)}}})

    everything = await client.list(CONFIGMAPS, namespace=space, limit=2)
    odd = await client.list(CONFIGMAPS, namespace=space, labels="odd=1", limit=1)

    assert [item["metadata"]["name"] for item in everything.items] == ["c0", "c1", "c2", "c3", "c4"]
    assert [item["metadata"]["name"] for item in odd.items] == ["c1", "c3"]
    assert everything.items[0]["kind"] == "ConfigMap"
    assert everything.resource_version


async def test_a_served_group_names_its_kinds(client: Kube) -> None:
    assert "deployments" in await client.served("apps", "v1")
    assert await client.served("nobody.example", "v1") == set()


async def test_a_retry_after_of_429_is_waited_for_or_handed_on(api_server: KubeServer, space: str, tmp_path: Path) -> None:
    async with kube_front(api_server, tmp_path) as front, connected(front.kubeconfig, seconds=120.0) as kube:
        slow = front.answer(lambda request: request.method == "PATCH", 429, headers={"Retry-After": "1"}, times=2)
        began = time.monotonic()
        await kube.apply(Ref(CONFIGMAPS, space, "a"), {"data": {}}, manager="m")
        waited = time.monotonic() - began
        front.answer(lambda request: request.method == "GET", 429, headers={"Retry-After": "30"})
        began = time.monotonic()
        with pytest.raises(Unavailable) as later:
            await kube.get(Ref(CONFIGMAPS, space, "a"))
        handed_on = time.monotonic() - began

    assert slow.count == 2
    assert waited >= 2
    assert later.value.retry_after == 30
    assert handed_on < 30


async def test_short_outages_are_bridged_and_a_post_is_not_repeated(api_server: KubeServer, space: str, tmp_path: Path) -> None:
    async with kube_front(api_server, tmp_path) as front, connected(front.kubeconfig) as kube:
        front.answer(lambda request: request.method == "GET", 500, times=2)
        await kube.get(Ref(CONFIGMAPS, space, "a"))
        posts = front.answer(lambda request: request.method == "POST", 504, times=5)
        with pytest.raises(Unavailable):
            await kube.create(Ref(CONFIGMAPS, space, "a"), {})
    assert posts.count == 1


async def test_an_api_server_that_hangs_or_is_away_is_unavailable(tmp_path: Path, private_api_server: KubeServer) -> None:
    async with connected(private_api_server.kubeconfig, seconds=1.0) as kube:
        await kube.list(CONFIGMAPS)
        await private_api_server.pause()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="no answer"):
            async with asyncio.timeout(30):
                await kube.list(CONFIGMAPS)
        hung = time.monotonic() - began
        await private_api_server.resume()
        await private_api_server.kill()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await kube.list(CONFIGMAPS)
    assert hung > 0.9


async def test_the_metadata_of_secrets_are_followed_without_contents(client: Kube, kube: AdminKube, space: str) -> None:
    await kube.secret(space, "first", password="p1")
    news: list[Listing | MetadataEvent] = []

    async def follow() -> None:
        async for one in client.watch_metadata(SECRETS, namespace=space):
            news.append(one)

    def names() -> list[tuple[str, str]]:
        return [(one.type, one.body["metadata"]["name"]) for one in news if isinstance(one, MetadataEvent)]

    following = asyncio.create_task(follow())
    try:
        await eventually(lambda: news, within=30, what="the list")
        await kube.secret(space, "second", password="p2")
        await kube.secret(space, "second", password="p3")
        await kube.delete("secrets", space, "first")
        await eventually(lambda: len(names()) == 3, within=30, what="three events")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    assert isinstance(news[0], Listing)
    assert [item["metadata"]["name"] for item in news[0].items] == ["first"]
    assert names() == [("ADDED", "second"), ("MODIFIED", "second"), ("DELETED", "first")]
    assert not any("data" in body for one in news for body in (one.items if isinstance(one, Listing) else [one.body]))


@pytest.mark.parametrize("form", ["status", "in the stream"])
async def test_ko_03_an_expired_version_of_the_metadata_watch_lists_anew(
    api_server: KubeServer, kube: AdminKube, space: str, tmp_path: Path, form: str
) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    async with kube_front(api_server, tmp_path) as front, connected(front.kubeconfig) as client:
        if form == "status":
            expired = front.answer(is_watch, 410, body=gone)
        else:
            expired = front.answer(is_watch, 200, body={"type": "ERROR", "object": gone})
        listings = 0
        async with asyncio.timeout(30):
            async for one in client.watch_metadata(SECRETS, namespace=space):
                listings += isinstance(one, Listing)
                if listings == 2:
                    break
    assert expired.count == 1


async def test_a_configuration_that_is_missing_says_what_to_do(tmp_path: Path, api_server: KubeServer) -> None:
    with pytest.raises(ConfigurationError, match="KUBECONFIG"):
        await Kube.connect([tmp_path / "absent"])
    with pytest.raises(ConfigurationError, match="service account"):
        await Kube.connect()
    found = await connection([api_server.kubeconfig])
    assert (found.server, found.token) == (api_server.url, api_server.token)
