"""The objects that an AgentRun should have, in the order in which they are made. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrun_operator.digests import digest
from agentrun_operator.render import config, deployments, job, names, policies, service
from agentrun_operator.render.labels import DESIRED_DIGEST
from agentrun_operator.render.names import SERVING, Component
from agentrun_operator.resources import CHILDREN, NETWORKPOLICIES, PDBS, Ref
from agentrun_operator.situation import Situation

Json = dict[str, Any]


def desired_objects(situation: Situation) -> list[Json]:
    """Everything that runs and what it needs: configuration and policies first."""
    key, uid, manifest = situation.observed.key, situation.observed.uid, situation.manifest
    given = situation.rendered
    bodies = [
        config.config_map(key, situation.pod_config, uid=uid),
        *_network_policies(situation, SERVING),
        *(_network_policies(situation, [Component.MIGRATE]) if situation.applies_migrations else []),
        # What works comes before what takes messages: if the API server refuses one, none are taken that nobody works on.
        deployments.worker(given),
        deployments.scheduler(given),
        deployments.gateway(given),
        service.service(key, manifest, uid=uid),
    ]
    if manifest.spec.gateway.replicas > 1:
        bodies.append(policies.disruption_budget(key, Component.GATEWAY, uid=uid))
    if manifest.spec.workers.max_replicas > 1:
        bodies.append(policies.disruption_budget(key, Component.WORKER, uid=uid))
    return [_noted(body) for body in bodies]


def migration_objects(situation: Situation) -> list[Json]:
    """The Job and its policy."""
    made = job.migration_job(
        situation.observed.key,
        uid=situation.observed.uid,
        template=situation.migration_template,
        mark=situation.migration_mark,
    )
    return [*map(_noted, _network_policies(situation, [Component.MIGRATE])), made]


def names_wanted(situation: Situation) -> frozenset[Ref]:
    """Names that must be free or ours. Those of objects that may be wanted later are among them."""
    spec, key = situation.manifest.spec, situation.observed.key
    unwanted: set[Ref] = set()
    if not spec.network_policy.enabled:
        unwanted |= {names.component(key, part, resource=NETWORKPOLICIES) for part in Component}
    if not situation.applies_migrations:
        unwanted.add(names.component(key, Component.MIGRATE, resource=NETWORKPOLICIES))
    if spec.gateway.replicas <= 1:
        unwanted.add(names.component(key, Component.GATEWAY, resource=PDBS))
    if spec.workers.max_replicas <= 1:
        unwanted.add(names.component(key, Component.WORKER, resource=PDBS))
    return (names.fixed(key) - unwanted) | {situation.config_map}


def ref_of(body: Mapping[str, Any]) -> Ref:
    """Which object a body is of."""
    return Ref(_BY_KIND[body["kind"]], body["metadata"]["namespace"], body["metadata"]["name"])


_BY_KIND = {resource.kind: resource for resource in CHILDREN}


def _noted(body: Json) -> Json:
    """With a digest of all that the operator wants it to be, which tells a changed wish from a change by somebody else."""
    annotations = body["metadata"].setdefault("annotations", {})
    if DESIRED_DIGEST not in annotations:
        annotations[DESIRED_DIGEST] = digest(body)
    return body


def _network_policies(situation: Situation, parts: Sequence[Component]) -> list[Json]:
    if not situation.manifest.spec.network_policy.enabled:
        return []
    return [
        policies.network_policy(
            situation.observed.key,
            situation.manifest,
            part,
            uid=situation.observed.uid,
            store_ports=_store_ports(situation, part),
        )
        for part in parts
    ]


def _store_ports(situation: Situation, part: Component) -> list[int]:
    refs = situation.manifest.spec.store_secrets()
    if part is Component.MIGRATE:
        return policies.ports_of(_value(situation, refs.migration.name, refs.migration.key), default=policies.POSTGRES_PORT)
    return [
        *policies.ports_of(_value(situation, refs.database.name, refs.database.key), default=policies.POSTGRES_PORT),
        *policies.ports_of(_value(situation, refs.redis.name, refs.redis.key), default=policies.REDIS_PORT),
    ]


def _value(situation: Situation, name: str, key: str) -> str:
    state = situation.secret(name, key)
    return state.value if state is not None else ""
