"""A worker in the model: its places read, claim, execute, finish, give back; alone or as a group.

A paused worker goes on as a zombie without a look at its own deadline: the worst case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from protocol_checker import Violation
from protocol_effects import Effects
from protocol_state import FENCED, GONE, IDLE, PAUSED, SETTLED, UNKNOWN, UP, Attempt, Event, Place, State, Step, put, up

EXECUTING = frozenset(("run", "checked", "fail", "give"))
# Place.retry: the reply was lost | not in a group | the planted early terminal event is out | finish's reply was lost
AGAIN, ALONE, EARLY, FINISH_AGAIN = 1, 2, 3, 4


def rest(s: State, q: int) -> State:
    return s._replace(places=put(s.places, q, IDLE))


class Worker(Effects):
    def places_of(self, w: int) -> range:
        return range(w * self.scenario.places, (w + 1) * self.scenario.places)

    def worker_of(self, owner: int) -> int:
        return owner if owner < 0 else owner // self.scenario.places

    def worker_steps(self, s: State, w: int) -> Iterator[Step]:
        mine = self.places_of(w)
        if s.faults and s.workers[w] == UP and any(s.places[q].pc != "idle" for q in mine):
            if "crash" in self.scenario.kinds:
                yield f"FAULT W{w} crashes", self._crash(s, w), True
            if "pause" in self.scenario.kinds:
                paused = self._hurt(s, w)._replace(workers=put(s.workers, w, PAUSED), faults=s.faults - 1)
                yield f"FAULT W{w} pauses", paused, True
        if s.workers[w] == PAUSED:  # its next own step wakes it
            s = s._replace(workers=put(s.workers, w, UP))
        reads = False
        for q in mine:
            if s.places[q].pc != "idle":
                yield from self._place_steps(s, q)
            elif not reads:
                reads = True
                yield from self._read(s, w, q)
        if self.scenario.groups:
            for pc, act in (("claim", self._claim), ("run", self._finish)):
                group = [q for q in mine if s.places[q].pc == pc and s.places[q].retry != ALONE]
                if pc == "run":
                    group = [q for q in group if self._is_done(s.places[q])]
                once = len({s.places[q].run for q in group}) == len(group)
                if len(group) > 1 and (once or "run_once_in_group" not in self.rules):
                    yield from act(s, group)

    def _read(self, s: State, w: int, q: int) -> Iterator[Step]:
        if s.stream:
            entry, r = s.stream[0]
            n = s._replace(stream=s.stream[1:], pending=tuple(sorted((*s.pending, (entry, r, w)))))
            yield f"W{w} reads an entry of run {r}", up(n, q, pc="look", entry=entry, run=r), False
            if s.faults and "lost" in self.scenario.kinds:
                yield f"FAULT W{w}'s read, reply lost", n._replace(faults=s.faults - 1), True

    def _place_steps(self, s: State, q: int) -> Iterator[Step]:
        p, me = s.places[q], f"P{q}"
        r, run = p.run, s.runs[p.run]
        if p.pc == "look":
            if run.status == "pending" and run.due and self.is_head(s, r):
                n = up(s, q, pc="claim", seen=run.epoch)
                if "ack_before_claim" in self.bugs:
                    n = self.acknowledge(n, r, p.entry)
                yield f"{me} sees pending, head, due", n, False
            elif run.status == "running" and not run.attempts[-1].lease:
                yield f"{me} leaves it to the reaper", rest(s, q), False
            else:
                yield f"{me} sees {run.status}", up(s, q, pc="ack"), False
        elif p.pc == "claim":
            yield from self._claim(s, [q])
        elif p.pc in ("run", "checked"):
            yield from self._attempt_steps(s, q)
        elif p.pc == "fail":
            yield from self._finish(s, [q])
        elif p.pc == "give":
            yield from self._give_back(s, q, "handed_back" if p.retry == AGAIN else "retrying")
        elif p.pc == "terminal":
            for label, n, fault in self.emits_last(s, r, f"{me} terminal event to Redis"):
                yield label, up(n, q, pc="heads"), fault
        elif p.pc == "heads":
            yield f"{me} publishes the next head", up(self.publish_head(s, run.session), q, pc="ack"), False
        elif p.pc == "republish":
            yield f"{me} republishes run {r}", rest(self.republish(s, r, p.entry), q), False
        elif p.pc == "ack":
            yield f"{me} acks run {r}", rest(self.acknowledge(s, r, p.entry), q), False

    # ------------------------------------------------------------ claim
    def _claim(self, s: State, group: Sequence[int]) -> Iterator[Step]:
        """One transaction for the places of `group`; zero rows are read back."""
        runs = [s.places[q].run for q in group]
        label = f"P{','.join(map(str, group))} claims run {','.join(map(str, runs))}"
        n, mine = s, []
        for k, q in enumerate(group):
            p = s.places[q]
            n, ok = self.tx_claim(n, q, p.run, p.seen, False, label)
            mine.append(ok or p.run in runs[:k] or self._is_my_claim(n, q, p))
        lost = n
        for q, ok in zip(group, mine, strict=True):
            lost = up(lost, q, retry=AGAIN)
            n = self._begin(n, q, label) if ok else up(n, q, pc="look", seen=-1, retry=0)
        yield label, n, False
        if s.faults and lost.runs is not s.runs and "lost" in self.scenario.kinds:
            yield label + " (reply LOST)", lost._replace(faults=s.faults - 1), True
        p = s.places[group[0]]
        if s.faults and len(group) == 1 and not p.retry and "late" in self.scenario.kinds:
            n = up(s, group[0], retry=AGAIN)
            request = ("claim", group[0], p.run, p.seen, False)
            yield label + " (request LATE)", n._replace(network=(*s.network, request), faults=s.faults - 1), True

    def _is_my_claim(self, s: State, q: int, p: Place) -> bool:
        run = s.runs[p.run]
        epoch = p.seen + 1 if "claim_names_epoch" in self.rules else run.epoch
        if "zero_is_fenced" in self.bugs or not 1 <= epoch <= run.epoch:
            return False
        attempt = self.attempt(s, p.run, epoch)
        if attempt.outcome != "running" and "only_a_running_claim_is_mine" in self.rules:
            return False
        owner = attempt.owner
        if "owner_has_nonce" in self.rules:
            return owner == q
        return owner >= 0 and self.worker_of(owner) == self.worker_of(q)

    def _begin(self, s: State, q: int, label: str) -> State:
        p = s.places[q]
        run = s.runs[p.run]
        a = run.attempts[p.seen if "claim_names_epoch" in self.rules else -1]
        for other, o in enumerate(s.places):
            if other != q and o.run == p.run and o.epoch == a.epoch and o.pc in EXECUTING:
                raise Violation(label, "P6 two places execute one attempt")
        if a.outcome != "running":
            raise Violation(label, "P5 an attempt that has ended begins to execute")
        done = a.checkpoint
        if "claim_copies_checkpoint" not in self.rules:  # "resume from the run's latest checkpoint"
            done = max(b.checkpoint for b in run.attempts)
        if "ack_before_finish" in self.bugs:
            s = self.acknowledge(s, p.run, p.entry)
        return up(s, q, pc="run", seen=-1, epoch=a.epoch, token=done + 1, seq=len(run.log), known=a.reserved, retry=0)

    # ------------------------------------------------------------ one attempt
    def _is_done(self, p: Place) -> bool:
        tokens, at = self.scenario.tokens, self.scenario.effect_at
        return p.token > tokens and not (at == p.token and p.effect < SETTLED)

    def _attempt_steps(self, s: State, q: int) -> Iterator[Step]:
        p, me = s.places[q], f"P{q}"
        r = p.run
        a = self.attempt(s, r, p.epoch)
        if a.outcome == "running" and not a.lease:
            yield f"{me} renews late", self.set_lease(s, r, p.epoch, True), False
        if p.retry == FINISH_AGAIN:
            yield from self._finish(s, [q])
            return
        if self.scenario.effect_at == p.token and p.effect < SETTLED:
            yield from self.effect_steps(s, q, a)
            return
        room = p.seq <= p.known or "reserve_not_durable" in self.bugs
        if p.pc == "run" and p.token <= self.scenario.tokens and room:
            event = Event(p.epoch, "t", (p.epoch, p.token))
            for label, n, fault in self.emits(s, r, p.seq, event, f"{me} emits token {p.token} as seq {p.seq}"):
                yield label, up(n, q, token=p.token + 1, seq=p.seq + 1, buffer=(*p.buffer, event)), fault
        if p.buffer:
            yield from self._flush(s, q, a)
        if p.pc == "run" and self._is_done(p):
            if "terminal_before_commit" in self.bugs and self.watched(s, r) and p.retry != EARLY:
                event = Event(p.epoch, "E", "succeeded")
                for label, n, fault in self.emits(s, r, p.seq, event, f"{me} terminal event, before the commit"):
                    yield label, up(n, q, retry=EARLY), fault
                return
            yield from self._finish(s, [q])
        if p.pc == "run" and s.gives and a.outcome == "running":
            given = s._replace(gives=s.gives - 1)
            yield from self._give_back(given, q, "retrying")
            yield from self._give_back(given, q, "handed_back")

    def _flush(self, s: State, q: int, a: Attempt) -> Iterator[Step]:
        p, me = s.places[q], f"P{q}"
        start, reserve = p.seq - len(p.buffer), max(p.seq - 1 + self.scenario.reserve, p.known)
        checkpoint = None
        if self.scenario.checkpoint and p.token - 1 == self.scenario.checkpoint:
            checkpoint = (p.seq - 1, p.token - 1)
        label = f"{me} {'checkpoints' if checkpoint else 'flushes'} {start}..{p.seq - 1}"
        if "check_then_write" in self.bugs and p.pc == "run":
            if a.outcome == "running":
                yield f"{me} checks its epoch", up(s, q, pc="checked"), False
            else:
                yield f"{me} checks its epoch: fenced", up(s, q, **FENCED), False
            return
        request = (p.run, p.epoch, start, p.buffer, reserve, checkpoint)
        n, ok = self.tx_flush(s, *request, label, fenced=p.pc != "checked")
        if not ok:
            yield label + ": fenced", up(s, q, **FENCED), False
            return
        yield label, up(n, q, pc="run", buffer=(), known=reserve, retry=0), False
        if s.faults and not p.retry and "lost" in self.scenario.kinds:
            yield label + " (reply LOST)", up(n, q, retry=AGAIN)._replace(faults=s.faults - 1), True
        if s.faults and not p.retry and "late" in self.scenario.kinds:
            n = s._replace(network=(*s.network, ("flush", *request)), faults=s.faults - 1)
            yield label + " (request LATE)", up(n, q, retry=AGAIN), True

    # ------------------------------------------------------------ the end of an attempt
    def _finish(self, s: State, group: Sequence[int]) -> Iterator[Step]:
        """One transaction for the places of `group`; zero rows are read back."""
        label = f"P{','.join(map(str, group))} finishes run {','.join(str(s.places[q].run) for q in group)}"
        if any(s.places[q].run == self.scenario.bad_run and s.places[q].pc == "run" for q in group):
            n = s
            for q in group:
                split = len(group) > 1 and "bad_member_splits_group" in self.rules
                n = up(n, q, retry=ALONE) if split else up(n, q, pc="fail", buffer=(), retry=0)
            yield label + ": refused by the database", n, False
            return
        n, mine = s, []
        for q in group:
            p = s.places[q]
            status = "failed" if p.pc == "fail" else "succeeded"
            start = len(s.runs[p.run].log) if p.pc == "fail" else p.seq - len(p.buffer)
            n, ok = self.tx_finish(n, p.run, p.epoch, start, p.buffer, status, label, p.effect == UNKNOWN)
            mine.append(ok or self._has_outcome(n, p, "finished"))
        if "one_fenced_member_fails_group" in self.bugs and not all(mine):
            n, mine = s, [False] * len(mine)
        lost = n
        for q, ok in zip(group, mine, strict=True):
            p = s.places[q]
            lost = up(lost, q, retry=FINISH_AGAIN)
            after: dict[str, Any] = {"pc": "terminal" if self.watched(n, p.run) else "heads", "buffer": (), "retry": 0}
            n = up(n, q, **(after if ok else FENCED))
        yield label + ("" if all(mine) else ": fenced"), n, False
        if s.faults and lost.runs is not s.runs and "lost" in self.scenario.kinds:
            yield label + " (reply LOST)", lost._replace(faults=s.faults - 1), True

    def _has_outcome(self, s: State, p: Place, outcome: str) -> bool:
        """Zero rows read back: my own earlier commit has my attempt's outcome."""
        return "zero_is_fenced" not in self.bugs and self.attempt(s, p.run, p.epoch).outcome == outcome

    def _give_back(self, s: State, q: int, outcome: str) -> Iterator[Step]:
        """Drain or a retryable error: take_over of my own attempt, then republish, or ack if it is not due."""
        p = s.places[q]
        label = f"P{q} gives run {p.run} back: {outcome}"
        n, ok = self.tx_give_back(s, p.run, p.epoch, outcome, p.seq - len(p.buffer), p.buffer, label)
        again = AGAIN if outcome == "handed_back" else ALONE
        if not ok and not self._has_outcome(s, p, outcome):
            yield label + ": fenced", up(s, q, **FENCED), False
            return
        yield label, up(n, q, pc="ack" if outcome == "retrying" else "republish", buffer=(), retry=0), False
        if p.pc == "give" or not s.faults:
            return
        if "lost" in self.scenario.kinds:
            yield label + " (reply LOST)", up(n, q, pc="give", retry=again)._replace(faults=s.faults - 1), True
        if "late" in self.scenario.kinds:
            request = ("give", p.run, p.epoch, outcome, p.seq - len(p.buffer), p.buffer)
            n = s._replace(network=(*s.network, request), faults=s.faults - 1)
            yield label + " (request LATE)", up(n, q, pc="give", retry=again), True

    # ------------------------------------------------------------ failures
    def executes(self, s: State, r: int, a: Attempt) -> bool:
        """A healthy worker renews this attempt, or is about to learn that it holds it."""
        if a.owner < 0 or s.workers[self.worker_of(a.owner)] != UP:
            return False
        p = s.places[a.owner]
        holds = p.epoch == a.epoch and p.pc in EXECUTING
        return p.run == r and (holds or (p.pc == "claim" and p.retry != 0 and p.seen + 1 == a.epoch))

    def _hurt(self, s: State, w: int) -> State:
        mine = self.places_of(w)
        return self.map_attempts(s, lambda a: a._replace(hurt=a.hurt or a.outcome == "running") if a.owner in mine else a)

    def _crash(self, s: State, w: int) -> State:
        mine = self.places_of(w)
        s = self.map_attempts(self._hurt(s, w), lambda a: a._replace(owner=GONE) if a.owner in mine else a)
        places = tuple(IDLE if q in mine else p for q, p in enumerate(s.places))
        pending = tuple((e, r, GONE if o == w else o) for e, r, o in s.pending)
        network = tuple(("claim", GONE, *x[2:4], True) if x[0] == "claim" and x[1] in mine else x for x in s.network)
        return s._replace(places=places, pending=pending, network=network, faults=s.faults - 1)
