"""What to do with an entry of the work stream: one table, a column for workers and one for the reaper.

| run                          | worker, new delivery  | reaper, stuck delivery    |
|------------------------------|-----------------------|---------------------------|
| no row, or no run id         | orphan: ack           | orphan: ack               |
| finished                     | ack                   | ack                       |
| pending, head, due           | claim                 | republish                 |
| pending, blocked or not due  | ack                   | ack                       |
| running, lease alive         | ack                   | give back to its owner    |
| running, lease expired       | leave to the reaper   | take over, then republish |

A claim of a run that `runs_alone` waits until its worker holds nothing else; the worker keeps the entry meanwhile.

A blocked run is published when its turn comes, so its entry may go. A worker that meets a run whose lease is alive holds a
duplicate; the reaper that meets one holds the owner's own entry, only untouched for long.
"""

from enum import StrEnum
from typing import Protocol

from agentrun.domain.states import FINAL, RunStatus


class Action(StrEnum):
    """What to do with an entry; also the label of the metric that counts it."""

    ORPHAN = "orphan"
    ACK = "ack"
    CLAIM = "claim"
    LEAVE = "leave"
    REPUBLISH = "republish"
    GIVE_BACK = "give_back"
    TAKE_OVER = "take_over"


class Look(Protocol):
    """The facts about a run, read in one statement by Postgres' clock."""

    @property
    def status(self) -> RunStatus:
        """The run's status."""
        ...

    @property
    def head(self) -> bool:
        """Whether no unfinished run of the session comes before it."""
        ...

    @property
    def due(self) -> bool:
        """Whether not_before is null or past."""
        ...

    @property
    def lease_alive(self) -> bool:
        """Whether the running attempt's lease is not past."""
        ...


def runs_alone(lost: int, *, max_lost_attempts: int) -> bool:
    """Whether a run with so many lost attempts is at its last chance: one more and it is put aside.

    It has a worker for itself then. If that dies, the run did it, and no other run, which may be the one that kills workers, takes
    it along. Earlier attempts share a worker, so that one lost node does not make all of its runs wait for each other. With a
    single attempt every run would be at its last chance, so none is.
    """
    return max_lost_attempts > 1 and lost >= max_lost_attempts - 1


def for_worker(look: Look | None) -> Action:
    """What a worker does with an entry that was just delivered to it; None: it names no run, or one without a row."""
    if look is None:
        return Action.ORPHAN
    if look.status in FINAL:
        return Action.ACK
    if look.status is RunStatus.PENDING:
        return Action.CLAIM if look.head and look.due else Action.ACK
    return Action.ACK if look.lease_alive else Action.LEAVE


def for_reaper(look: Look | None) -> Action:
    """What the reaper does with an entry that was delivered long ago and not touched since."""
    if look is None:
        return Action.ORPHAN
    if look.status in FINAL:
        return Action.ACK
    if look.status is RunStatus.PENDING:
        return Action.REPUBLISH if look.head and look.due else Action.ACK
    return Action.GIVE_BACK if look.lease_alive else Action.TAKE_OVER
