"""Looks at everything that one AgentRun depends on, and puts it into one value. The only I/O is reading."""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRun, agent_run_of
from agentrun_operator.cache import ObjectCache, uid_of
from agentrun_operator.checks import job_condition
from agentrun_operator.digests import digest
from agentrun_operator.facts import Object, Observed, QueueFact, ScalingFact, SchemaFact, SecretPresence, SecretState
from agentrun_operator.kube import Kube
from agentrun_operator.kube_errors import Forbidden
from agentrun_operator.objects import names_wanted
from agentrun_operator.resources import AGENTRUNS, JOBS, SECRETS, Key, Ref
from agentrun_operator.situation import WHOLE_SECRET, Defaults, Situation


class Probes(Protocol):
    """What is known about the stores."""

    async def schema(self, key: Key, url: str) -> SchemaFact | None: ...

    async def queue(self, key: Key, url: str) -> QueueFact | None: ...

    def invalidate(self, url: str) -> None: ...


class Observer:
    """Observes AgentRuns. `scaling` gives the scaler's last decision."""

    def __init__(
        self, kube: Kube, cache: ObjectCache, probes: Probes, *, defaults: Defaults, scaling: Callable[[Key], ScalingFact | None]
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._probes = probes
        self._defaults = defaults
        self._scaling = scaling
        self._migrated: dict[Key, str] = {}

    def forget(self, key: Key) -> None:
        """The AgentRun is gone."""
        self._migrated.pop(key, None)

    async def observe(self, key: Key, *, now: datetime) -> Observed | None:
        """None if there is nothing to do for it: it is gone or going. Raises KubeError."""
        raw = self._cache.get(Ref(AGENTRUNS, key.namespace, key.name))
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return None
        manifest, error = _parse(raw)
        seen = _Seen(uid_of(raw))
        seen.add(self._cache.children(key).items())
        if manifest is None:
            return Observed(
                key, raw, None, error, children=seen.ours, foreign=frozenset(seen.foreign), scaling=self._scaling(key)
            )
        situation = Situation(Observed(key, raw, manifest), self._defaults, now)
        for ref in sorted({*names_wanted(situation)} - seen.refs):
            # Not ours as far as the watches say: it may be somebody else's, or just made.
            body = await self._kube.get(ref)
            if body is not None:
                seen.add([(ref, body)])
        if seen.remains and not await self._is_current(key, seen.uid):
            return None  # the news that it was replaced is on its way
        secrets = await self._secrets(situation)
        schema, queue = await self._stores(key, manifest, secrets, seen.ours)
        return Observed(
            key,
            raw,
            manifest,
            children=seen.ours,
            foreign=frozenset(seen.foreign),
            remains=seen.remains,
            secrets=secrets,
            schema=schema,
            queue=queue,
            scaling=self._scaling(key),
        )

    async def _is_current(self, key: Key, uid: str) -> bool:
        found = await self._kube.get(Ref(AGENTRUNS, key.namespace, key.name))
        return found is not None and uid_of(found) == uid

    async def _secrets(self, situation: Situation) -> dict[tuple[str, str], SecretState]:
        """Each Secret is read once. Contents are never kept from one reconcile to the next."""
        read: dict[str, Object | SecretPresence] = {}
        states: dict[tuple[str, str], SecretState] = {}
        for use in situation.secrets_used:
            if use.name not in read:
                read[use.name] = await self._read(Ref(SECRETS, situation.observed.key.namespace, use.name))
            found = read[use.name]
            states[(use.name, use.key)] = (
                SecretState(found) if isinstance(found, SecretPresence) else state_of(found, use.key, salt=situation.observed.uid)
            )
        return states

    async def _read(self, ref: Ref) -> Object | SecretPresence:
        try:
            found = await self._kube.get(ref)
        except Forbidden:
            return SecretPresence.UNKNOWN
        return SecretPresence.NO_SECRET if found is None else found

    async def _stores(
        self, key: Key, manifest: AgentRun, secrets: Mapping[tuple[str, str], SecretState], children: Mapping[Ref, Object]
    ) -> tuple[SchemaFact | None, QueueFact | None]:
        refs = manifest.spec.store_secrets()
        database, redis = secrets[(refs.database.name, refs.database.key)], secrets[(refs.redis.name, refs.redis.key)]
        if database.present:
            self._look_again_after_a_migration(key, database.value, children)
        schema = await self._probes.schema(key, database.value) if database.present else None
        queue = await self._probes.queue(key, redis.value) if redis.present else None
        return schema, queue

    def _look_again_after_a_migration(self, key: Key, url: str, children: Mapping[Ref, Object]) -> None:
        done = sorted(
            str(job["metadata"]["uid"])
            for ref, job in children.items()
            if ref.resource == JOBS and job_condition(job, "Complete")
        )
        mark = ",".join(done)
        if mark and self._migrated.get(key) != mark:
            self._probes.invalidate(url)
        self._migrated[key] = mark


class _Seen:
    """Objects with our names or labels, by whose they are."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.ours: dict[Ref, Object] = {}
        self.foreign: set[Ref] = set()
        self.remains: dict[Ref, str] = {}

    @property
    def refs(self) -> set[Ref]:
        return {*self.ours, *self.foreign, *self.remains}

    def add(self, items: Iterable[tuple[Ref, dict[str, Any]]]) -> None:
        for ref, body in items:
            owner: dict[str, Any] = next(
                (one for one in body["metadata"].get("ownerReferences") or () if one.get("controller")), {}
            )
            if owner.get("uid") == self.uid:
                self.ours[ref] = body
            elif owner.get("kind") == AGENTRUNS.kind and str(owner.get("apiVersion", "")).startswith(f"{AGENTRUNS.group}/"):
                self.remains[ref] = uid_of(body)
            else:
                self.foreign.add(ref)


def state_of(secret: Object, key: str, *, salt: str) -> SecretState:
    """One key of a Secret. The digest is salted, so that equal secrets of two AgentRuns do not look alike."""
    data = secret.get("data") or {}
    if key == WHOLE_SECRET:
        return SecretState(SecretPresence.PRESENT, digest=digest([salt, data]))
    try:
        value = base64.b64decode(data[key], validate=True).decode()
    except (KeyError, binascii.Error, UnicodeDecodeError):
        value = ""
    if not value.strip():
        return SecretState(SecretPresence.NO_KEY)
    return SecretState(SecretPresence.PRESENT, value, digest([salt, value]))


def _parse(raw: Object) -> tuple[AgentRun | None, str]:
    """The typed manifest, or why there is none."""
    try:
        manifest = agent_run_of(raw)
        manifest.spec.store_secrets()
    except ManifestError as error:
        return None, str(error)
    return manifest, ""
