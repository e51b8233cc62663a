"""The run protocol of docs/architecture.md as a model for the checker: `Model(Scenario(…))`.

Every step is one atomic thing: a Postgres transaction, a Redis script, or a process's own decision. A process may
crash or pause between any two steps. The properties:

P1   every accepted run comes to an end, whatever fails (and nothing is left in the queue)
P2   a finished run never changes its state
P3   a run's log has no hole, and one seq one content
P4   a client's text is the log's, every stream ends, a cursor that was given out is valid
P5   a fenced attempt writes nothing, and a take_over ends only the attempt that it names
P6   one running run per session, one running attempt per run, one place per attempt
P7   each input is answered once and in order; an answer to a client is true
P8   no outside call without its row, none twice; a run with an effect is never merged
P9   a live lease is never taken
P10  only an attempt whose worker really failed counts as lost
P11  a run fails only by its own fault; it is quarantined exactly if max_lost attempts were lost, or one was within an
     effect, with a dead letter
"""

from __future__ import annotations

from itertools import pairwise

from protocol_checker import Violation
from protocol_gateway import ANSWERED, Gateway
from protocol_maintenance import Maintenance
from protocol_state import (
    BEGUN,
    FINAL,
    GONE,
    IDLE,
    RESTING,
    UP,
    Attempt,
    Client,
    Run,
    State,
    Step,
    Submission,
)

UNWATCHED = Client("done", 0, (), (), True)


