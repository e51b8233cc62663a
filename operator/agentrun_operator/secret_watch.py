"""Notices that a Secret which an AgentRun names appears, changes, or vanishes. Knows names and versions, never contents."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import structlog

from agentrun.maintenance.supervise import Stamp
from agentrun_operator.cache import ObjectCache, key_of, ref_of, version_of
from agentrun_operator.kube import Forbidden, Listing, MetadataEvent
from agentrun_operator.resources import AGENTRUNS, SECRETS, Key, Ref, Resource
from agentrun_operator.work_queue import WorkQueue

FORBIDDEN_SECONDS = 300.0
FIRST_SPREAD_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class MetadataSource(Protocol):
    """What this needs of the API server."""

    def watch_metadata(
        self, resource: Resource, *, namespace: str | None = None, labels: str | None = None, silence: float = 70.0
    ) -> AsyncIterator[Listing | MetadataEvent]: ...


class SecretWatch:
    """Follows the Secrets of one namespace, or of all."""

    def __init__(
        self, source: MetadataSource, cache: ObjectCache, queue: WorkQueue[Key], *, namespace: str | None, silence: float
    ) -> None:
        self._source = source
        self._cache = cache
        self._queue = queue
        self._namespace = namespace
        self._silence = silence
        self._versions: dict[Ref, str] | None = None
        self._named: dict[Ref, tuple[str, frozenset[str]]] = {}

    async def watch(self, stamp: Stamp) -> None:
        """Never returns; raises KubeError. Without the right to list Secrets only the full list notices their changes."""
        while True:
            try:
                async for news in self._source.watch_metadata(SECRETS, namespace=self._namespace, silence=self._silence):
                    self._take(news)
                    stamp()
            except Forbidden as error:
                _log.warning("secrets are not watched", error=str(error))
                await asyncio.sleep(FORBIDDEN_SECONDS)

    def _take(self, news: Listing | MetadataEvent) -> None:
        if isinstance(news, Listing):
            listed = {ref_of(SECRETS, item): version_of(item) for item in news.items}
            known, self._versions = self._versions, listed
            if known is None:
                self._first(listed)
                return
            for ref in known.keys() | listed.keys():
                if known.get(ref) != listed.get(ref):
                    self._changed(ref)
            return
        assert self._versions is not None, "a watch begins with a list"
        ref = ref_of(SECRETS, news.body)
        if news.type == "DELETED":
            self._versions.pop(ref, None)
        else:
            self._versions[ref] = version_of(news.body)
        self._changed(ref)

    def _first(self, listed: Mapping[Ref, str]) -> None:
        """An AgentRun may have been looked at before this list, and its Secret have changed in between: that nobody else would tell."""
        for ref, body in self._cache.of(AGENTRUNS).items():
            names = secrets_named_in(body.get("spec"))
            if any(Ref(SECRETS, ref.namespace, name) in listed for name in names):
                self._queue.add(key_of(ref), after=FIRST_SPREAD_SECONDS * random.random())

    def _changed(self, secret: Ref) -> None:
        known, self._named = self._named, {}
        for ref, body in self._cache.of(AGENTRUNS).items():
            version = version_of(body)
            names = known.get(ref)
            if names is None or names[0] != version:
                names = (version, frozenset(secrets_named_in(body.get("spec"))))
            self._named[ref] = names
            if ref.namespace == secret.namespace and secret.name in names[1]:
                self._queue.add(key_of(ref))


def secrets_named_in(value: Any) -> set[str]:
    """The names of Secrets in a spec: of every member called secretRef, …SecretRef, secretKeyRef, secretRefs or secretName."""
    found: set[str] = set()
    if isinstance(value, list):
        for item in value:
            found |= secrets_named_in(item)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if name == "secretName" and isinstance(member, str):
                found.add(member)
            elif name.lower().endswith(("secretref", "secretrefs", "secretkeyref")):
                for ref in member if isinstance(member, list) else [member]:
                    if isinstance(ref, Mapping) and isinstance(ref.get("name"), str):
                        found.add(ref["name"])
            else:
                found |= secrets_named_in(member)
    return found
