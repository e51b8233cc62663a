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
from agentrun_operator.reasons import ConditionType
from agentrun_operator.render import job, names
from agentrun_operator.render.deployments import Rendered
from agentrun_operator.render.names import Component
from agentrun_operator.resources import JOBS, Ref

WHOLE_SECRET = ""
"""As key of a Secret: all of its keys."""


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
        ]

    def secret(self, name: str, key: str) -> SecretState | None:
        """What was read of it."""
        return self.observed.secrets.get((name, key))

    @cached_property
    def rendered(self) -> Rendered:
        """What Deployments are made from; the stores' secrets are there."""
        refs = self.manifest.spec.store_secrets()
        stores = [self._digest(refs.database.name, refs.database.key), self._digest(refs.redis.name, refs.redis.key)]
        further = [self._digest(ref.name, WHOLE_SECRET) for ref in self.manifest.spec.agent.secret_refs]
        return Rendered(
            self.observed.key,
            self.observed.uid,
            self.manifest,
            image=self.image,
            secrets_digest=digest(stores),
            worker_digest=digest([*stores, *further]),
        )

    @cached_property
    def verdict(self) -> schema_gate.Decision | None:
        """Whether this version may work on the schema; None if that is not known."""
        fact = self.observed.schema
        if fact is None or fact.problem is not None:
            return None
        return schema_gate.decide(required=fact.required, present=fact.present, oldest_accepted=fact.oldest_accepted)

    @cached_property
    def migration_template(self) -> dict[str, Any]:
        """The pods of the migration Job."""
        return job.migration_template(self.observed.key, self.manifest, image=self.image)

    @cached_property
    def migration_mark(self) -> str:
        """What the name of the migration Job ends with."""
        fact, ref = self.observed.schema, self.manifest.spec.store_secrets().migration
        required = fact.required if fact is not None else 0
        return job.fingerprint(self.migration_template, required=required, secret_digest=self._digest(ref.name, ref.key))

    @cached_property
    def migration(self) -> Ref:
        """The migration Job for these pods, this schema and this secret."""
        key = self.observed.key
        return Ref(JOBS, key.namespace, names.migration(key, fingerprint=self.migration_mark))

    def child(self, component: Component) -> Object | None:
        """A component's Deployment."""
        return self.observed.children.get(names.component(self.observed.key, component))

    def drifted(self, ref: Ref, live: Object, desired: Object) -> bool:
        """Whether somebody changed a field that is ours."""
        return ref not in self.observed.rewritten and drifted(live, desired)

    @cached_property
    def old_status(self) -> Mapping[str, Any]:
        """The status as it is."""
        return self.observed.raw.get("status") or {}

    def old_condition(self, kind: ConditionType) -> Mapping[str, Any] | None:
        """A condition as it is."""
        return conditions.find(self.old_status.get("conditions") or (), kind)

    def was_ready(self) -> bool:
        """Whether the present spec was Ready before."""
        old = self.old_condition(ConditionType.READY)
        return (
            old is not None
            and old.get("status") == "True"
            and int(old.get("observedGeneration") or -1) == self.observed.generation
        )

    def _digest(self, name: str, key: str) -> str:
        found = self.secret(name, key)
        return found.digest if found is not None else ""
