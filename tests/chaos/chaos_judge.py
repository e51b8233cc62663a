"""Judges a chaos run by its history alone. Pure: what is promised, and what was found instead."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from chaos_history import History, Row

from agentrun.domain.reducer import Transcript

FINAL = {"succeeded": "completed", "failed": "failed", "cancelled": "cancelled", "superseded": "superseded"}
FATES = {"succeeded": "answered_in", "failed": "failed_in", "cancelled": "cancelled_in"}
KNOWN_FAILURES = ("lost_too_often", "effect_unknown")
_COUNT = re.compile(r"\[\[count n=(\d+) of=(\w+)\]\]")
_ORDER = re.compile(r'\[\[tool \w+ \{"order": "(\w+)"\}\]\]')
_SHOWN = 20


@dataclass
class Verdict:
    """`counts` is how much was looked at; `findings` is empty if every promise was kept, else one line each by what was broken."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def good(self) -> bool:
        return not any(self.findings.values())

    def runs(self) -> set[str]:
        """Ids of runs that a finding names."""
        text = "\n".join(line for lines in self.findings.values() for line in lines)
        return set(re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", text))

    def __str__(self) -> str:
        lines = [f"  {count:7}  {what}" for what, count in self.counts.items()]
        for broken, found in self.findings.items():
            lines += [f"BROKEN: {broken}: {len(found)}", *(f"    {line}" for line in found[:_SHOWN])]
        return "\n".join(lines)


def judge(history: History) -> Verdict:
    """Every promise against the history."""
    return _Judge(history).verdict


class _Judge:
    def __init__(self, history: History) -> None:
        self.verdict = Verdict()
        self._history = history
        self._runs = {row["id"]: row for row in history.tables.runs}
        self._logs: dict[str, list[Row]] = defaultdict(list)
        for row in history.tables.messages:
            self._logs[row["run_id"]].append(row)
        self._transcripts = {run_id: _transcript(log) for run_id, log in self._logs.items()}
        self._held: dict[str, list[Row]] = defaultdict(list)
        for row in history.tables.inputs:
            self._held[row["held_by"]].append(row)
        promises = {
            "every 202 has one run and exactly one end": self._ends(),
            "a log counts 0, 1, 2… to its only end": self._numbers(),
            "what a reader saw is the log": self._readers(),
            "an answer is whole, and each piece of it is there once": self._answers(),
            "every message has one fate, in order": self._fates(),
            "the ledger is what the provider counted": self._money(),
            "the budgets are what the ledger says": self._budgets(),
            "what was refused leaves nothing": self._refused(),
            "an effect happens once": self._effects(),
            "no client gets an answer that it cannot deal with": iter(history.seen.wrong),
            "nothing is left in Redis": iter([f"{history.left} entries"] if history.left else []),
        }
        for promise, found in promises.items():
            for line in found:
                self.verdict.findings[promise].append(line)

    def _ends(self) -> Iterator[str]:
        run_of: dict[str, str] = {}
        for one in self._history.seen.accepted:
            if run_of.setdefault(one.key, one.run_id) != one.run_id:
                yield f"{one.key} was answered with {run_of[one.key]} and with {one.run_id}"
            if one.run_id not in self._runs:
                yield f"{one.key}: {one.run_id} was accepted and is no run"
        self.verdict.counts["answers 202"] = len(self._history.seen.accepted)
        self.verdict.counts["messages"] = len(run_of)
        keys = Counter(row["client_key"] for row in self._history.tables.runs)
        for key, count in keys.items():
            if count != 1 or key not in self._history.seen.sent:
                yield f"{key}: {count} runs"
        self.verdict.counts["refused with 429"] = len(self._history.seen.refused)
        for key in self._history.seen.sent.keys() - run_of.keys() - self._history.seen.refused:
            yield f"{key} was never answered 202"
        letters = {row["run_id"] for row in self._history.tables.dead_letters}
        outcomes: dict[str, list[str]] = defaultdict(list)
        for row in self._history.tables.attempts:
            outcomes[row["run_id"]].append(row["outcome"])
        for run_id, run in self._runs.items():
            status, had = run["status"], outcomes[run_id]
            self.verdict.counts[status] += 1
            if status not in FINAL or "running" in had:
                yield f"{run_id} is {status}, its attempts {had}: its session is blocked"
            if len(had) != run["epoch"] or (status == "succeeded") != ("finished" in had and status != "failed"):
                yield f"{run_id} is {status} at epoch {run['epoch']}, its attempts {had}"
            if had.count("finished") > 1 or (had and "finished" in had[:-1]):
                yield f"{run_id} was finished before its last attempt: {had}"
            error = json.loads(run["error"] or "{}") if status == "failed" else {}
            if status == "failed" and error.get("type") not in KNOWN_FAILURES:
                yield f"{run_id} failed: {error}"
            lost = had.count("lost")
            too_often = error.get("type") == "lost_too_often"
            if (run_id in letters) != (status == "failed") or (too_often and lost != self._history.max_lost_attempts):
                yield f"{run_id}: {error or status}, lost {lost} times, dead letter: {run_id in letters}"

    def _numbers(self) -> Iterator[str]:
        for run_id, run in self._runs.items():
            log = self._logs[run_id]
            seqs = [row["seq"] for row in log]
            if seqs != list(range(len(seqs))):
                missing = sorted(set(range(max(seqs, default=0) + 1)) - set(seqs))
                yield f"{run_id} misses {missing[:10]} of {len(seqs)}"
            ends = [row["kind"] for row in log if row["kind"] in FINAL.values()]
            if run["status"] in FINAL and (ends != [FINAL[run["status"]]] or log[-1]["kind"] != ends[0]):
                yield f"{run_id} is {run['status']}, its log ends with {[row['kind'] for row in log[-3:]]}, its ends are {ends}"
            epochs = [row["epoch"] for row in log]
            if epochs != sorted(epochs):
                yield f"{run_id}: an attempt wrote after the next had begun"
            self.verdict.counts["events"] += len(log)

    def _readers(self) -> Iterator[str]:
        for reader in self._history.seen.readers:
            self.verdict.counts["readers"] += 1
            log = self._transcripts.get(reader.run_id, Transcript())
            if reader.end is None or reader.end != log.end:
                yield f"{reader.run_id}: a reader saw the end {reader.end} after {len(reader.seqs)} events, the log's is {log.end}"
            elif reader.text != log.text:
                yield f"{reader.run_id}: a reader has {_apart(reader.text, log.text)}"
            if reader.seqs != list(range(len(self._logs[reader.run_id]))):
                yield f"{reader.run_id}: a reader of {len(self._logs[reader.run_id])} events saw {_jumps(reader.seqs)}"

    def _answers(self) -> Iterator[str]:
        texts: dict[str, set[str]] = defaultdict(set)
        for call in self._history.calls:
            if call.finished:
                texts[call.run_id].add(call.text)
        for run_id, run in self._runs.items():
            if run["status"] != "succeeded":
                continue
            told, output = self._transcripts[run_id].text, json.loads(run["result"])["output"]
            if told != output:
                yield f"{run_id}: the log has {_apart(told, output)}"
            asked = " ".join(row["text"] for row in self._held[run_id])
            counted = "".join(f"{number}-{name} " for most, name in _COUNT.findall(asked) for number in range(int(most)))
            if output != counted if counted else output not in texts[run_id]:
                yield f"{run_id} answered {output[:60]!r}… to {asked[:80]!r}…"
            self.verdict.counts["answers compared"] += 1

    def _fates(self) -> Iterator[str]:
        last: dict[str, int] = {}
        sent = Counter(row["text"] for row in self._history.tables.inputs)
        for key, text in self._history.seen.sent.items():
            if sent[text] != (key not in self._history.seen.refused):
                yield f"{key} is held {sent[text]} times"
        for row in self._history.tables.inputs:
            self.verdict.counts["inputs with a fate"] += row["fate"] is not None
            holder = self._runs[row["held_by"]]
            if row["fate"] is None or row["fate"] != FATES.get(holder["status"]) or row["fate_run"] != holder["id"]:
                yield f"{row['text']!r} of {row['run_id']}: {row['fate']} {row['fate_run']}, held by {holder['id']} ({holder['status']})"
            if last.get(row["session_id"], -1) > holder["session_position"]:
                yield f"{row['text']!r} was answered out of order, in {holder['id']}"
            last[row["session_id"]] = holder["session_position"]
            run: Row | None = self._runs[row["run_id"]]
            while run is not None and run["id"] != holder["id"]:
                run = self._runs.get(run["superseded_by"] or "")
            if run is None:
                yield f"{row['text']!r}: no superseded run leads from {row['run_id']} to {holder['id']}"

    def _money(self) -> Iterator[str]:
        owners = {(row["run_id"], row["epoch"]): row["owner"].rpartition("-")[0] for row in self._history.tables.attempts}
        called: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
        begun: Counter[tuple[str, int]] = Counter()
        for call in self._history.calls:
            begun[call.run_id, call.attempt] += 1
            if call.finished:
                called[call.run_id, call.attempt].append(call.tokens)
        booked: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
        rows: Counter[tuple[str, int]] = Counter()
        for row in self._history.tables.ledger:
            rows[row["run_id"], row["epoch"]] += 1
            if row["cost_usd"] is None:
                yield f"{row['run_id']}: call {row['call']} of attempt {row['epoch']} has no price"
            if not row["unmeasured"]:
                tokens = (row["input_tokens"], row["cached_tokens"], row["output_tokens"], row["reasoning_tokens"])
                booked[row["run_id"], row["epoch"]].append(tokens)
        counts = self.verdict.counts
        for attempt in begun.keys() | rows.keys():
            more = Counter(booked[attempt]) - Counter(called[attempt])
            if more:
                yield f"{attempt[0]}: attempt {attempt[1]} booked {dict(more)} that the provider never gave"
            died = owners.get(attempt, "") in self._history.killed
            missing = begun[attempt] - rows[attempt]
            if missing > died:
                yield f"{attempt[0]}: {missing} calls of attempt {attempt[1]} were not booked; its worker {'died' if died else 'lived'}"
            counts["model calls"] += begun[attempt]
            counts["booked as the provider counted"] += len(booked[attempt])
            counts["booked as cut, with an estimate"] += rows[attempt] - len(booked[attempt])
            counts["died with their worker before it could book"] += max(missing, 0)

    def _budgets(self) -> Iterator[str]:
        """All runs have ended: nothing is set aside any more."""
        paid = sum(row["cost_usd"] or 0 for row in self._history.tables.ledger)
        scopes = {row["scope"]: row for row in self._history.tables.counters}
        users = [row["spent"] for scope, row in scopes.items() if scope.startswith("user:")]
        if "agent" not in scopes or scopes["agent"]["spent"] != paid or sum(users) != paid:
            yield f"the ledger says {paid}, the counters {scopes}"
        for scope, row in scopes.items():
            if row["reserved"] != 0:
                yield f"{scope} has {row['reserved']} set aside for runs that have ended"

    def _refused(self) -> Iterator[str]:
        """Its client sent it once, and was told that it is not taken."""
        runs = {row["client_key"]: row["id"] for row in self._history.tables.runs}
        for key in self._history.seen.refused:
            if key in runs or key in self._history.acted:
                yield f"{key} was refused: run {runs.get(key)}, happened {self._history.acted.get(key, 0)} times"

    def _effects(self) -> Iterator[str]:
        states = {row["key"]: row["state"] for row in self._history.tables.effects}
        ended = {order: row for row in self._history.tables.inputs for order in _ORDER.findall(row["text"])}
        for order, count in self._history.acted.items():
            self.verdict.counts["effects that happened"] += 1
            if count != 1:
                yield f"{order} happened {count} times ({ended[order]['run_id']}, {states.get(order)})"
            if order not in states:
                yield f"{order} happened and is on no record"
        for order, row in ended.items():
            if row["fate"] == "answered_in" and (self._history.acted.get(order) != 1 or states.get(order) != "done"):
                happened = self._history.acted.get(order)
                yield f"{order} was answered in {row['fate_run']}, is {states.get(order)} and happened {happened} times"


def _transcript(log: list[Row]) -> Transcript:
    transcript = Transcript()
    for row in log:
        transcript.feed(row["seq"], row["kind"], json.loads(row["data"]))
    return transcript


def _apart(found: str, wanted: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    return f"…{found[max(at - 10, 0) : at + 30]!r} instead of …{wanted[max(at - 10, 0) : at + 30]!r} at {at}"


def _jumps(seqs: list[int]) -> str:
    jumps = [f"{a}→{b}" for a, b in pairwise(seqs) if b != a + 1]
    return f"{len(seqs)} from {seqs[:1]} to {seqs[-1:]}, jumps {jumps[:5]}"
