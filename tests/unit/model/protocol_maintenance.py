"""Reaper and sweep in the model, and what nobody does: time, late requests and the stores' own faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from protocol_state import FINAL, GONE, IDLE, REAPER, RESTING, UP, State, Step, put
from protocol_worker import Worker


class Maintenance(Worker):
    def _is_idle(self, s: State, entry: int, consumer: int) -> bool:
        """Nobody refreshes this pending entry."""
        if consumer == GONE:
            return True
        if consumer == REAPER:
            return all(p.entry != entry for p in s.reapers)
        return s.workers[consumer] != UP or all(s.places[q].entry != entry for q in self.places_of(consumer))

    def reaper_steps(self, s: State, k: int) -> Iterator[Step]:
        p, me = s.reapers[k], f"R{k}"

        def now(state: State, **changes: Any) -> State:
            return state._replace(reapers=put(state.reapers, k, state.reapers[k]._replace(**changes)))

        def rest(state: State) -> State:
            return state._replace(reapers=put(state.reapers, k, RESTING))

        if p.pc == "idle":
            for entry, r, consumer in s.pending:
                if self._is_idle(s, entry, consumer):
                    mine = tuple((e, x, REAPER if e == entry else c) for e, x, c in s.pending)
                    found = now(s._replace(pending=mine), pc="look", entry=entry, run=r, steady=self._in_touch(s))
                    yield f"{me} autoclaims an entry of run {r}", found, False
            if "contact_before_the_look" in self.bugs:
                if not s.outage:
                    yield f"{me} reaches Postgres", now(s, pc="reached"), False
            else:
                yield from self._scan(s, k, now)
            return
        if p.pc == "reached":
            yield from self._scan(s, k, now)
            yield f"{me} finds nothing", rest(s), False
            return
        if s.faults and "crash" in self.scenario.kinds:
            yield f"FAULT {me} crashes", rest(s)._replace(faults=s.faults - 1), True
        r, run = p.run, s.runs[p.run]
        if p.pc == "look":
            if run.status == "pending" and run.due and self.is_head(s, r):
                yield f"{me} sees pending, head, due", now(s, pc="republish", steady=False), False
            elif run.status != "running":
                yield f"{me} sees {run.status}: acks", rest(self.acknowledge(s, r, p.entry)), False
            elif run.attempts[-1].lease and "no_lease_check" not in self.bugs:
                owner = self.worker_of(run.attempts[-1].owner)
                back = tuple((e, x, owner if e == p.entry else c) for e, x, c in s.pending)
                yield f"{me} gives the entry to the lease's owner", rest(s._replace(pending=back)), False
            elif p.steady:
                yield f"{me} sees an expired lease", now(s, pc="take", epoch=run.epoch), False
            else:
                yield f"{me} sees an expired lease, soon after an outage", rest(s), False
        elif p.pc == "take":
            label = f"{me} takes run {r} over"
            n, ok = self.tx_reap(s, r, p.epoch, label) if p.steady else (s, False)
            if not ok:
                yield label + ": no", rest(s), False
                return
            ends = "letter" if not n.runs[r].dead_letter else "terminal" if self.watched(s, r) else "heads"
            yield label, now(n, pc=ends if n.runs[r].status in FINAL else "republish", steady=False), False
            if s.faults and "lost" in self.scenario.kinds:
                yield label + " (reply LOST)", n._replace(faults=s.faults - 1), True
        elif p.pc == "republish":
            yield f"{me} republishes run {r}", rest(self.republish(s, r, p.entry)), False
        elif p.pc == "letter":
            n = self.set_run(s, r, me, run._replace(dead_letter=True))
            yield f"{me} writes the dead letter", now(n, pc="terminal" if self.watched(s, r) else "heads"), False
        elif p.pc == "terminal":
            for label, n, fault in self.emits_last(s, r, f"{me} terminal event to Redis"):
                yield label, now(n, pc="heads"), fault
        elif p.pc == "heads":
            n = self.acknowledge(self.publish_head(s, run.session), r, p.entry)
            yield f"{me} publishes the next head and acks", rest(n), False

    def _in_touch(self, s: State) -> bool:
        """The reaper has reached Postgres without a break for one lease."""
        return not s.outage or "reaper_waits_after_outage" not in self.rules

    def _scan(self, s: State, k: int, now: Callable[..., State]) -> Iterator[Step]:
        """One statement: Postgres' time, from which the reaper knows its contact, and the leases that are over at it."""
        if "lease_scan" not in self.rules or not (self._in_touch(s) or "contact_before_the_look" in self.bugs):
            return
        for r, run in enumerate(s.runs):
            if run.status == "running" and not run.attempts[-1].lease:
                found = now(s, pc="take", run=r, epoch=run.epoch, steady=True)
                yield f"R{k} scans Postgres: run {r}'s lease is over", found, False

    def sweep_steps(self, s: State) -> Iterator[Step]:
        if s.sweep >= 0:
            yield f"sweep publishes run {s.sweep}", self.publish(s, s.sweep)._replace(sweep=-1), False
            return
        for r, run in enumerate(s.runs):
            if s.entries[r] and "lost_entries_leave_the_hash" in self.rules:
                if s.entries[r] not in (*(e for e, _ in s.stream), *(e for e, _, _ in s.pending)):
                    n = s._replace(entries=put(s.entries, r, 0))
                    yield f"sweep: the entry of run {r} is not in the stream, HDEL", n, False
            elif run.status == "pending" and run.due and not s.entries[r] and self.is_head(s, r):
                yield f"sweep finds run {r}", s._replace(sweep=r), False

    def time_steps(self, s: State) -> Iterator[Step]:
        waits = False
        for r, run in enumerate(s.runs):
            if run.status == "pending" and not run.due:
                yield f"run {r} becomes due", s._replace(runs=put(s.runs, r, run._replace(due=True))), False
            if run.status != "running":
                continue
            a = run.attempts[-1]
            if not self.executes(s, r, a):
                if a.lease:
                    yield f"run {r}'s lease runs out", self.set_lease(s, r, run.epoch, alive=False), False
            elif not a.lease:
                waits = True
        if s.outage and not waits:
            yield "one lease since the outage is over", s._replace(outage=False), False
        for at, (what, *request) in enumerate(s.network):
            n = s._replace(network=s.network[:at] + s.network[at + 1 :])
            label = f"a late {what} arrives"
            act: Any = {"claim": self.tx_claim, "flush": self.tx_flush, "give": self.tx_give_back}[what]
            yield label, act(n, *request, label)[0], False

    def store_faults(self, s: State) -> Iterator[Step]:
        kinds = self.scenario.kinds
        if not s.faults:
            return
        if "flush" in kinds and (s.stream or s.pending or any(s.entries) or s.events):
            entries = s.entries if "published_at" in self.bugs else (0,) * len(s.entries)
            yield "FAULT FLUSHALL", s._replace(stream=(), pending=(), entries=entries, events=(), faults=s.faults - 1), True
        if "evict" in kinds and (s.stream or s.pending):
            yield "FAULT the stream is lost, the hash is kept", s._replace(stream=(), pending=(), faults=s.faults - 1), True
        if "outage" in kinds and any(run.status == "running" for run in s.runs):
            n = s._replace(faults=s.faults - 1, outage=True)
            n = self.map_attempts(n, lambda a: a._replace(lease=False))
            if "take_over_names_contact" in self.rules:
                n = n._replace(reapers=tuple(p._replace(steady=False) for p in n.reapers))
            if "attempt_outlives_its_deadline" not in self.rules:
                n = n._replace(places=tuple(IDLE if p.pc == "run" else p for p in n.places))
            yield "FAULT Postgres is away for more than a lease", n, True
