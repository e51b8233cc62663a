"""A cluster of one AgentRun as values: applies plans to it, and does what controllers and kubelets would do. For tests of `plan`."""

import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from agentrun.manifests import agent_run_of
from agentrun_operator.digests import digest
from agentrun_operator.facts import Observed, QueueFact, SchemaFact, SecretPresence, SecretState
from agentrun_operator.plan import Defaults, Plan, plan
from agentrun_operator.reasons import ConditionType
from agentrun_operator.render.names import Component, component
from agentrun_operator.resources import DEPLOYMENTS, JOBS, Key, Ref

KEY = Key("team", "support")
UID = "11111111-1111-1111-1111-111111111111"
START = datetime(2026, 1, 1, tzinfo=UTC)
URLS = {
    ("database", "url"): "postgresql://u:p@db.example:5432/x",
    ("redis", "url"): "redis://redis.example:6379/0",
    ("api-keys", "api-keys"): "{}",
}


def spec(**changes: Any) -> dict[str, Any]:
    """The spec of a small AgentRun; `changes` replace whole members."""
    return {
        "agent": {"model": "demo:chat"},
        "image": "agentrun:1",
        "database": {"secretRef": {"name": "database"}},
        "redis": {"secretRef": {"name": "redis"}},
        "gateway": {"auth": {"keysSecretRef": {"name": "api-keys"}}},
        **changes,
    }


def present(value: str) -> SecretState:
    return SecretState(SecretPresence.PRESENT, value, digest(value))


@dataclass
class World:
    """The cluster. Change it, call `reconcile`, look at it."""

    spec: dict[str, Any] = field(default_factory=spec)
    key: Key = KEY
    now: datetime = START
    observed: Observed = field(init=False)
    defaults: Defaults = field(default_factory=lambda: Defaults("agentrun:default"))
    generation: int = 1
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        raw = {
            "apiVersion": "agentrun.dev/v1alpha1",
            "kind": "AgentRun",
            "metadata": {"name": self.key.name, "namespace": self.key.namespace, "uid": UID, "generation": 1},
            "spec": self.spec,
        }
        self.observed = Observed(
            self.key,
            raw,
            agent_run_of(raw),
            secrets={place: present(value) for place, value in URLS.items()},
            schema=SchemaFact(required=2, present=2, oldest_accepted=1, owner=str(self.key)),
            queue=QueueFact(),
        )

    def change(self, **changes: Any) -> None:
        """Changes what is observed."""
        self.observed = replace(self.observed, **changes)

    def edit(self, **changes: Any) -> None:
        """Changes the spec, as a person does."""
        self.generation += 1
        metadata = {**self.observed.raw["metadata"], "generation": self.generation}
        raw = {**self.observed.raw, "metadata": metadata, "spec": {**self.observed.raw["spec"], **changes}}
        self.change(raw=raw, manifest=agent_run_of(raw))

    def secret(self, name: str, state: SecretState, *, key: str = "url") -> None:
        self.change(secrets={**self.observed.secrets, (name, key): state})

    def schema(self, present: int, *, required: int = 2, oldest_accepted: int = 1) -> None:
        self.change(schema=SchemaFact(required=required, present=present, oldest_accepted=oldest_accepted, owner=str(self.key)))

    def reconcile(self) -> Plan:
        """One plan, carried out."""
        planned = plan(self.observed, now=self.now, defaults=self.defaults)
        self.plans.append(planned)
        children = {ref: body for ref, body in self.observed.children.items() if ref not in {one.ref for one in planned.deletes}}
        for apply in planned.applies:
            children[apply.ref] = _applied(children.get(apply.ref), apply.body, apply.first_replicas, self.now)
        raw = dict(self.observed.raw)
        if planned.status is not None:
            raw["status"] = copy.deepcopy(dict(planned.status))
        self.change(children=children, raw=raw, remains={})
        return planned

    def come_up(self, *, ready: int | None = None) -> None:
        """Controllers and kubelets: Deployments have their pods, `ready` of them ready (None: all)."""
        for ref, body in self.observed.children.items():
            if ref.resource == DEPLOYMENTS:
                wanted = body["spec"].get("replicas", 1)
                up = wanted if ready is None else min(ready, wanted)
                self.set_status(
                    ref,
                    {
                        "observedGeneration": body["metadata"]["generation"],
                        "replicas": wanted,
                        "updatedReplicas": wanted,
                        "readyReplicas": up,
                        "availableReplicas": up,
                    },
                )

    def migrate(self) -> None:
        """Migration Jobs that have not ended do their work."""
        unfinished = [
            ref
            for ref, body in self.observed.children.items()
            if ref.resource == JOBS and not body.get("status", {}).get("conditions")
        ]
        fact = self.observed.schema
        if unfinished and fact is not None:
            present = max(fact.present, fact.required)
            self.change(schema=replace(fact, present=present, owner=fact.owner or str(self.key)))
            self.end_jobs("Complete")

    def end_jobs(self, outcome: str, message: str = "") -> None:
        stamp = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        for ref in self.observed.children:
            if ref.resource == JOBS:
                condition = {"type": outcome, "status": "True", "message": message, "lastTransitionTime": stamp}
                self.set_status(ref, {"conditions": [condition]})

    def set_status(self, ref: Ref, status: dict[str, Any]) -> None:
        self.change(children={**self.observed.children, ref: {**self.observed.children[ref], "status": status}})

    def touch(self, ref: Ref, change: Any) -> None:
        """Somebody changes an object: `change` gets a copy of it."""
        body = copy.deepcopy(dict(self.observed.children[ref]))
        change(body)
        body["metadata"]["generation"] += 1
        self.change(children={**self.observed.children, ref: body})

    def remove(self, ref: Ref) -> None:
        self.change(children={known: body for known, body in self.observed.children.items() if known != ref})

    def scale(self, replicas: int) -> None:
        """As the scaler does it."""
        self.touch(self.deployment(Component.WORKER), lambda body: body["spec"].update(replicas=replicas))

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def settle(self) -> None:
        """Until it is Ready, or nothing changes any more."""
        for _ in range(4):
            self.reconcile()
            self.migrate()
            self.come_up()
        self.reconcile()

    def deployment(self, part: Component) -> Ref:
        return component(self.key, part)

    def condition(self, kind: ConditionType) -> dict[str, Any]:
        conditions = self.observed.raw["status"]["conditions"]
        return next((one for one in conditions if one["type"] == kind), {})

    def says(self, kind: ConditionType) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = self.condition(kind)
        return found.get("status", ""), found.get("reason", "")

    @property
    def jobs(self) -> list[str]:
        return sorted(ref.name for ref in self.observed.children if ref.resource == JOBS)

    def image_of(self, part: Component) -> str:
        template = self.observed.children[self.deployment(part)]["spec"]["template"]
        return str(template["spec"]["containers"][0]["image"])


