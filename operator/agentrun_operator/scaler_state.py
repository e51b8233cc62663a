"""What the scaler keeps of one AgentRun, and what follows from it. No I/O."""

import asyncio
from dataclasses import dataclass, field

from agentrun.control.scaling import Memory, Why
from agentrun_operator.facts import Counters, ScalingFact, ScalingState
from agentrun_operator.render.labels import CREATING
from agentrun_operator.replicas import Body, busy_workers, is_controlled_by
from agentrun_operator.sampler import Sample
from agentrun_operator.targets import Mode, Target


@dataclass(slots=True)
class State:
    """What is known about one AgentRun between two samples."""

    target: Target
    memory: Memory = field(default_factory=Memory)
    wanted: int | None = None
    left_at: int | None = None
    """The replicas after the last look: another number is somebody else's, and worth a look."""
    left_to_others: tuple[str, int] | None = None
    """The version of the Deployment at the last look at it that found nothing to write for those who scale it."""
    why: Why | None = None
    sample: Sample | None = None
    complete: bool = True
    """Whether the sample shows all work: see `is_complete`."""
    born: float = float("-inf")
    """When the group of the stream was made, as far as the samples tell."""
    had_workers: bool = False
    """Whether there were workers at that moment."""
    rival: str | None = None
    """Who else scales the Deployment, as found at the last look at it."""
    rival_at: float = float("-inf")
    costs_out: bool = True
    """Pods may carry costs of ours: of this process, or of one before it."""
    acting: asyncio.Task[None] | None = None
    failures: int = 0
    not_before: float = float("-inf")
    fact: ScalingFact | None = None
    fact_at: float = float("-inf")


_SAME_BIRTH_SECONDS = 1.0


def is_complete(state: State, sample: Sample, *, current: int) -> bool:
    """Whether a sample shows all work. After Redis lost its data it does so only when each living worker has put back its entries, which
    takes less than a lease; where there was no worker (`current`) there is nothing to put back.
    """
    if sample.age_seconds is None or sample.age_seconds >= state.target.limits.lease_seconds:
        return True
    born = sample.at - sample.age_seconds
    if abs(born - state.born) > _SAME_BIRTH_SECONDS:
        state.born, state.had_workers = born, current > 0
    return not state.had_workers


def fact_of(state: State, dead_lettered: int | None) -> ScalingFact:
    """What status shows, as of the newest sample."""
    sample, target = state.sample, state.target
    assert sample is not None
    counters = None
    if sample.demand is not None:
        demand = sample.demand
        counters = Counters(
            demand.undelivered,
            demand.in_flight,
            demand.reclaimable,
            busy_workers(sample.held, target.worker.name),
            dead_lettered,
        )
    if target.mode is Mode.EXTERNAL:
        kind = ScalingState.EXTERNAL
    elif state.rival is not None:
        kind = ScalingState.FOREIGN_SCALER
    elif sample.demand is None or state.why is Why.UNKNOWN:
        kind = ScalingState.UNKNOWN_DEMAND
    else:
        kind = ScalingState.ACTIVE
    return ScalingFact(kind, state.wanted, counters)


def version_of(deployment: Body) -> tuple[str, int]:
    """Which Deployment, and which generation of its spec."""
    return str(deployment["metadata"]["uid"]), int(deployment["metadata"].get("generation", 0))


def is_ours(deployment: Body, target: Target) -> bool:
    """Whether a Deployment is this AgentRun's, complete, and not about to go."""
    metadata = deployment["metadata"]
    creating = CREATING in (metadata.get("annotations") or {})
    return is_controlled_by(deployment, target.uid) and not creating and "deletionTimestamp" not in metadata
