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
    why: Why | None = None
    sample: Sample | None = None
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
    elif sample.demand is None:
        kind = ScalingState.UNKNOWN_DEMAND
    else:
        kind = ScalingState.ACTIVE
    return ScalingFact(kind, state.wanted, counters)


def is_ours(deployment: Body, target: Target) -> bool:
    """Whether a Deployment is this AgentRun's, complete, and not about to go."""
    metadata = deployment["metadata"]
    creating = CREATING in (metadata.get("annotations") or {})
    return is_controlled_by(deployment, target.uid) and not creating and "deletionTimestamp" not in metadata
