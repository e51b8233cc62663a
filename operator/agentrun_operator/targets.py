"""What following demand needs to know about one AgentRun. Made anew at each reconcile; equal values change nothing."""

from dataclasses import dataclass, field
from enum import StrEnum

from agentrun.bus.keys import Keys
from agentrun.bus.lag import Question
from agentrun.control.scaling import Bounds
from agentrun.maintenance.reaper import Limits
from agentrun.manifests import AgentRun
from agentrun_operator.resources import DEPLOYMENTS, Key, Ref


class Mode(StrEnum):
    """Who sets the number of workers: the operator, or an autoscaler that the admin brings."""

    MANAGED = "Managed"
    EXTERNAL = "External"


@dataclass(frozen=True, slots=True)
class Target:
    """An accepted AgentRun whose secrets are known. `uid` is the object's, so that a successor of the same name is another one.

    `schema_ready` says that the database has a schema that fits and belongs to this AgentRun: only then it is looked into.
    """

    key: Key
    uid: str
    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)
    bounds: Bounds
    limits: Limits
    worker: Ref
    scheduler: Ref
    mode: Mode = Mode.MANAGED
    suspended: bool = False
    schema_ready: bool = False

    @property
    def question(self) -> Question:
        """What Redis is asked for this AgentRun."""
        return Question(Keys(self.key.namespace, self.key.name), int(self.limits.idle_seconds * 1000))


def target_of(
    manifest: AgentRun,
    *,
    uid: str,
    redis_url: str,
    database_url: str,
    worker: str,
    scheduler: str,
    mode: Mode = Mode.MANAGED,
    suspended: bool = False,
    schema_ready: bool = False,
) -> Target:
    """The target of a manifest whose metadata name the object; `worker` and `scheduler` are the names of its Deployments."""
    spec, namespace = manifest.spec, manifest.metadata.namespace
    return Target(
        key=Key(namespace, manifest.metadata.name),
        uid=uid,
        redis_url=redis_url,
        database_url=database_url,
        bounds=Bounds(
            min_replicas=spec.workers.min_replicas,
            max_replicas=spec.workers.max_replicas,
            target_per_worker=spec.scaling.target_per_worker,
            scale_down_stabilization_seconds=spec.scaling.scale_down_stabilization_seconds,
            cooldown_seconds=spec.scaling.cooldown_seconds,
        ),
        limits=Limits(
            lease_seconds=spec.workers.lease_seconds,
            idle_seconds=spec.reaper.idle_seconds,
            interval_seconds=spec.reaper.interval_seconds,
            max_lost_attempts=spec.reaper.max_lost_attempts,
        ),
        worker=Ref(DEPLOYMENTS, namespace, worker),
        scheduler=Ref(DEPLOYMENTS, namespace, scheduler),
        mode=mode,
        suspended=suspended,
        schema_ready=schema_ready,
    )
