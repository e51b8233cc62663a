"""The conditions of an AgentRun: how they are written down, and when their time moves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from agentrun_operator.reasons import ConditionType, Reason

LONGEST_MESSAGE = 2000
"""What a person reads; the CRD allows more."""


class Status(StrEnum):
    """What a condition says."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One statement. The message says what to do where something is to be done; it holds no counters and no times."""

    type: ConditionType
    status: Status
    reason: Reason
    message: str

    @property
    def true(self) -> bool:
        """Whether the status is True."""
        return self.status is Status.TRUE


def merge(
    old: Iterable[Mapping[str, Any]], new: Sequence[Condition], *, generation: int, now: datetime
) -> tuple[dict[str, Any], ...]:
    """`new` as the API has conditions, in its order. The transition time moves only with the status; a type that is not in `new` goes."""
    before = {str(condition.get("type")): condition for condition in old}
    return tuple(_written(condition, before.get(condition.type), generation, now) for condition in new)


def _written(condition: Condition, old: Mapping[str, Any] | None, generation: int, now: datetime) -> dict[str, Any]:
    same = old is not None and old.get("status") == condition.status
    return {
        "type": condition.type.value,
        "status": condition.status.value,
        "reason": condition.reason.value,
        "message": condition.message[:LONGEST_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": old["lastTransitionTime"]
        if old is not None and same and old.get("lastTransitionTime")
        else stamp(now),
    }


def find(conditions: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """The condition of a type as the API has it."""
    return next((condition for condition in conditions if condition.get("type") == kind), None)


def seconds_since(condition: Mapping[str, Any], now: datetime) -> float:
    """How long a condition has had its status; 0 where its time cannot be read."""
    return _since(condition.get("lastTransitionTime"), now)


def age(body: Mapping[str, Any], now: datetime) -> float:
    """Seconds since an object was made; 0 where its time cannot be read."""
    return _since(body["metadata"].get("creationTimestamp"), now)


def _since(moment: Any, now: datetime) -> float:
    try:
        at = datetime.fromisoformat(str(moment))
    except ValueError:
        return 0.0
    return max((now - at.astimezone(UTC)).total_seconds(), 0.0)


def stamp(now: datetime) -> str:
    """A moment as the API writes it: whole seconds, UTC."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
