"""The operator's picture of the cluster: events in any order, lists that race with them, and what vanished unseen."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun_operator import sharing
from agentrun_operator.cache import ObjectCache
from agentrun_operator.kube import Keep, Listing
from agentrun_operator.resources import AGENTRUNS, CONFIGMAPS, CRONTASKS, DEPLOYMENTS, SECRETS, Key, Ref, Resource
from agentrun_operator.resync import Resync
from agentrun_operator.secret_watch import secrets_named_in
from agentrun_operator.work_queue import WorkQueue

A = Key("x", "a")


def thing(name: str, *, uid: str = "1", version: str = "1", owner: str | None = None, **more: Any) -> dict[str, Any]:
    labels = {"labels": {"agentrun.dev/agentrun": owner}} if owner else {}
    return {"metadata": {"name": name, "namespace": "x", "uid": uid, "resourceVersion": version, **labels}, **more}


def ref(resource: Resource, name: str) -> Ref:
    return Ref(resource, "x", name)


@pytest.fixture
def cache() -> ObjectCache:
    return ObjectCache()


def test_only_what_differs_is_news(cache: ObjectCache) -> None:
    assert cache.put(AGENTRUNS, thing("a"))
    assert not cache.put(AGENTRUNS, thing("a"))
    assert cache.put(AGENTRUNS, thing("a", version="2"))
    assert cache.remove(ref(AGENTRUNS, "a"), uid="1")
    assert not cache.remove(ref(AGENTRUNS, "a"), uid="1")


def test_children_follow_their_label(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, thing("a-worker", owner="a"))
    cache.put(CONFIGMAPS, thing("a-config", owner="a"))
    cache.put(CONFIGMAPS, thing("stranger"))
    assert set(cache.children(A)) == {ref(DEPLOYMENTS, "a-worker"), ref(CONFIGMAPS, "a-config")}

    cache.put(DEPLOYMENTS, thing("a-worker", owner="b", version="2"))
    cache.remove(ref(CONFIGMAPS, "a-config"))
    assert cache.children(A) == {}
    assert set(cache.children(Key("x", "b"))) == {ref(DEPLOYMENTS, "a-worker")}


def test_what_nobody_reads_is_left_out_and_the_original_is_not_touched(cache: ObjectCache) -> None:
    body = thing("a")
    body["metadata"]["managedFields"] = [{"manager": "m"}]
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "x"}
    cache.put(AGENTRUNS, body)

    kept = cache.get(ref(AGENTRUNS, "a"))
    assert kept is not None and "managedFields" not in kept["metadata"]
    assert kept["metadata"]["annotations"] == {"mine": "x"}
    assert body["metadata"]["managedFields"] and len(body["metadata"]["annotations"]) == 2


def test_ko_13_events_of_an_object_and_its_successor_may_come_in_any_order(cache: ObjectCache) -> None:
    cache.put(AGENTRUNS, thing("a", uid="old"))
    cache.put(AGENTRUNS, thing("a", uid="new"))

    assert not cache.put(AGENTRUNS, thing("a", uid="old", version="9"))
    assert not cache.remove(ref(AGENTRUNS, "a"), uid="old")
    kept = cache.get(ref(AGENTRUNS, "a"))
    assert kept is not None and kept["metadata"]["uid"] == "new"


def test_an_object_that_lost_our_label_and_got_it_back_is_known_again(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, thing("a-worker", owner="a"))
    cache.remove(ref(DEPLOYMENTS, "a-worker"), uid="1")

    assert cache.put(DEPLOYMENTS, thing("a-worker", owner="a", version="3"))


def test_a_list_tells_whose_objects_changed_or_vanished_unseen(cache: ObjectCache) -> None:
    for name, owner in (("a-worker", "a"), ("b-worker", "b"), ("c-worker", "c")):
        cache.put(DEPLOYMENTS, thing(name, owner=owner))

    found = cache.replace_all(DEPLOYMENTS, [thing("a-worker", owner="a"), thing("b-worker", owner="b", version="2")])

    assert found == {Key("x", "b"), Key("x", "c")}
    assert cache.get(ref(DEPLOYMENTS, "c-worker")) is None


def test_a_list_does_not_undo_what_came_while_it_was_made(cache: ObjectCache) -> None:
    cache.put(AGENTRUNS, thing("changed"))
    cache.put(AGENTRUNS, thing("deleted"))
    since = cache.begin_list()
    cache.put(AGENTRUNS, thing("changed", version="3"))
    cache.put(AGENTRUNS, thing("made", uid="9"))
    cache.remove(ref(AGENTRUNS, "deleted"))

    found = cache.replace_all(AGENTRUNS, [thing("changed", version="2"), thing("deleted")], since=since)
    cache.end_list()

    assert found == set()
    assert {one.name: body["metadata"]["resourceVersion"] for one, body in cache.of(AGENTRUNS).items()} == {
        "changed": "3",
        "made": "1",
    }


def test_a_list_of_some_namespaces_says_nothing_about_others(cache: ObjectCache) -> None:
    cache.put(AGENTRUNS, thing("a"))
    cache.replace_all(AGENTRUNS, [], within=lambda one: one.namespace == "y")
    assert cache.agent_runs() == [A]


def version(cache: ObjectCache, name: str = "a-worker") -> str:
    kept = cache.get(ref(DEPLOYMENTS, name))
    return str(kept["metadata"]["resourceVersion"]) if kept else ""


def state(number: str) -> dict[str, Any]:
    return thing("a-worker", owner="a", version=number)


@pytest.mark.parametrize("early", [0, 1, 2, 3])
def test_the_news_of_our_own_writes_are_no_news_early_or_late(cache: ObjectCache, early: int) -> None:
    told = [state(number) for number in ("1", "2", "3")]
    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        assert [cache.put(DEPLOYMENTS, body) for body in told[:early]] == [False] * early
        writing.answers += told
    assert version(cache) == "3"
    assert [cache.put(DEPLOYMENTS, body) for body in told[early:]] == [False] * (3 - early)
    assert version(cache) == "3"
    assert not cache.disturbed(A)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (["theirs", "ours"], "ours"),
        (["ours", "theirs"], "theirs"),
        (["theirs"], "ours"),
        (["before", "theirs", "ours", "later"], "later"),
    ],
)
def test_a_write_by_somebody_else_in_the_middle_of_ours_is_seen(cache: ObjectCache, told: list[str], kept: str) -> None:
    cache.put(DEPLOYMENTS, state("first"))
    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        for number in told:
            cache.put(DEPLOYMENTS, state(number))
        assert version(cache) == "first"
        writing.answers.append(state("ours"))
    assert version(cache) == kept
    assert cache.disturbed(A)
    assert not cache.disturbed(A)


def test_what_is_told_during_a_write_that_changes_nothing_or_fails_is_kept(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, state("1"))
    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        writing.answers.append(state("1"))
        cache.put(DEPLOYMENTS, state("2"))
    assert (version(cache), cache.disturbed(A)) == ("2", True)

    with pytest.raises(OSError), cache.writing(A, ref(DEPLOYMENTS, "a-worker")):
        cache.put(DEPLOYMENTS, state("3"))
        raise OSError
    assert (version(cache), cache.disturbed(A)) == ("3", True)

    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        writing.answers.append(state("3"))
        cache.put(DEPLOYMENTS, state("3"))
    assert (version(cache), cache.disturbed(A)) == ("3", False)


def test_an_object_that_is_deleted_right_after_our_write_is_gone(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, state("1"))
    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        cache.put(DEPLOYMENTS, state("2"))
        assert not cache.remove(ref(DEPLOYMENTS, "a-worker"), uid="1")
        writing.answers.append(state("2"))
    assert cache.get(ref(DEPLOYMENTS, "a-worker")) is None
    assert cache.disturbed(A)


def test_a_list_from_before_our_write_does_not_undo_it(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, state("1"))
    since = cache.begin_list()
    with cache.writing(A, ref(DEPLOYMENTS, "a-worker")) as writing:
        cache.put(DEPLOYMENTS, state("2"))
        cache.replace_all(DEPLOYMENTS, [state("1")], since=since)
        writing.answers.append(state("2"))
    cache.replace_all(DEPLOYMENTS, [state("1")], since=since)
    cache.end_list()
    assert (version(cache), cache.disturbed(A)) == ("2", False)


def test_what_is_known_in_the_same_state_is_told(cache: ObjectCache) -> None:
    cache.put(DEPLOYMENTS, state("1"))
    assert cache.known(DEPLOYMENTS, state("1")) is cache.get(ref(DEPLOYMENTS, "a-worker"))
    assert cache.known(DEPLOYMENTS, state("2")) is None
    assert cache.known(DEPLOYMENTS, thing("a-worker", uid="2")) is None


class Lister:
    """Lists what it is given."""

    def __init__(self, **items: list[dict[str, Any]]) -> None:
        self.items = items
        self.asked: list[tuple[str, str | None, str | None]] = []

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        limit: int = 500,
        keep: Keep = lambda page: page,
    ) -> Listing:
        self.asked.append((resource.plural, namespace, labels))
        return Listing(keep(self.items.get(resource.plural, [])), "1")


async def test_a_full_list_finds_what_the_watches_missed(cache: ObjectCache) -> None:
    runs: WorkQueue[Key] = WorkQueue()
    cron_tasks: WorkQueue[Key] = WorkQueue()
    lister = Lister(agentruns=[thing("a"), thing("b")], deployments=[thing("a-worker", owner="a")], crontasks=[thing("t")])
    resync = Resync(lister, cache, runs=runs, cron_tasks=cron_tasks, jitter=lambda: 1.0)
    await resync.once()
    assert {runs.take(), runs.take(), runs.take()} == {Key("x", "a"), Key("x", "b"), None}
    assert cron_tasks.take() == Key("x", "t")
    for key in runs.handled:
        runs.done(key)

    lister.items = {"agentruns": [thing("a")], "deployments": [], "crontasks": []}
    await resync.once()

    assert {runs.take(), runs.take(), runs.take()} == {Key("x", "a"), Key("x", "b"), None}
    assert len(cron_tasks) == 1  # it is handled still, and waits behind that
    assert ("deployments", None, "app.kubernetes.io/managed-by=agentrun-operator") in lister.asked
    assert ("agentruns", None, None) in lister.asked


async def test_a_full_list_of_chosen_namespaces_asks_for_each(cache: ObjectCache) -> None:
    lister = Lister()
    resync = Resync(lister, cache, runs=WorkQueue(), cron_tasks=WorkQueue(), namespaces=("p", "q"))
    await resync.once()
    assert [namespace for plural, namespace, _ in lister.asked if plural == CRONTASKS.plural] == ["p", "q"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from([0.0, 1.0, "", "a", "1", "x" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "1"]), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=8), st.booleans())
def test_what_is_shared_is_equal_down_to_its_types(values: list[Any], forgetful: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MOST", 2 if forgetful else 1000)
        parts = sharing.Sharing()
        assert [json.dumps(parts.share(value)) for value in values] == [json.dumps(value) for value in values]


def test_equal_parts_of_different_objects_are_kept_once(cache: ObjectCache) -> None:
    for name in ("a-worker", "b-worker"):
        cache.put(DEPLOYMENTS, thing(name, spec={"replicas": len(name), "template": {"containers": [{"image": "i:1"}]}}))

    one, two = cache.of(DEPLOYMENTS).values()
    assert one["spec"]["template"] is two["spec"]["template"]


def test_all_secrets_that_a_spec_names_are_found() -> None:
    spec = {
        "agent": {"secretRefs": [{"name": "tools"}], "model": "demo:chat"},
        "database": {"secretRef": {"name": "database", "key": "url"}, "migrationSecretRef": {"name": "owner"}},
        "gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}},
        "podTemplate": {
            "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "env", "key": "x"}}}],
            "volumes": [{"name": "v", "secret": {"secretName": "volume"}}],
        },
    }
    assert secrets_named_in(spec) == {"tools", "database", "owner", "api-keys", "env", "volume"}
    assert secrets_named_in(None) == set()


def test_paths_are_those_of_the_api_server() -> None:
    assert Ref(SECRETS, "x", "a").path() == "/api/v1/namespaces/x/secrets/a"
    assert DEPLOYMENTS.path() == "/apis/apps/v1/deployments"
    assert Ref(AGENTRUNS, "x", "a").path(subresource="status") == "/apis/agentrun.dev/v1alpha1/namespaces/x/agentruns/a/status"
