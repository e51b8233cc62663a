"""How many workers are wanted for how much work.

Demand is waiting plus running work, so a busy worker always counts. Up at once; down only after demand has been lower for the whole
stabilization window; to zero only after the cooldown; unknown demand holds what there is. Pure: the caller brings the time and keeps
the memory between two decisions.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Bounds:
    """The admin's wishes, as in spec.workers and spec.scaling. Raises ValueError where they contradict each other."""

    min_replicas: int
    max_replicas: int
    target_per_worker: int
    scale_down_stabilization_seconds: float
    cooldown_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} must be between 0 and max_replicas {self.max_replicas}")
        if self.target_per_worker < 1:
            raise ValueError(f"target_per_worker {self.target_per_worker} must be at least 1")

    def clamp(self, workers: int) -> int:
        """The nearest allowed number of workers."""
        return min(max(workers, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True)
class Memory:
    """What earlier decisions leave behind: wants by time, oldest first and falling, and when there was work last."""

    wants: tuple[tuple[float, int], ...] = ()
    worked_at: float | None = None


class Why(StrEnum):
    """Why a decision is as it is."""

    DEMAND = "demand"
    STABILIZING = "stabilizing"
    COOLING_DOWN = "cooling_down"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers are wanted, why, and the memory for the next decision."""

    workers: int
    why: Why
    memory: Memory


def desired_workers(demand: int | None, *, current: int, bounds: Bounds, now: float, memory: Memory) -> Decision:
    """The number of workers wanted at `now` (seconds on any monotonic clock) while `current` are wanted so far.

    `demand` is the number of runs that wait or are in progress; None if it could not be measured. A memory without any want is one of
    a scaler that has just started: it treats `current` as wanted until now, so a restart never takes a worker away at once.
    """
    if demand is None:
        held = bounds.clamp(current)
        worked_at = now if held else memory.worked_at
        return Decision(held, Why.UNKNOWN, Memory(_remember(memory, held, bounds=bounds, now=now), worked_at))
    want = bounds.clamp(-(-demand // bounds.target_per_worker))
    if not memory.wants:
        memory = Memory(((now, bounds.clamp(current)),), now if current else None)
    wants = _remember(memory, want, bounds=bounds, now=now)
    memory = Memory(wants, now if demand else memory.worked_at)
    stable = max(workers for _, workers in wants)
    workers, why = want, Why.DEMAND
    if want < current and stable > want:
        workers, why = min(bounds.clamp(current), stable), Why.STABILIZING
    if workers == 0 and min(current, bounds.max_replicas) > 0 and _cooling(memory, bounds=bounds, now=now):
        workers, why = 1, Why.COOLING_DOWN
    return Decision(workers, why, memory)


def _remember(memory: Memory, want: int, *, bounds: Bounds, now: float) -> tuple[tuple[float, int], ...]:
    """The wants of the window and the new one, without those that a later, higher one makes irrelevant for the maximum."""
    oldest = now - bounds.scale_down_stabilization_seconds
    return (*((at, old) for at, old in memory.wants if at > oldest and old > want), (now, want))


def _cooling(memory: Memory, *, bounds: Bounds, now: float) -> bool:
    return memory.worked_at is not None and now - memory.worked_at < bounds.cooldown_seconds
