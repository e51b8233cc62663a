"""Looks at everything that one AgentRun depends on, and puts it into one value. The only I/O is reading."""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRun
from agentrun_operator.cache import ObjectCache, uid_of
from agentrun_operator.digests import digest
from agentrun_operator.facts import (
    NOTHING_SPENT,
    Object,
    Observed,
    QueueFact,
    ScalingFact,
    SchemaFact,
    SecretPresence,
    SecretState,
    SpendingFact,
)
from agentrun_operator.foreign_names import ForeignNames
from agentrun_operator.jobs import is_complete
from agentrun_operator.kube import Kube
from agentrun_operator.kube_errors import Forbidden, KubeError
from agentrun_operator.lenient import Known, known_agent_run
from agentrun_operator.objects import names_wanted
from agentrun_operator.pod_troubles import may_be_in_trouble, troubles
from agentrun_operator.render.names import instance_of
from agentrun_operator.resources import AGENTRUN_LABEL, AGENTRUNS, CRONTASKS, JOBS, PODS, SECRETS, Key, Ref
from agentrun_operator.situation import WHOLE_SECRET, Defaults, Situation


class Probes(Protocol):
    """What is known about the stores."""

    async def schema(self, key: Key, url: str) -> SchemaFact | None: ...

    async def queue(self, key: Key, url: str) -> QueueFact | None: ...

    def spending(self, url: str) -> SpendingFact: ...

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
        self._foreign = ForeignNames(kube)
        self._migrated: dict[Key, tuple[str, datetime]] = {}
        """The finished migrations, and since when they have been known."""
        self._troubled: dict[Key, tuple[dict[str, str], datetime]] = {}
        """While pods are missing: what they say, and since when."""

    def forget(self, key: Key) -> None:
        """The AgentRun is gone."""
        self._migrated.pop(key, None)
        self._troubled.pop(key, None)

    async def observe(self, key: Key, *, now: datetime, doubted: Ref | None = None) -> Observed | None:
        """None if there is nothing to do for it: it is gone or going. Raises KubeError.

        `doubted`: a name under which there was something else than was seen, so that the API server is asked about every name.
        """
        raw = self._cache.get(Ref(AGENTRUNS, key.namespace, key.name))
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return None
        known, error = _parse(raw)
        seen = _Seen(key.name, uid_of(raw))
        seen.add(self._cache.children(key).items())
        if known is None:
            return Observed(key, raw, None, error, children=seen.ours, scaling=self._scaling(key))
        manifest = known.manifest
        situation = Situation(Observed(key, raw, manifest), self._defaults, now)
        wanted = names_wanted(situation) | ({doubted} if doubted else frozenset())
        await self._look_up(wanted, seen, doubted)
        missing = not wanted <= seen.ours.keys()
        if (seen.remains or doubted or missing) and not await self._is_current(key, seen.uid):
            return None  # the news that it is gone or was replaced is on its way
        secrets = await self._secrets(situation)
        schema, queue = await self._stores(key, manifest, secrets, seen.ours, now)
        refs = manifest.spec.store_secrets()
        database = secrets[(refs.database.name, refs.database.key)]
        found, troubled = await self._troubles(key, seen.ours, now)
        return Observed(
            key,
            raw,
            manifest,
            unknown=known.unknown,
            cron_tasks_served=self._cache.is_served(CRONTASKS),
            children=seen.ours,
            foreign=frozenset(seen.foreign & wanted),
            remains=seen.remains,
            secrets=secrets,
            schema=schema,
            troubles=found,
            troubled_seconds=troubled,
            migrated_seconds=self._migrated_seconds(key, now),
            spending=self._probes.spending(database.value) if database.present else NOTHING_SPENT,
            queue=queue,
            scaling=self._scaling(key),
        )

    async def _look_up(self, wanted: frozenset[Ref], seen: "_Seen", doubted: Ref | None) -> None:
        """Adds what has our names without being a child as far as the watches say: somebody else's, or just made."""
        if doubted is not None:
            asked = wanted
        else:
            for ref in wanted - seen.refs:
                if (body := self._cache.get(ref)) is not None:
                    seen.add([(ref, body)])
            asked = await self._foreign.among(wanted - seen.refs)
        for ref in sorted(asked):
            body = await self._kube.get(ref)
            seen.drop(ref)
            if body is not None:
                seen.add([(ref, body)])

    async def _is_current(self, key: Key, uid: str) -> bool:
        found = await self._kube.get(Ref(AGENTRUNS, key.namespace, key.name))
        return found is not None and uid_of(found) == uid

    async def _troubles(self, key: Key, children: Mapping[Ref, Object], now: datetime) -> tuple[dict[str, str], float]:
        """With the seconds since it was first like this. What is said of pods is worth no failed reconcile."""
        if not may_be_in_trouble(children):
            self._troubled.pop(key, None)
            return {}, 0.0
        known = self._troubled.get(key)
        try:
            listed = await self._kube.list(PODS, namespace=key.namespace, labels=f"{AGENTRUN_LABEL}={instance_of(key.name)}")
            found = troubles(listed.items, children, now=now)
        except KubeError:
            found = known[0] if known else {}
        if known is None or known[0] != found:
            known = self._troubled[key] = (found, now)
        return found, (now - known[1]).total_seconds()

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
        self,
        key: Key,
        manifest: AgentRun,
        secrets: Mapping[tuple[str, str], SecretState],
        children: Mapping[Ref, Object],
        now: datetime,
    ) -> tuple[SchemaFact | None, QueueFact | None]:
        refs = manifest.spec.store_secrets()
        database, redis = secrets[(refs.database.name, refs.database.key)], secrets[(refs.redis.name, refs.redis.key)]
        if database.present:
            self._look_again_after_a_migration(key, database.value, children, now)
        schema = await self._probes.schema(key, database.value) if database.present else None
        queue = await self._probes.queue(key, redis.value) if redis.present else None
        return schema, queue

    def _look_again_after_a_migration(self, key: Key, url: str, children: Mapping[Ref, Object], now: datetime) -> None:
        mark = ",".join(
            sorted(str(job["metadata"]["uid"]) for ref, job in children.items() if ref.resource == JOBS and is_complete(job))
        )
        known, _ = self._migrated.get(key, ("", now))
        if mark != known:
            self._migrated[key] = (mark, now)
            if mark:
                self._probes.invalidate(url)

    def _migrated_seconds(self, key: Key, now: datetime) -> float:
        _, since = self._migrated.get(key, ("", now))
        return (now - since).total_seconds()


