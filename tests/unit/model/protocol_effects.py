"""An effect in the model: on record before its outside call, settled after it, and not repeated by an attempt that did not begin it.

The policy is `fail`: whoever finds a row that another attempt has initiated and not settled fails the run, for a person to decide. With
`retry` and `reconcile` the author says what else may happen then.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol_bus import Bus
from protocol_checker import Violation
from protocol_state import BEGUN, CALLED, DONE, FENCED, SETTLED, UNKNOWN, Attempt, State, Step, put, up


class Effects(Bus):
    def effect_steps(self, s: State, q: int, a: Attempt) -> Iterator[Step]:
        p, me = s.places[q], f"P{q} effect:"
        if p.effect == BEGUN:  # a zombie makes it, too: it cannot know
            yield f"{me} outside call", self._call(s, q, f"{me} outside call"), False
        elif a.outcome != "running":
            yield f"{me} fenced", up(s, q, **FENCED), False
        elif p.effect == CALLED:
            yield from self._write(s, q, DONE, SETTLED, f"{me} settled")
        elif s.runs[p.run].effect == DONE:
            yield f"{me} is done", up(s, q, effect=SETTLED), False
        elif self._is_mine(s.runs[p.run].effect, p.epoch):
            yield from self._write(s, q, p.epoch, BEGUN, f"{me} initiated")
        else:
            if s.runs[p.run].effect == p.epoch:
                raise Violation(f"{me} nobody knows", "P11 a run fails by an effect that its own attempt has begun")
            yield f"{me} nobody knows", up(s, q, pc="fail", buffer=(), retry=0, effect=UNKNOWN), False

    def _is_mine(self, row: int, epoch: int) -> bool:
        """Whether the insert, or the row that is there instead, is this very call's."""
        if "any_effect_is_mine" in self.bugs:
            return True
        return row in (0, epoch) if "effect_has_token" in self.rules else row == 0

    def _write(self, s: State, q: int, row: int, then: int, label: str) -> Iterator[Step]:
        """One fenced transaction; the same call is asked for again if its reply was lost."""
        r = s.places[q].run
        n = self.set_run(s, r, label, s.runs[r]._replace(effect=row))
        yield label, up(n, q, effect=then), False
        if s.faults and "lost" in self.scenario.kinds:
            yield label + " (reply LOST)", n._replace(faults=s.faults - 1), True

    @staticmethod
    def _call(s: State, q: int, label: str) -> State:
        run = s.runs[s.places[q].run]
        if not run.effect:
            raise Violation(label, "P8 an outside call without a row")
        if run.called:
            raise Violation(label, "P8 an outside call was made twice")
        return up(s._replace(runs=put(s.runs, s.places[q].run, run._replace(called=True))), q, effect=CALLED)
