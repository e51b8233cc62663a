"""What follows at once from what was observed: the values that several checks and the plan share. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from agentrun.control import schema_gate
from agentrun.manifests import AgentRun
from agentrun_operator import conditions
from agentrun_operator.digests import digest
from agentrun_operator.drift import drifted
from agentrun_operator.facts import Object, Observed, SecretState
from agentrun_operator.jobs import is_at_work, is_complete
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.render import config, job, names
from agentrun_operator.render.deployments import Rendered, mounted_config
from agentrun_operator.render.labels import CONFIG_DIGEST, MIGRATED_DIGEST, REDIS_DIGEST, SECRETS_DIGEST
from agentrun_operator.render.names import SERVING, Component
from agentrun_operator.resources import CONFIGMAPS, JOBS, Ref

WHOLE_SECRET = ""
"""As key of a Secret: all of its keys."""
_STORES_ONLY = (Component.GATEWAY, Component.SCHEDULER)
"""The components whose SECRETS_DIGEST is of the stores alone."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator adds where an AgentRun says nothing."""

    image: str = ""


@dataclass(frozen=True, slots=True)
class SecretUse:
    """A key of a Secret that is needed, and the field that names it."""

    field: str
    name: str
    key: str


@dataclass(frozen=True)
class Situation:
    """One AgentRun at one moment."""

    observed: Observed
    defaults: Defaults
    now: datetime

    @property
    def manifest(self) -> AgentRun:
        """Only where Observed has one."""
        assert self.observed.manifest is not None
        return self.observed.manifest

    @cached_property
    def image(self) -> str:
        """The image of all pods; empty if there is none."""
        return self.manifest.spec.image or self.defaults.image

    @cached_property
    def secrets_used(self) -> Sequence[SecretUse]:
        """All Secrets that pods cannot start without."""
        spec = self.manifest.spec
        refs = spec.store_secrets()
        own = spec.database.migration_secret_ref
        return [
            SecretUse("spec.database.secretRef", refs.database.name, refs.database.key),
            *([SecretUse("spec.database.migrationSecretRef", own.name, own.key)] if own else []),
            SecretUse("spec.redis.secretRef", refs.redis.name, refs.redis.key),
            SecretUse("spec.gateway.auth.keysSecretRef", refs.api_keys.name, refs.api_keys.key),
            *(SecretUse("spec.agent.secretRefs", ref.name, WHOLE_SECRET) for ref in spec.agent.secret_refs),
            *(
                SecretUse("spec.podTemplate.volumes", volume.secret.secret_name, WHOLE_SECRET)
                for volume in spec.pod_template.volumes
                if volume.secret
            ),
        ]

    def secret(self, name: str, key: str) -> SecretState | None:
        """What was read of it."""
        return self.observed.secrets.get((name, key))

    @cached_property
    def rendered(self) -> Rendered:
        """What Deployments are made from; the stores' secrets are there."""
        stores = self._stores
        further = [self._digest(ref.name, WHOLE_SECRET) for ref in self.manifest.spec.agent.secret_refs]
        mounted = [
            self._digest(one.secret.secret_name, WHOLE_SECRET) for one in self.manifest.spec.pod_template.volumes if one.secret
        ]
        return Rendered(
            self.observed.key,
            self.observed.uid,
            self.manifest,
            image=self.image,
            secrets_digest=digest(stores),
            worker_digest=digest([*stores, *further]),
            volumes_digest=digest(mounted) if mounted else "",
            config_digests=self.pod_config.digests,
            configs=self.configs,
            notes={MIGRATED_DIGEST: self._migrated_digest, REDIS_DIGEST: stores[1]},
        )

    @cached_property
    def _stores(self) -> list[str]:
        """Digests of the URLs of database and Redis."""
        refs = self.manifest.spec.store_secrets()
        return [self._digest(ref.name, ref.key) for ref in (refs.database, refs.redis)]

    @cached_property
    def pod_config(self) -> config.PodConfig:
        """What pods read of the manifest."""
        return config.PodConfig.of(self.manifest)

    @cached_property
    def config_map(self) -> Ref:
        """The ConfigMap for it."""
        return config.ref_of(self.observed.key, self.pod_config)

    @cached_property
    def configs(self) -> Mapping[Component, str]:
        """The name of the ConfigMap for each component: what its pods have, as long as nothing has changed that they read."""
        newest = self.config_map.name
        return {part: self._config_kept(part) or newest for part in SERVING}

    @cached_property
    def configs_mounted(self) -> frozenset[str]:
        """The names of the ConfigMaps that Deployments have in their templates now."""
        deployments = filter(None, map(self.child, SERVING))
        return frozenset(filter(None, map(mounted_config, deployments)))

    def _config_kept(self, part: Component) -> str | None:
        live = self.child(part)
        name = mounted_config(live) if live is not None else None
        found = self.observed.children.get(Ref(CONFIGMAPS, self.observed.key.namespace, name)) if name else None
        if live is None or found is None or not found.get("immutable") or "deletionTimestamp" in found["metadata"]:
            return None
        noted = (live["spec"]["template"]["metadata"].get("annotations") or {}).get(CONFIG_DIGEST)
        return name if noted == self.pod_config.digests[part] else None

    @cached_property
    def verdict(self) -> schema_gate.Decision | None:
        """Whether this version may work on the schema; None if that is not known.

        Also a database that is not reserved yet needs a migration: as long as it is nobody's, a second AgentRun could take it.
        """
        fact = self.observed.schema
        if fact is None or fact.problem is not None:
            return None
        decision = schema_gate.decide(required=fact.required, present=fact.present, oldest_accepted=fact.oldest_accepted)
        if decision.serves and fact.owner is None:
            return schema_gate.Decision(
                schema_gate.Verdict.MIGRATE, "the database is reserved for no AgentRun yet; run: agentrun migrate"
            )
        return decision

    @property
    def schema_fits(self) -> bool:
        """Whether the database has a schema on which this operator may work, and is this AgentRun's."""
        fact, verdict = self.observed.schema, self.verdict
        return fact is not None and verdict is not None and verdict.serves and fact.owner == str(self.observed.key)

    @property
    def applies_migrations(self) -> bool:
        """spec.database.migrations is Apply."""
        return self.manifest.spec.database.migrations == "Apply"

    @cached_property
    def is_migrated(self) -> bool:
        """Whether the present image has migrated the present database. The Job shows it, later the Deployments that followed it."""
        found = self.observed.children.get(self.migration)
        if found is not None and is_complete(found):
            return True
        return any(self._noted(part, MIGRATED_DIGEST) == self._migrated_digest for part in SERVING)

    @cached_property
    def _migrated_digest(self) -> str:
        ref = self.manifest.spec.store_secrets().database
        return digest([self.image, self._digest(ref.name, ref.key)])

    @cached_property
    def redis_is_new(self) -> bool:
        """Whether the Secret names another Redis than the one that was rolled out."""
        return any(self._noted(part, REDIS_DIGEST) not in (None, self._stores[1]) for part in SERVING)

    @cached_property
    def stores_in_use(self) -> bool:
        """Whether both stores' Secrets are there and no Deployment has others."""
        if not all(self._stores) or self.redis_is_new:
            return False
        pods = [live["spec"]["template"]["metadata"] for part in _STORES_ONLY if (live := self.child(part)) is not None]
        noted = [(metadata.get("annotations") or {}).get(SECRETS_DIGEST) for metadata in pods]
        return all(one in (None, digest(self._stores)) for one in noted)

    @cached_property
    def migration_template(self) -> dict[str, Any]:
        """The pods of the migration Job."""
        return job.migration_template(self.observed.key, self.manifest, image=self.image)

    @cached_property
    def migration_mark(self) -> str:
        """What the name of the migration Job ends with."""
        fact, refs = self.observed.schema, self.manifest.spec.store_secrets()
        used = [self._digest(ref.name, ref.key) for ref in (refs.database, refs.migration)]
        required = fact.required if fact is not None else 0
        return job.fingerprint(self.migration_template, required=required, secrets_digest=digest(used))

    @cached_property
    def migration(self) -> Ref:
        """The migration Job for these pods, this schema and these secrets."""
        key = self.observed.key
        return Ref(JOBS, key.namespace, names.migration(key, fingerprint=self.migration_mark))

    @property
    def migrates(self) -> bool:
        """Whether there is a Job that brings the schema up to date."""
        return self.migration in self.observed.children or self.migration_at_work is not None

    @cached_property
    def migration_at_work(self) -> Ref | None:
        """Another migration Job that is in the middle of its work: of a former image, secret or spec.podTemplate."""
        for ref, found in sorted(self.observed.children.items()):
            if ref.resource == JOBS and ref != self.migration and is_at_work(found):
                return ref
        return None

    def child(self, component: Component) -> Object | None:
        """A component's Deployment."""
        return self.observed.children.get(names.component(self.observed.key, component))

    def drifted(self, ref: Ref, live: Object, desired: Object) -> bool:
        """Whether somebody changed a field that is ours. Of one object there is one wish in a situation."""
        if ref not in self._drifted:
            self._drifted[ref] = ref not in self.observed.rewritten and drifted(live, desired)
        return self._drifted[ref]

    @cached_property
    def _drifted(self) -> dict[Ref, bool]:
        return {}

    @cached_property
    def old_status(self) -> Mapping[str, Any]:
        """The status as it is."""
        return self.observed.raw.get("status") or {}

    def old_condition(self, kind: ConditionType) -> Mapping[str, Any] | None:
        """A condition as it is."""
        return conditions.find(self.old_status.get("conditions") or (), kind)

    def was_ready(self) -> bool:
        """Whether the present spec was Ready before."""
        old = self._old_of_this_spec(ConditionType.READY)
        return old is not None and old.get("status") == "True"

    def was(self, kind: ConditionType, reason: Reason) -> bool:
        """Whether a condition had that reason before, of the present spec."""
        old = self._old_of_this_spec(kind)
        return old is not None and old.get("reason") == reason

    def _old_of_this_spec(self, kind: ConditionType) -> Mapping[str, Any] | None:
        old = self.old_condition(kind)
        return old if old is not None and int(old.get("observedGeneration") or -1) == self.observed.generation else None

    def _noted(self, part: Component, name: str) -> str | None:
        """An annotation of a Deployment."""
        live = self.child(part)
        return (live["metadata"].get("annotations") or {}).get(name) if live is not None else None

    def _digest(self, name: str, key: str) -> str:
        found = self.secret(name, key)
        return found.digest if found is not None else ""