class _Seen:
    """Objects with our names or labels, by whose they are."""

    def __init__(self, name: str, uid: str) -> None:
        self.name, self.uid = name, uid
        self.ours: dict[Ref, Object] = {}
        self.foreign: set[Ref] = set()
        self.remains: dict[Ref, Object] = {}

    @property
    def refs(self) -> set[Ref]:
        return {*self.ours, *self.foreign, *self.remains}

    def drop(self, ref: Ref) -> None:
        self.ours.pop(ref, None)
        self.foreign.discard(ref)
        self.remains.pop(ref, None)

    def add(self, items: Iterable[tuple[Ref, dict[str, Any]]]) -> None:
        for ref, body in items:
            owner: dict[str, Any] = next(
                (one for one in body["metadata"].get("ownerReferences") or () if one.get("controller")), {}
            )
            if owner.get("uid") == self.uid:
                self.ours[ref] = body
            elif self._is_predecessor(owner):
                self.remains[ref] = body
            else:
                self.foreign.add(ref)

    def _is_predecessor(self, owner: Mapping[str, Any]) -> bool:
        """An AgentRun of the same name. The label of an object of another one may have been changed by somebody."""
        group = str(owner.get("apiVersion", "")).partition("/")[0]
        return (owner.get("kind"), group, owner.get("name")) == (AGENTRUNS.kind, AGENTRUNS.group, self.name)


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


def _parse(raw: Object) -> tuple[Known[AgentRun] | None, str]:
    """The typed manifest, or why there is none."""
    try:
        known = known_agent_run(raw)
        known.manifest.spec.store_secrets()
    except ManifestError as error:
        return None, str(error)
    return known, ""
