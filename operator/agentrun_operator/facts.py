"""What was seen of one AgentRun at one moment: everything that `plan` decides on. Values only, no I/O.

`observe.py` fills it in; `probes.py` and `scaler.py` give their parts of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Any

from agentrun.manifests import AgentRun
from agentrun_operator.resources import Key, Ref

Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""


class SecretPresence(StrEnum):
    """Whether a key of a Secret could be read."""

    PRESENT = "present"
    NO_SECRET = "no_secret"  # noqa: S105
    NO_KEY = "no_key"
    UNKNOWN = "unknown"
    """The API server did not let us read it."""


@dataclass(frozen=True, slots=True)
class SecretState:
    """One key of a Secret. `digest` stands for the value where others may read it."""

    presence: SecretPresence
    value: str = field(default="", repr=False)
    digest: str = ""

    @property
    def present(self) -> bool:
        """Whether there is a value."""
        return self.presence is SecretPresence.PRESENT


class StoreProblem(StrEnum):
    """Why a store cannot be used. Each has one static message: see `checks.py`."""

    UNREACHABLE = "unreachable"
    """No answer within the time limit, or nobody there."""
    REFUSED = "refused"
    """It answered and did not let us in: wrong password, no such database."""
    BAD_URL = "bad_url"
    """The secret's value is not a URL of this kind of store."""
    BAD_CERTIFICATE = "bad_certificate"
    """A file of certificates that the URL names, or that its sslmode needs, cannot be read by the operator."""
    UNTRUSTED = "untrusted"
    """Its certificate is not accepted: another authority, another host, expired."""
    NO_TLS = "no_tls"
    """Postgres: the URL asks for TLS and it speaks none."""
    OTHER_APPLICATION = "other_application"
    """Postgres: the database has tables and none of ours."""
    TOO_OLD = "too_old"
    """Redis below 7.0."""
    EVICTS = "evicts"
    """Redis: maxmemory-policy is not noeviction."""


@dataclass(frozen=True, slots=True)
class SchemaFact:
    """The schema of the AgentRun's database; `present` is 0 for an empty one. With a problem the numbers mean nothing."""

    required: int
    present: int = 0
    oldest_accepted: int = 0
    owner: str | None = None
    """The AgentRun (namespace/name) that the database belongs to."""
    problem: StoreProblem | None = None
    has_schedules: bool = False
    """There are schedules in it, which its scheduler fires."""


@dataclass(frozen=True, slots=True)
class BudgetFact:
    """What a day has spent, in USD."""

    day: date
    spent: Decimal


@dataclass(frozen=True, slots=True)
class SpendingFact:
    """What the days around now have spent, and models of which calls of the last day have no price."""

    days: tuple[BudgetFact, ...] = ()
    unpriced: tuple[str, ...] = ()


NOTHING_SPENT = SpendingFact()


@dataclass(frozen=True, slots=True)
class QueueFact:
    """The AgentRun's Redis, None as problem: it can be used."""

    problem: StoreProblem | None = None


class ScalingState(StrEnum):
    """What the scaler does for this AgentRun."""

    ACTIVE = "active"
    """It follows the demand."""
    UNKNOWN_DEMAND = "unknown_demand"
    """Redis does not tell; the count is held."""
    EXTERNAL = "external"
    """spec.scaling.mode is External."""
    FOREIGN_SCALER = "foreign_scaler"
    """A HorizontalPodAutoscaler or ScaledObject is set on the worker Deployment."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers for status. They change at most every 15 seconds, so that an idle or a busy AgentRun is not rewritten all the time."""

    undelivered: int
    in_flight: int
    reclaimable: int
    busy: int
    dead_lettered: int | None = None


@dataclass(frozen=True, slots=True)
class ScalingFact:
    """The scaler's last decision: `desired` workers, None while it has none."""

    state: ScalingState
    desired: int | None = None
    counters: Counters | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An object that the API server did not take, and what it said."""

    ref: Ref
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """One AgentRun and all that belongs to it."""

    key: Key
    raw: Object
    """The AgentRun as the API server has it."""
    manifest: AgentRun | None
    """The typed manifest; None if it does not fit, then `error` says why."""
    error: str = ""
    unknown: tuple[str, ...] = ()
    """Members of the spec that this operator does not know and leaves out: its CRDs are newer."""
    cron_tasks_served: bool = True
    """False: the API server does not know the kind, so nobody looks after schedules."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that this AgentRun (its uid) controls."""
    foreign: frozenset[Ref] = frozenset()
    """Objects with a name of ours that it does not control."""
    remains: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that a deleted AgentRun of the same name controlled."""
    secrets: Mapping[tuple[str, str], SecretState] = field(default_factory=dict)
    """By (name of the Secret, key)."""
    schema: SchemaFact | None = None
    """None: not asked yet."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """By component, or Job: why its pods do not start, or what they said when they failed. See `pod_troubles.py`."""
    troubled_seconds: float = 0.0
    """For how long this operator has seen pods missing with these troubles, or with none that says why."""
    migrated_seconds: float = 0.0
    """For how long this operator has known that the finished migration Jobs are finished. What it knows of the schema may be older."""
    spending: SpendingFact = NOTHING_SPENT
    queue: QueueFact | None = None
    """None: not asked yet."""
    scaling: ScalingFact | None = None
    """None: the scaler has not looked at it yet."""
    rewritten: frozenset[Ref] = frozenset()
    """Objects that something in the API server (an admission webhook) changes at each of our writes: no drift, and no use in trying."""
    refusal: Refusal | None = None
    """What the API server refused in this same reconcile."""

    @property
    def uid(self) -> str:
        """The AgentRun's uid."""
        return str(self.raw["metadata"]["uid"])

    @property
    def generation(self) -> int:
        """Counts changes of the spec."""
        return int(self.raw["metadata"].get("generation", 0))
