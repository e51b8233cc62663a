"""What is gone does not come back into the operator's picture, whatever arrives late."""

from typing import Any

import pytest

from agentrun_operator import cache as cache_module
from agentrun_operator.cache import ObjectCache
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, DEPLOYMENTS, Key, Ref, Resource

A = Key("x", "a")


def state(version: str, *, uid: str = "1", name: str = "a", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "x", "uid": uid, "resourceVersion": version, "labels": labels}}


@pytest.mark.parametrize("resource", [AGENTRUNS, CRONTASKS])
def test_an_answer_after_the_news_of_the_end_brings_nothing_back(resource: Resource) -> None:
    cache, ref = ObjectCache(), Ref(resource, "x", "a")
    cache.put(resource, state("1"))
    assert cache.remove(ref, uid="1")
    assert not cache.put(resource, state("2"))
    with cache.writing(A, ref) as writing:
        writing.answers.append(state("3"))
    assert cache.get(ref) is None
    assert cache.put(resource, state("4", uid="2")), "the next one of that name is another one"


def test_news_of_an_end_come_before_the_first_of_the_object() -> None:
    cache = ObjectCache()
    assert not cache.remove(Ref(AGENTRUNS, "x", "a"), uid="1")
    assert not cache.put(AGENTRUNS, state("1"))


def test_a_list_that_lacks_an_object_does_not_ban_it() -> None:
    cache = ObjectCache()
    cache.put(AGENTRUNS, state("1"))
    cache.replace_all(AGENTRUNS, [])
    assert cache.put(AGENTRUNS, state("1"))


def test_no_more_than_so_many_ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_MOST_REPLACED", 2)
    cache = ObjectCache()
    for uid in ("1", "2", "3"):
        cache.remove(Ref(AGENTRUNS, "x", "a"), uid=uid)
    assert cache.put(AGENTRUNS, state("1", uid="1"))
    assert not cache.put(AGENTRUNS, state("2", uid="3"))


@pytest.mark.parametrize("resource", [AGENTRUNS, DEPLOYMENTS])
def test_a_watch_that_tells_only_the_end_of_what_we_write(resource: Resource) -> None:
    """kopf hands on the last of several events that come at once."""
    cache, ref = ObjectCache(), Ref(resource, "x", "a")
    cache.put(resource, state("1"))
    with cache.writing(A, ref) as writing:
        cache.remove(ref, uid="1")
        writing.answers.append(state("2"))
    assert cache.get(ref) is None
    assert cache.disturbed(A)


def test_a_successor_is_told_during_the_write() -> None:
    cache, ref = ObjectCache(), Ref(AGENTRUNS, "x", "a")
    cache.put(AGENTRUNS, state("1"))
    with cache.writing(A, ref) as writing:
        cache.remove(ref, uid="1")
        cache.put(AGENTRUNS, state("3", uid="2"))
        writing.answers.append(state("2"))
    found = cache.get(ref)
    assert found is not None and found["metadata"]["uid"] == "2"
