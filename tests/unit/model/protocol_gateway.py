"""The gateway in the model: submissions one by one or two in one transaction, and a canceller.

The client of a session waits for its answer before it submits again, unless the scenario lets clients race.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol_bus import Bus
from protocol_checker import Violation
from protocol_state import FINAL, State, Step, Submission, put

ANSWERED = frozenset(("committed", "done", "rejected"))


def to(s: State, k: int, state: str, value: int = 0) -> State:
    return s._replace(submissions=put(s.submissions, k, Submission(state, value)))


class Gateway(Bus):
    def _may_start(self, s: State, k: int) -> bool:
        sessions = self.scenario.sessions
        if s.submissions[k].state != "new":
            return False
        earlier = (j for j in range(k) if sessions[j] == sessions[k])
        return self.scenario.racing or all(s.submissions[j].state in ANSWERED for j in earlier)

    def submission_steps(self, s: State) -> Iterator[Step]:
        for k, (state, value) in enumerate(s.submissions):
            label = f"submit {k}"
            if self._may_start(s, k):
                yield from self._submit(s, [k])
                yield from self._other_beginnings(s, k)
            elif state == "decided":
                n, answer = self.tx_submit(s, k, label + " commits", key=k, decided=value)
                yield label + " commits", self._answer(n, k, answer), False
            elif state == "retry":
                # the id was made before the first try, and so was a key made of it
                key = k + 100 if "id_made_per_try" in self.bugs else k
                n, answer = self.tx_submit(s, k, label + " again", key=key)
                yield label + " again", self._answer(n, k, answer), False
            elif state == "apart" and self._is_next(s, k):
                position = None if "position_with_insert" in self.rules else value
                n, answer = self.tx_submit(to(s, k, "new"), k, label, key=k, position=position)
                yield label + ", decided by itself", self._answer(n, k, answer), False
                if s.faults and "lost" in self.scenario.kinds and n.runs is not s.runs:
                    yield label + ", decided by itself (reply LOST)", to(n, k, "retry")._replace(faults=s.faults - 1), True
            elif state == "committed":
                session = self.scenario.sessions[k]
                yield f"gateway publishes for {k}", to(self.publish_head(s, session), k, "done"), False
                if s.faults and "crash" in self.scenario.kinds:
                    yield "FAULT the gateway crashes before publishing", to(s, k, "done")._replace(faults=s.faults - 1), True
            if state in ANSWERED and s.faults and "again" in self.scenario.kinds:
                n, answer = self.tx_submit(s, k, f"FAULT submission {k} sent again", key=k)
                if n is not s:  # a replay changes nothing; what was rejected is decided anew
                    n = self._answer(n, k, answer) if state == "rejected" else n
                    yield f"FAULT submission {k} sent again", n._replace(faults=s.faults - 1), True
        if self.scenario.groups:
            for k in range(1, len(s.submissions)):
                for j in range(k):
                    if self._may_start(s, j) and self._may_start(to(s, j, "done"), k):
                        yield from self._submit(s, [j, k])

    def _is_next(self, s: State, k: int) -> bool:
        """Rows of one session that left their group are decided in their order."""
        session, earlier = self.scenario.sessions[k], enumerate(s.submissions[:k])
        waiting = any(x.state == "apart" and self.scenario.sessions[j] == session for j, x in earlier)
        return not waiting or "rows_apart_in_order" not in self.rules

    def _submit(self, s: State, group: Sequence[int]) -> Iterator[Step]:
        """One transaction; what Merge or Reject must decide leaves a group of several."""
        label = f"submit {','.join(map(str, group))}"
        if self.scenario.policy == "Merge" and "effects_after_lock" not in self.rules:
            target = next(iter(self.open_runs(s, self.scenario.sessions[group[0]])[-1:]), -1)
            decided = target if target >= 0 and not s.runs[target].effect else -2
            yield label + " reads the effects", to(s, group[0], "decided", decided), False
            return
        n, lost = s, s
        for k in group:
            session = self.scenario.sessions[k]
            if len(group) > 1 and self.scenario.policy != "Enqueue" and self.open_runs(n, session):
                position = self.next_position(n, self.scenario.sessions, session)
                n, lost = to(n, k, "apart", position), to(lost, k, "apart", position)
                continue
            n, answer = self.tx_submit(n, k, label, key=k)
            n = self._answer(n, k, answer)
            lost = to(lost, k, "retry")
        yield label, n, False
        if s.faults and "lost" in self.scenario.kinds and n.runs is not s.runs:
            lost = n._replace(submissions=lost.submissions, faults=s.faults - 1)
            yield label + " (reply LOST)", lost, True

    def _other_beginnings(self, s: State, k: int) -> Iterator[Step]:
        if "answer_before_commit" in self.bugs and s.faults:
            label = f"FAULT submit {k}: 202, and a crash before the commit"
            yield label, to(s, k, "done")._replace(faults=s.faults - 1), True

    def _answer(self, s: State, k: int, answer: str) -> State:
        """Only a session's head is published."""
        if answer == "rejected":
            return to(s, k, "rejected")
        head = self.head(s, self.scenario.sessions[k])
        return to(s, k, "committed" if head >= 0 and s.runs[head].key == k else "done")

    # ------------------------------------------------------------ cancel run 0
    def cancel_steps(self, s: State) -> Iterator[Step]:
        if s.cancel == "new" and s.runs and s.runs[0].status not in FINAL:
            n = self.take_over(s, 0, "cancelled", "interrupted", "cancel run 0")
            yield "cancel run 0", n._replace(cancel="terminal"), False
            if s.faults and "lost" in self.scenario.kinds:
                yield "cancel run 0 (reply LOST)", n._replace(cancel="again", faults=s.faults - 1), True
        elif s.cancel == "again":
            if s.runs[0].status != "cancelled":
                raise Violation("cancel run 0 again", "P2 a cancelled run is not cancelled")
            yield "cancel run 0 again: it is", s._replace(cancel="terminal"), False
        elif s.cancel in ("terminal", "heads"):
            if s.cancel == "terminal":
                for label, n, fault in self.emits_last(s, 0, "canceller: terminal event to Redis"):
                    yield label, n._replace(cancel="heads"), fault
            else:
                n = self.publish_head(s, s.runs[0].session)
                yield "canceller publishes the next head", n._replace(cancel="done"), False
            if s.faults and "crash" in self.scenario.kinds:
                yield "FAULT the canceller crashes", s._replace(cancel="done", faults=s.faults - 1), True
