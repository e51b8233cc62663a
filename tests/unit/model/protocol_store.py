"""Postgres in the model: each method is one transaction, or what one decides.

P2, P3, P5, P6, P8 and P9's checks of single transitions are here.
"""

from __future__ import annotations

from typing import Any

from protocol_checker import Violation
from protocol_state import (
    FINAL,
    GONE,
    PAUSED,
    RULES,
    Attempt,
    Event,
    Run,
    Scenario,
    State,
    put,
    reduce_log,
    text_of,
)


class Store:
    """The scenario and the transactions on runs and attempts."""

    def __init__(self, scenario: Scenario) -> None:
        unknown = scenario.without - RULES
        if unknown:
            raise ValueError(f"no such rule: {', '.join(sorted(unknown))}; the rules are {sorted(RULES)}")
        self.scenario = scenario
        self.rules = RULES - scenario.without
        self.bugs = scenario.bugs

    # ------------------------------------------------------------ reading
    @staticmethod
    def head(s: State, session: int) -> int:
        """The session's unfinished run of lowest position, or -1."""
        best = -1
        for r, run in enumerate(s.runs):
            if run.session == session and run.status not in FINAL and (best < 0 or run.position < s.runs[best].position):
                best = r
        return best

    def is_head(self, s: State, r: int) -> bool:
        return self.head(s, s.runs[r].session) == r

    @staticmethod
    def attempt(s: State, r: int, epoch: int) -> Attempt:
        return s.runs[r].attempts[epoch - 1]  # attempts are 1, 2, 3…: only the claim raises the epoch

    # ------------------------------------------------------------ writing
    def set_run(self, s: State, r: int, label: str, run: Run) -> State:
        old = s.runs[r]
        if old.status in FINAL and run.status != old.status:
            raise Violation(label, "P2 a finished run changed its state")
        runs = put(s.runs, r, run)
        if run.status == "running":
            if sum(x.status == "running" and x.session == run.session for x in runs) > 1:
                raise Violation(label, "P6 two running runs in one session")
            if sum(a.outcome == "running" for a in run.attempts) > 1:
                raise Violation(label, "P6 two running attempts of one run")
        return s._replace(runs=runs)

    @staticmethod
    def set_attempt(s: State, r: int, attempt: Attempt) -> State:
        run = s.runs[r]
        attempts = put(run.attempts, attempt.epoch - 1, attempt)
        return s._replace(runs=put(s.runs, r, run._replace(attempts=attempts)))

    @staticmethod
    def append(log: tuple[Event, ...], start: int, events: tuple[Event, ...], label: str) -> tuple[Event, ...]:
        """INSERT … ON CONFLICT DO NOTHING at explicit numbers (what is there is an earlier try of mine)."""
        for seq, event in enumerate(events, start):
            if seq > len(log):
                raise Violation(label, "P3 a hole in the log")
            if seq == len(log):
                log += (event,)
            elif log[seq] != event:
                raise Violation(label, "P3 one seq with two contents")
        return log

    def tx_claim(self, s: State, owner: int, r: int, seen: int, hurt: bool, label: str) -> tuple[State, bool]:
        run = s.runs[r]
        if run.status != "pending" or not run.due or not self.is_head(s, r):
            return s, False
        if "claim_names_epoch" in self.rules and run.epoch != seen:
            return s, False
        checkpoint = (-1, 0)
        if "claim_copies_checkpoint" in self.rules and run.attempts:
            checkpoint = (run.attempts[-1].checkpoint_seq, run.attempts[-1].checkpoint)
        hurt = hurt or (owner != GONE and s.workers[owner // self.scenario.places] == PAUSED)
        reserved = len(run.log) - 1 + self.scenario.reserve
        attempt = Attempt(run.epoch + 1, owner, "running", True, reserved, *checkpoint, hurt)
        attempts = (*run.attempts, attempt)
        run = run._replace(status="running", epoch=run.epoch + 1, attempts=attempts)
        return self.set_run(s, r, label, run), True

    def tx_flush(
        self,
        s: State,
        r: int,
        epoch: int,
        start: int,
        events: tuple[Event, ...],
        reserve: int,
        checkpoint: tuple[int, int] | None,
        label: str,
        fenced: bool = True,
    ) -> tuple[State, bool]:
        """Events, seq_reserved and perhaps a checkpoint. `fenced` False: the planted check before the write."""
        attempt = self.attempt(s, r, epoch)
        if attempt.outcome != "running":
            if fenced:
                return s, False
            raise Violation(label, "P5 a fenced attempt wrote messages")
        if "reserve_never_falls" in self.rules:
            reserve = max(attempt.reserved, reserve)
        attempt = attempt._replace(reserved=reserve)
        if checkpoint:
            attempt = attempt._replace(checkpoint_seq=checkpoint[0], checkpoint=checkpoint[1])
        run = s.runs[r]
        log = self.append(run.log, start, events, label)
        attempts = put(run.attempts, epoch - 1, attempt)
        return self.set_run(s, r, label, run._replace(log=log, attempts=attempts)), True

    def tx_finish(
        self, s: State, r: int, epoch: int, start: int, events: tuple[Event, ...], status: str, label: str, unknown: bool = False
    ) -> tuple[State, bool]:
        """`unknown`: it fails because nobody knows what came of its effect, and is put aside with a dead letter."""
        attempt = self.attempt(s, r, epoch)
        if attempt.outcome != "running":
            return s, False
        if status == "failed" and r != self.scenario.bad_run and not unknown:
            raise Violation(label, "P11 a run failed by the fault of another member of its group")
        run = s.runs[r]
        log = self.append(run.log, start, (*events, Event(epoch, "E", status)), label)
        attempts = put(run.attempts, epoch - 1, attempt._replace(outcome="finished", lease=False))
        s = self.set_run(s, r, label, run._replace(status=status, log=log, attempts=attempts, dead_letter=unknown))
        want = tuple(range(1, self.scenario.tokens + 1))
        if self.scenario.client and r == 0 and not unknown and tuple(t for _, t in text_of(reduce_log(log))) != want:
            raise Violation(label, "P4 the log's text is not the finished answer")
        return s, True

    def take_over(
        self,
        s: State,
        r: int,
        status: str,
        outcome: str,
        label: str,
        *,
        due: bool = True,
        superseded_by: int = -1,
        dead_letter: bool = False,
    ) -> State:
        """End the running attempt, if there is one, close the log, set the new state. The epoch stays."""
        run = s.runs[r]
        ends = status in FINAL
        log, attempts, lost = run.log, run.attempts, run.lost
        if attempts and attempts[-1].outcome == "running":
            a = attempts[-1]
            stored = len(log) - 1
            if "no_voids" not in self.bugs:
                log += (Event(run.epoch, "v", 0),) * (a.reserved - stored)
            log += (Event(run.epoch, "r", stored if ends else a.checkpoint_seq),)
            attempts = (*attempts[:-1], a._replace(outcome=outcome, lease=False))
            if outcome == "lost":
                lost += 1
                if not a.hurt:
                    raise Violation(label, "P10 an attempt whose worker was healthy counts as lost")
        if ends:
            log += (Event(run.epoch, "E", status),)
        run = run._replace(
            status=status,
            due=due,
            superseded_by=superseded_by,
            dead_letter=dead_letter,
            log=log,
            attempts=attempts,
            lost=lost,
        )
        return self.set_run(s, r, label, run)

    def tx_reap(self, s: State, r: int, epoch: int, label: str) -> tuple[State, bool]:
        """The reaper's take_over: to pending, or to failed with a dead letter after max_lost lost attempts."""
        run = s.runs[r]
        if run.status != "running" or run.epoch != epoch:
            return s, False
        if run.attempts[-1].lease:
            if "take_over_rechecks_lease" in self.rules and "no_lease_check" not in self.bugs:
                return s, False
            raise Violation(label, "P9 the reaper took a run whose lease is alive")
        tried = run.epoch if "quarantine_counts_attempts" in self.bugs else run.lost + 1
        if tried < self.scenario.max_lost:
            return self.take_over(s, r, "pending", "lost", label), True
        if run.lost + 1 < self.scenario.max_lost:
            raise Violation(label, "P11 a run was quarantined before max_lost attempts were lost")
        if "dead_letter_leaves_the_run" in self.bugs:
            return self.take_over(s, r, "pending", "lost", label, dead_letter=True), True
        dead_letter = "dead_letter_in_take_over" in self.rules
        return self.take_over(s, r, "failed", "lost", label, dead_letter=dead_letter), True

    def tx_give_back(
        self, s: State, r: int, epoch: int, outcome: str, start: int, buffer: tuple[Event, ...], label: str
    ) -> tuple[State, bool]:
        """An attempt gives back its own run: it stores its buffer, so that nothing has to be voided."""
        attempt = self.attempt(s, r, epoch)
        if "give_back_names_no_epoch" in self.bugs and s.runs[r].status == "running":
            if s.runs[r].epoch != epoch:
                raise Violation(label, "P5 a take_over ended an attempt that it did not name")
        elif attempt.outcome != "running":
            return s, False
        if "own_give_back_stores_buffer" in self.rules:
            run = s.runs[r]
            s = self.set_run(s, r, label, run._replace(log=self.append(run.log, start, buffer, label)))
        s = self.set_attempt(s, r, attempt._replace(reserved=len(s.runs[r].log) - 1))
        return self.take_over(s, r, "pending", outcome, label, due=outcome != "retrying"), True

    # ------------------------------------------------------------ submit
    @staticmethod
    def open_runs(s: State, session: int) -> list[int]:
        """The session's unfinished runs by position."""
        found = [r for r, x in enumerate(s.runs) if x.session == session and x.status not in FINAL]
        return sorted(found, key=lambda r: s.runs[r].position)

    @staticmethod
    def next_position(s: State, sessions: tuple[int, ...], session: int) -> int:
        taken = [x.position for x in s.runs if x.session == session]
        taken += [sub.value for k, sub in enumerate(s.submissions) if sub.state == "apart" and sessions[k] == session]
        return max(taken, default=-1) + 1

    def tx_submit(
        self, s: State, k: int, label: str, *, key: int, decided: int | None = None, position: int | None = None
    ) -> tuple[State, str]:
        """Insert the run, then policy; answers stored, replayed or rejected.

        `decided`: the run to supersede, as decided in an earlier transaction. `position`: taken in an earlier one."""
        session = self.scenario.sessions[k]
        mine = any(x.key == key for x in s.runs)
        if mine and "insert_before_policy" in self.rules:
            return s, "replayed"
        inputs: tuple[int, ...] = (k,)
        waiting = self.open_runs(s, session)
        if "merge_across_sessions" in self.bugs:
            waiting = [r for r, x in enumerate(s.runs) if x.status not in FINAL]
        if position is None:
            position = self.next_position(s, self.scenario.sessions, session)
        if self.scenario.policy == "Reject" and waiting:
            if mine:
                raise Violation(label, "P7 409 for a submission whose run is stored")
            return s, "rejected"
        if self.scenario.policy == "Merge" and waiting:
            target = waiting[-1] if "merge_the_last" in self.rules else waiting[0]
            if decided == target if decided is not None else not s.runs[target].effect:
                if s.runs[target].effect:
                    raise Violation(label, "P8 a run that has an effect row was merged")
                inputs = s.runs[target].inputs + inputs
                s = self.take_over(s, target, "superseded", "interrupted", label, superseded_by=key)
        if mine:
            return s, "replayed"
        run = Run(key, session, position, "pending", 0, True, inputs, -1, 0, False, (), (), 0, False)
        return s._replace(runs=(*s.runs, run), entries=(*s.entries, 0)), "stored"

    # ------------------------------------------------------------ leases
    def set_lease(self, s: State, r: int, epoch: int, alive: bool) -> State:
        return self.set_attempt(s, r, self.attempt(s, r, epoch)._replace(lease=alive))

    @staticmethod
    def map_attempts(s: State, change: Any) -> State:
        runs = tuple(x._replace(attempts=tuple(change(a) for a in x.attempts)) for x in s.runs)
        return s._replace(runs=runs)
