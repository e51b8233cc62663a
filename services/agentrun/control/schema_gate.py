"""Whether a process may work on the schema that the database has.

Three numbers decide: the version that this code was written for, the version in the database, and the oldest version of code that the
database still accepts (raised by a migration that older code could not live with).
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the schema allows."""

    SERVE = "serve"
    MIGRATE = "migrate"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and a sentence for the admin."""

    verdict: Verdict
    message: str

    @property
    def serves(self) -> bool:
        """Whether a process may work."""
        return self.verdict is Verdict.SERVE


def foreign(*, owner: str | None, agent: str) -> str | None:
    """What is wrong where the database is reserved for another AgentRun (namespace/name) than `agent`; None if it is not."""
    if owner in (None, agent):
        return None
    return f"the database belongs to the AgentRun {owner}; give {agent} a database of its own"


def decide(*, required: int, present: int, oldest_accepted: int) -> Decision:
    """The decision. `present` is 0 for a database that was never migrated; versions count 1, 2, 3…"""
    if present == 0:
        return Decision(Verdict.MIGRATE, "the database has no schema; run: agentrun migrate")
    if present < required:
        what = f"the database has schema {present} and this version needs {required}"
        return Decision(Verdict.MIGRATE, f"{what}; run: agentrun migrate")
    if required < oldest_accepted:
        what = (
            f"the database has schema {present}, which accepts code for schema {oldest_accepted} or newer; this is for {required}"
        )
        return Decision(Verdict.REFUSE, f"{what}; run a newer version of agentrun")
    if present > required:
        return Decision(Verdict.SERVE, f"the database has schema {present}, which accepts code for schema {required}")
    return Decision(Verdict.SERVE, f"the database has schema {present}, as needed")