def _applied(live: Any, body: Any, first_replicas: int | None, now: datetime) -> dict[str, Any]:
    """Server-side apply, as far as it matters here: fields of the body win, replicas stay where the body has none."""
    made = copy.deepcopy(dict(body))
    if live is None:
        made["metadata"] |= {
            "uid": digest(body["metadata"]["name"] + body["kind"]),
            "generation": 1,
            "creationTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if first_replicas is not None:
            made["spec"]["replicas"] = first_replicas
        return made
    if "replicas" in live.get("spec", {}):
        made["spec"].setdefault("replicas", live["spec"]["replicas"])
    same = {name: live.get(name) for name in ("spec", "data")} == {name: made.get(name) for name in ("spec", "data")}
    made["metadata"] |= {
        "uid": live["metadata"]["uid"],
        "generation": live["metadata"]["generation"] + (0 if same else 1),
        "creationTimestamp": live["metadata"]["creationTimestamp"],
    }
    if "status" in live:
        made["status"] = live["status"]
    return made


def settled(**changes: Any) -> World:
    """A world with an AgentRun that is Ready and has been so for a look; `changes` are of its spec."""
    world = World(spec(**changes))
    world.settle()
    assert world.says(ConditionType.READY) == ("True", "Ready"), world.condition(ConditionType.READY)
    world.plans.clear()
    return world


def migrated(**changes: Any) -> World:
    """A world in which only the migration of a new AgentRun has been."""
    world = World(spec(**changes))
    world.reconcile()
    world.migrate()
    return world