class Model(Maintenance, Gateway):
    def start(self) -> State:
        sc = self.scenario
        return State(
            runs=(),
            stream=(),
            pending=(),
            entries=(),
            events=(),
            workers=(UP,) * sc.workers,
            places=(IDLE,) * (sc.workers * sc.places),
            reapers=(RESTING,) * sc.reapers,
            sweep=-1,
            submissions=(Submission("new", 0),) * len(sc.sessions),
            cancel="new" if sc.cancel else "done",
            client=Client("connect", -1, (), (), False) if sc.client else UNWATCHED,
            network=(),
            faults=sc.faults,
            gives=sc.gives,
            outage=False,
        )

    def steps(self, s: State) -> list[Step]:
        out: list[Step] = []
        for w in range(self.scenario.workers):
            out += self.worker_steps(s, w)
        for k in range(self.scenario.reapers):
            out += self.reaper_steps(s, k)
        for steps in (
            self.submission_steps,
            self.cancel_steps,
            self.sweep_steps,
            self.time_steps,
            self.store_faults,
            self.client_steps,
        ):
            out += steps(s)
        return [(label, self.canonical(s, n, label), fault) for label, n, fault in out]

    def good(self, s: State) -> bool:
        """Everything accepted is finished, nothing is left in the queue, the client has ended."""
        return (
            s.client.ended
            and not (s.stream or s.pending or s.network)
            and s.sweep < 0
            and all(sub.state in ("done", "rejected") for sub in s.submissions)
            and len(s.runs) == sum(sub.state == "done" for sub in s.submissions)
            and all(run.status in FINAL for run in s.runs)
            and (not any(s.entries) or "published_at" in self.bugs)
        )

    # ------------------------------------------------------------ properties of a state
    def check(self, s: State, label: str) -> None:
        for r, run in enumerate(s.runs):
            if run.dead_letter and run.status != "failed":
                raise Violation(label, "P11 a dead letter of a run that is not failed")
            quarantined = run.status == "failed" and r != self.scenario.bad_run
            if quarantined and not run.dead_letter and not any(p.pc == "letter" and p.run == r for p in s.reapers):
                raise Violation(label, "P11 a quarantined run has no dead letter")
        if s.runs and all(x.status in FINAL for x in s.runs) and all(x.state in ANSWERED for x in s.submissions):
            self._check_inputs(s, label)

    def _check_inputs(self, s: State, label: str) -> None:
        if "answer_before_commit" in self.bugs:
            return
        ordered = not self.scenario.racing and self.scenario.policy != "Reject"  # what is rejected may come again
        runs = sorted(s.runs, key=lambda x: x.position)
        for session in set(self.scenario.sessions):
            answered = [k for x in runs if x.session == session and x.status != "superseded" for k in x.inputs]
            accepted = [
                k for k, sub in enumerate(s.submissions) if self.scenario.sessions[k] == session and sub.state != "rejected"
            ]
            if sorted(answered) != accepted:
                raise Violation(label, "P7 an input was lost, answered twice or in another session")
            if ordered and answered != accepted:
                raise Violation(label, "P7 inputs answered out of order")
        if any(x.status == "superseded" and not any(y.key == x.superseded_by for y in s.runs) for x in s.runs):
            raise Violation(label, "P7 a run is superseded by nothing")

    # ------------------------------------------------------------ canonical form
    def canonical(self, before: State, s: State, label: str) -> State:
        """Equal situations become equal states: identities are renamed, what nobody can read any more is dropped.

        `before` is canonical: what the step left alone needs no second look."""
        moved = s.places is not before.places
        if s.runs is not before.runs or s.submissions is not before.submissions or s.reapers is not before.reapers:
            self.check(s, label)
        if (
            moved
            or s.pending is not before.pending
            or s.stream is not before.stream
            or s.entries is not before.entries
            or s.reapers is not before.reapers
        ):
            s = self._rename_entries(s)
        if s.client.ended and s.client is not UNWATCHED:
            s = s._replace(client=UNWATCHED, events=())
        if moved or s.runs is not before.runs or s.client is not before.client:
            runs = [self._forget(s, r, run) for r, run in enumerate(s.runs)]
            if any(a is not b for a, b in zip(runs, s.runs, strict=True)):
                s = s._replace(runs=tuple(runs))
        if s.network:
            s = self._forget_owners_of_requests(s)
        if self.scenario.reapers > 1:
            s = s._replace(reapers=tuple(sorted(s.reapers)))
        if self.scenario.symmetry and (moved or s.workers is not before.workers or s.pending is not before.pending):
            return self._sort_places(s)
        return s

    @staticmethod
    def _rename_entries(s: State) -> State:
        used = {0, *s.entries}
        for item in s.stream:
            used.add(item[0])
        for delivered in s.pending:
            used.add(delivered[0])
        for place in s.places:
            used.add(place.entry)
        for reaper in s.reapers:
            used.add(reaper.entry)
        if max(used) == len(used) - 1:
            return s
        to = {e: k for k, e in enumerate(sorted(used))}
        return s._replace(
            stream=tuple((to[e], r) for e, r in s.stream),
            pending=tuple((to[e], r, c) for e, r, c in s.pending),
            entries=tuple(to[e] for e in s.entries),
            places=tuple(p._replace(entry=to[p.entry]) if p.entry else p for p in s.places),
            reapers=tuple(p._replace(entry=to[p.entry]) if p.entry else p for p in s.reapers),
        )

    def _forget(self, s: State, r: int, run: Run) -> Run:
        if run.attempts:
            attempts = tuple(self._forget_attempt(s, r, run, a) for a in run.attempts)
            if attempts != run.attempts:
                run = run._replace(attempts=attempts)
        if run.status in FINAL and (run.log or not run.due) and not self.watched(s, r):
            run = run._replace(log=(), due=True)
        if run.status in FINAL and run.effect and not any(p.run == r and p.effect == BEGUN for p in s.places):
            run = run._replace(effect=0, called=False)
        return run

    def _forget_attempt(self, s: State, r: int, run: Run, a: Attempt) -> Attempt:
        holder = s.places[a.owner] if a.owner >= 0 else IDLE
        claims = holder.pc == "claim" and holder.run == r and holder.seen + 1 == a.epoch
        owner = a.owner if claims or (holder.run == r and holder.epoch == a.epoch) else GONE
        if a.outcome == "running":
            return a if owner == a.owner else a._replace(owner=owner)
        last = a.epoch == run.epoch and (run.status not in FINAL or self.watched(s, r) or claims)
        read = any(p.run == r and p.epoch == a.epoch for p in s.places)
        inherits = last or "claim_copies_checkpoint" not in self.rules
        return Attempt(
            epoch=a.epoch,
            owner=owner if claims else GONE,
            outcome=a.outcome if read or claims else "ended",
            lease=False,
            reserved=a.reserved if last or claims else 0,
            checkpoint_seq=a.checkpoint_seq if inherits or claims else -1,
            checkpoint=a.checkpoint if inherits or claims else 0,
            hurt=False,
        )

    def _forget_owners_of_requests(self, s: State) -> State:
        def known(request: tuple[object, ...]) -> bool:
            owner, r, seen = request[1:4]
            assert isinstance(owner, int)
            p = s.places[owner] if owner >= 0 else IDLE
            return p.pc == "claim" and p.run == r and p.seen == seen

        network = tuple(x if x[0] != "claim" or known(x) else (x[0], GONE, *x[2:]) for x in s.network)
        return s._replace(network=tuple(sorted(network, key=repr)) if len(network) > 1 else network)

    def _sort_places(self, s: State) -> State:
        """Workers are alike, and so are a worker's places (names in a trace may swap)."""
        if self.scenario.places == 1:
            keys = [*zip(s.workers, s.places, strict=True)]
            if all(a < b for a, b in pairwise(keys)):
                return s
        within = [sorted(self.places_of(w), key=s.places.__getitem__) for w in range(self.scenario.workers)]
        order = sorted(
            range(self.scenario.workers),
            key=lambda w: (
                s.workers[w],
                [s.places[q] for q in within[w]],
                [entry for entry, _, c in s.pending if c == w],
            ),
        )
        new = [q for w in order for q in within[w]]
        if all(q == k for k, q in enumerate(new)):
            return s
        return self._reorder(s, order, new)

    def _reorder(self, s: State, order: list[int], new: list[int]) -> State:
        place = {q: k for k, q in enumerate(new)}
        worker = {w: k for k, w in enumerate(order)}
        if any(a.owner >= 0 and place[a.owner] != a.owner for x in s.runs for a in x.attempts):
            s = self.map_attempts(s, lambda a: a._replace(owner=place.get(a.owner, a.owner)))
        network = tuple((x[0], place.get(x[1], x[1]), *x[2:]) if x[0] == "claim" else x for x in s.network)
        return s._replace(
            workers=tuple(s.workers[w] for w in order),
            places=tuple(s.places[q] for q in new),
            pending=tuple((e, r, worker.get(c, c)) for e, r, c in s.pending),
            network=network,
        )
