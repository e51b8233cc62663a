"""The full list: how often it is made, that it shows its progress, and over what time its consequences are spread."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import eventually

from agentrun_operator import resync as module
from agentrun_operator import secret_watch
from agentrun_operator.cache import ObjectCache
from agentrun_operator.kube import Forbidden, Keep, Listing, MetadataEvent, NotFound, Unavailable
from agentrun_operator.kube_errors import error_of
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, WATCHED, Key, Resource
from agentrun_operator.resync import Resync
from agentrun_operator.work_queue import WorkQueue


class Lister:
    """Lists AgentRuns of these names, and nothing else. Raises `refuses` for its kind."""

    def __init__(self, *names: str, refuses: tuple[Resource, Exception] | None = None) -> None:
        self.names = names
        self.refuses = refuses
        self.begun: list[float] = []

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        limit: int = 500,
        keep: Keep = lambda page: page,
    ) -> Listing:
        if self.refuses is not None and resource == self.refuses[0]:
            raise self.refuses[1]
        if resource == WATCHED[0]:
            self.begun.append(time.monotonic())
        items: list[dict[str, Any]] = [
            {"metadata": {"name": name, "namespace": "x", "uid": name, "resourceVersion": "1"}} for name in self.names
        ]
        return Listing(keep(items if resource == AGENTRUNS else []), "1")


async def test_lists_that_are_asked_for_all_the_time_are_made_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HURRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "HURRY_AGAIN_SECONDS", 0.6)
    lister = Lister()
    resync = Resync(lister, ObjectCache(), runs=WorkQueue(), cron_tasks=WorkQueue())
    task = asyncio.create_task(resync.watch(lambda: None, seconds=60.0))

    def four() -> bool:
        resync.hurry()
        return len(lister.begun) >= 4

    await eventually(four, within=20, what="four lists")
    task.cancel()
    pauses = [later - earlier for earlier, later in zip(lister.begun, lister.begun[1:], strict=False)]
    assert pauses[0] < 0.6, "the first that is asked for is made soon"
    assert min(pauses[1:]) >= 0.55


async def test_each_page_is_progress() -> None:
    stamps = 0

    def stamp() -> None:
        nonlocal stamps
        stamps += 1

    resync = Resync(Lister(), ObjectCache(), runs=WorkQueue(), cron_tasks=WorkQueue(), namespaces=("a", "b"))
    await resync.once(stamp)
    assert stamps == 2 * len(WATCHED)


@pytest.mark.parametrize("refusal", [NotFound("gone"), Forbidden("no right")])
async def test_cron_tasks_that_cannot_be_listed_keep_nothing_else_from_being_listed(refusal: Exception) -> None:
    runs, cache = WorkQueue[Key](), ObjectCache()
    resync = Resync(Lister("a", refuses=(CRONTASKS, refusal)), cache, runs=runs, cron_tasks=WorkQueue())
    await resync.once()
    assert resync.done.is_set()
    assert runs.take() == Key("x", "a")
    assert cache.is_complete(WATCHED[-1]) and not cache.is_complete(CRONTASKS)

    with pytest.raises(Forbidden):
        await Resync(Lister("a", refuses=(AGENTRUNS, Forbidden("no right"))), cache, runs=runs, cron_tasks=WorkQueue()).once()


async def test_what_did_not_change_is_looked_at_over_a_long_time() -> None:
    clock = 0.0
    runs: WorkQueue[Key] = WorkQueue(clock=lambda: clock)
    resync = Resync(
        Lister("a", "b"), ObjectCache(), runs=runs, cron_tasks=WorkQueue(), spread_seconds=150.0, jitter=iter([0.5, 1.0]).__next__
    )
    await resync.once()
    for _ in range(2):
        key = runs.take()
        assert key is not None, "the first time at once"
        runs.done(key)
    await resync.once()
    assert runs.take() is None
    clock = 75.0
    assert runs.take() is not None
    assert runs.take() is None
    clock = 150.0
    assert runs.take() is not None


async def test_a_replica_that_does_not_lead_collects_no_keys() -> None:
    runs: WorkQueue[Key] = WorkQueue()
    runs.add(Key("x", "old"))
    runs.close()
    await Resync(Lister("a", "b"), ObjectCache(), runs=runs, cron_tasks=WorkQueue()).once()
    runs.retry(Key("x", "a"))
    assert (len(runs), runs.take()) == (0, None)
    runs.open()
    runs.add(Key("x", "a"))
    assert runs.take() == Key("x", "a")


async def test_agent_runs_whose_secrets_were_there_before_the_watch_are_looked_at_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secret_watch, "FIRST_SPREAD_SECONDS", 0.0)
    cache, runs = ObjectCache(), WorkQueue[Key]()
    for name in ("here", "missing"):
        metadata = {"name": name, "namespace": "x", "uid": name, "resourceVersion": "1"}
        cache.put(AGENTRUNS, {"metadata": metadata, "spec": {"redis": {"secretRef": {"name": name}}}})

    class Source:
        async def watch_metadata(self, *_: Any, **__: Any) -> AsyncIterator[Listing | MetadataEvent]:
            yield Listing([{"metadata": {"name": "here", "namespace": "x", "resourceVersion": "1"}}], "1")
            raise Unavailable("away")

    with pytest.raises(Unavailable):
        await secret_watch.SecretWatch(Source(), cache, runs, namespace=None, silence=1.0).watch(lambda: None)
    assert (runs.take(), runs.take()) == (Key("x", "here"), None)


def test_credentials_that_are_not_taken_now_may_be_taken_in_a_moment() -> None:
    error = error_of("GET /x", 401, {"reason": "Unauthorized"})
    assert isinstance(error, Unavailable)
    assert isinstance(error_of("GET /x", 403, {"reason": "Forbidden"}), Forbidden)
