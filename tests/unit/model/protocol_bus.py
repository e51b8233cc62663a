"""Redis in the model: the work stream with its hash of entries, and run 0's stream of events with one client.

Each method is one script, or the gateway's own handling of what it reads. P4's checks are here.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol_checker import Violation
from protocol_state import FINAL, Event, State, Step, put, reduce_event, reduce_log, text_of
from protocol_store import Store

EVERYTHING = 10**6


class Bus(Store):
    # ------------------------------------------------------------ work stream
    @staticmethod
    def _add(s: State, r: int) -> State:
        used = [0, *s.entries]
        used += [e for e, _ in s.stream]
        used += [e for e, _, _ in s.pending]
        used += [p.entry for p in s.places]
        used += [p.entry for p in s.reapers]
        entry = max(used) + 1
        return s._replace(stream=(*s.stream, (entry, r)), entries=put(s.entries, r, entry))

    def publish(self, s: State, r: int) -> State:
        return s if s.entries[r] else self._add(s, r)

    def republish(self, s: State, r: int, held: int) -> State:
        """Add, and acknowledge both the entry held and the hash's old one."""
        pending = tuple(p for p in s.pending if p[0] not in (held, s.entries[r]))
        return self._add(s, r)._replace(pending=pending)

    def acknowledge(self, s: State, r: int, entry: int) -> State:
        """XACK always, HDEL only if the hash holds this entry."""
        s = s._replace(pending=tuple(p for p in s.pending if p[0] != entry))
        if entry and s.entries[r] == entry and not self.bugs & {"hash_never_cleared", "published_at"}:
            s = s._replace(entries=put(s.entries, r, 0))
        return s

    def publish_head(self, s: State, session: int) -> State:
        r = self.head(s, session)
        return self.publish(s, r) if r >= 0 and s.runs[r].status == "pending" and s.runs[r].due else s

    # ------------------------------------------------------------ events of run 0
    def watched(self, s: State, r: int) -> bool:
        return r == 0 and self.scenario.client and not s.client.ended

    def emit(self, s: State, r: int, seq: int, event: Event, *, heard: bool = True) -> State:
        """The event script: XADD, refused at or below the top; PUBLISH only if it was appended."""
        if not self.watched(s, r) or (s.events and s.events[-1][0] >= seq):
            return s
        s = s._replace(events=(*s.events, (seq, event)))
        if heard and s.client.pc in ("replay", "stream"):
            return s._replace(client=s.client._replace(inbox=(*s.client.inbox, (seq, event))))
        return self.hear(s, seq, event) if heard and s.client.pc == "live" else s

    def emits(self, s: State, r: int, seq: int, event: Event, label: str) -> Iterator[Step]:
        """An emission, and the same with the channel's message lost."""
        yield label, self.emit(s, r, seq, event), False
        hears = self.watched(s, r) and s.client.pc in ("replay", "stream", "live")
        if hears and s.faults and "channel" in self.scenario.kinds:
            lost = self.emit(s._replace(faults=s.faults - 1), r, seq, event, heard=False)
            yield label + " (channel LOST)", lost, True

    def emits_last(self, s: State, r: int, label: str) -> Iterator[Step]:
        """The terminal event, after its commit."""
        log = s.runs[r].log
        if not self.watched(s, r):
            yield label, s, False
        else:
            yield from self.emits(s, r, len(log) - 1, log[-1], label)

    # ------------------------------------------------------------ the client
    def feed(self, s: State, seq: int, event: Event) -> State:
        c = s.client
        if c.ended or seq <= c.cursor:
            return s
        items, ended = reduce_event(c.items, seq, event)
        if ended:
            run, label = s.runs[0], f"the client gets seq {seq}"
            if run.status not in FINAL:
                raise Violation(label, "P4 the client saw a terminal event of an unfinished run")
            if text_of(items) != text_of(reduce_log(run.log)):
                raise Violation(label, "P4 the client's text is not the log's")
        pc, inbox = ("done", ()) if ended else (c.pc, c.inbox)
        return s._replace(client=c._replace(pc=pc, cursor=seq, items=items, inbox=inbox, ended=ended))

    def from_stream(self, s: State, below: int) -> State:
        for seq, event in s.events:
            if seq < below and seq == s.client.cursor + 1:
                s = self.feed(s, seq, event)
        return s

    def from_log(self, s: State, below: int = EVERYTHING) -> State:
        log = s.runs[0].log
        top = len(log) - 1
        if s.client.pc == "replay" and top - s.client.cursor > self.scenario.replay_limit:
            return self._gap(s, log, top)
        while s.client.cursor < top and s.client.cursor + 1 < below and not s.client.ended:
            s = self.feed(s, s.client.cursor + 1, log[s.client.cursor + 1])
        return s

    def _gap(self, s: State, log: tuple[Event, ...], top: int) -> State:
        """gap {parts}: replace everything, one part up to the last checkpoint and one after it."""
        c, items = s.client, reduce_log(log)
        if log[-1].kind == "E":
            c = c._replace(items=reduce_log(log[:-1]), cursor=top - 1)
            return self.feed(s._replace(client=c), top, log[-1])
        parts = [(top, items)]
        if "gap_in_parts" in self.rules:
            attempts = s.runs[0].attempts
            kept = attempts[-1].checkpoint_seq if attempts else -1
            first = tuple(item for item in items if item[0] <= kept)
            parts = [(kept, first), (top, items[len(first) :])]
        texts = tuple((through, text_of(part)) for through, part in parts if part)
        return s._replace(client=c._replace(items=texts, cursor=top))

    def hear(self, s: State, seq: int, event: Event) -> State:
        """A message of the channel; what is missing before it comes from the stream, else from Postgres."""
        if seq > s.client.cursor + 1:
            s = self.from_stream(s, seq)
        if seq > s.client.cursor + 1:
            s = self.from_log(s, seq)
        return self.feed(s, seq, event) if seq == s.client.cursor + 1 else s  # else the next comparison finds it

    def client_steps(self, s: State) -> Iterator[Step]:
        c = s.client
        if not s.runs or c.pc == "done":
            return
        top = len(s.runs[0].log) - 1
        if c.pc == "connect":
            valid = max((a.reserved for a in s.runs[0].attempts[-1:]), default=-1)
            if "cursor_up_to_top" in self.rules:
                valid = max(valid, top)
            if c.cursor > valid:
                raise Violation("the client reconnects", "P4 400 for a cursor that the client was given")
            yield "the client subscribes", s._replace(client=c._replace(pc="replay")), False
        elif c.pc == "replay":
            n = self.from_log(s)
            pc = "done" if n.client.ended else "stream"
            yield "the client replays from Postgres", n._replace(client=n.client._replace(pc=pc)), False
        elif c.pc == "stream":
            n = self.from_stream(s, EVERYTHING)
            inbox, pc = n.client.inbox, "done" if n.client.ended else "live"
            n = n._replace(client=n.client._replace(pc=pc, inbox=()))
            for seq, event in inbox:
                n = self.hear(n, seq, event)
            yield "the client reads the stream and is live", n, False
        elif c.pc == "live":
            if top > c.cursor and "no_top_comparison" not in self.bugs:
                yield "heartbeat: Postgres has more, refill", self.from_log(s), False
            if s.faults and "cut" in self.scenario.kinds:
                cut = s._replace(client=c._replace(pc="connect", inbox=()), faults=s.faults - 1)
                yield "FAULT the client is cut", cut, True
