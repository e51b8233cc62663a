"""The names of all keys and channels of one AgentRun, and of the group. No other module builds one.

The hash tag {namespace/name} keeps the keys of an AgentRun in one slot, so that a script may touch several of them.
"""

from dataclasses import dataclass
from uuid import UUID

GROUP = "workers"


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of one AgentRun."""

    namespace: str
    name: str

    @property
    def prefix(self) -> str:
        """What all of them begin with."""
        return f"agentrun:{{{self.namespace}/{self.name}}}:"

    @property
    def runs(self) -> str:
        """The work stream; an entry's field `run` is the id of a run that somebody should work on."""
        return self.prefix + "runs"

    @property
    def entries(self) -> str:
        """The hash from a run's id to its entry in the work stream."""
        return self.prefix + "entries"

    @property
    def born(self) -> str:
        """When the group of the work stream was made, in milliseconds: nothing is known there of what was before."""
        return self.prefix + "born"

    @property
    def wake(self) -> str:
        """The channel on which each publication of work is announced."""
        return self.prefix + "wake"

    def run(self, run_id: UUID) -> str:
        """The stream of a run's events; an entry's id is its number + 1, its field `e` the encoded event."""
        return f"{self.prefix}run:{run_id}"

    def live(self, run_id: UUID) -> str:
        """The channel on which a run's events go out."""
        return f"{self.prefix}live:{run_id}"

    def control(self, consumer: str) -> str:
        """The channel on which one worker is spoken to."""
        return f"{self.prefix}control:{consumer}"
