"""The judge finds each kind of harm: a good history, and the same with one thing wrong."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from chaos_history import Accepted, History, Reader, Seen, Tables
from chaos_judge import judge
from chaos_plan import plan
from chaos_provider import ModelCall
from chaos_run import Outcome, shown_failure

FIRST, SECOND = "00000000-0000-7000-8000-000000000001", "00000000-0000-7000-8000-000000000002"
ORDER = '[[tool charge {"order": "m1"}]]'


def event(run: str, seq: int, kind: str, data: Any = None, epoch: int = 1) -> dict[str, Any]:
    return {"run_id": run, "seq": seq, "epoch": epoch, "kind": kind, "data": json.dumps(data or {})}


def run_row(run: str, position: int, status: str, **more: Any) -> dict[str, Any]:
    row = {"id": run, "session_id": "s", "session_position": position, "status": status, "epoch": 1, "client_key": f"m{position}"}
    return {**row, "result": None, "error": None, "superseded_by": None, **more}


def good() -> History:
    """m0 is superseded by m1, which acts, and answers both in its second attempt; the first died with its worker. m2 was refused."""
    seen = Seen(
        sent={"m0": "one", "m1": f"{ORDER} two", "m2": "three"},
        refused={"m2"},
        accepted=[Accepted("m0", FIRST, False), Accepted("m1", SECOND, False), Accepted("m1", SECOND, True)],
        readers=[Reader(FIRST, [0, 1], "", "superseded", 1), Reader(SECOND, [0, 1, 2, 3, 4, 5], "ab", "completed", 2)],
    )
    item = {"item": 0, "type": "message"}
    messages = [
        event(FIRST, 0, "restart", {"keep": -1}),
        event(FIRST, 1, "superseded", {"by": SECOND}),
        event(SECOND, 0, "created"),
        event(SECOND, 1, "void"),
        event(SECOND, 2, "restart", {"keep": -1}),
        event(SECOND, 3, "item_added", item, 2),
        event(SECOND, 4, "text_delta", {"item": 0, "text": "ab"}, 2),
        event(SECOND, 5, "completed", {}, 2),
    ]
    ledger = {"run_id": SECOND, "epoch": 2, "call": 0, "input_tokens": 8, "cached_tokens": 4, "output_tokens": 1}
    tables = Tables(
        runs=[
            run_row(FIRST, 0, "superseded", superseded_by=SECOND),
            run_row(SECOND, 1, "succeeded", epoch=2, result=json.dumps({"output": "ab"})),
        ],
        attempts=[
            {"run_id": FIRST, "epoch": 1, "owner": "worker-0-aa/1", "outcome": "interrupted"},
            {"run_id": SECOND, "epoch": 1, "owner": "worker-0-aa/2", "outcome": "lost"},
            {"run_id": SECOND, "epoch": 2, "owner": "worker-1-bb/3", "outcome": "finished"},
        ],
        messages=messages,
        inputs=[
            {
                "run_id": run,
                "held_by": SECOND,
                "session_id": "s",
                "position": n,
                "text": text,
                "fate": "answered_in",
                "fate_run": SECOND,
            }
            for n, (run, text) in enumerate([(FIRST, "one"), (SECOND, f"{ORDER} two")])
        ],
        ledger=[{**ledger, "reasoning_tokens": 0, "cost_usd": Decimal("0.1"), "unmeasured": False}],
        effects=[{"run_id": SECOND, "name": "charge", "key": "m1", "state": "done"}],
        dead_letters=[],
        counters=[{"scope": scope, "reserved": 0, "spent": Decimal("0.1")} for scope in ("agent", "user:ann")],
    )
    calls = [ModelCall(SECOND, 1, True, (8, 4, 1, 0), "ab"), ModelCall(SECOND, 2, True, (8, 4, 1, 0), "ab")]
    return History(seen, tables, calls, {"m1": 1}, frozenset({"worker-0"}))


def test_a_good_history_has_no_finding() -> None:
    verdict = judge(good())
    assert verdict.good, str(verdict)
    assert verdict.counts["readers"] == 2
    assert verdict.counts["died with their worker before it could book"] == 1


ENDS, NUMBERS, READERS = (
    "every 202 has one run and exactly one end",
    "a log counts 0, 1, 2… to its only end",
    "what a reader saw is the log",
)
ANSWERS, FATES = "an answer is whole, and each piece of it is there once", "every message has one fate, in order"
BUDGETS, REFUSED = "the budgets are what the ledger says", "what was refused leaves nothing"
MONEY, EFFECTS, REDIS = "the ledger is what the provider counted", "an effect happens once", "nothing is left in Redis"

HARM: list[tuple[str, str, Callable[[History], Any]]] = [
    ("a run is lost", ENDS, lambda h: h.seen.accepted.append(Accepted("m9", "gone", False))),
    ("two runs for one key", ENDS, lambda h: h.seen.accepted.append(Accepted("m1", FIRST, False))),
    ("a message without an answer", ENDS, lambda h: h.seen.sent.update(m7="never")),
    ("a run that nobody sent", ENDS, lambda h: h.tables.runs[0].update(client_key="x")),
    ("a run that does not end", ENDS, lambda h: h.tables.runs[1].update(status="pending")),
    ("an attempt without an end", ENDS, lambda h: h.tables.attempts[1].update(outcome="running")),
    ("a run done twice", ENDS, lambda h: h.tables.attempts[1].update(outcome="finished")),
    ("an attempt too many", ENDS, lambda h: h.tables.runs[1].update(epoch=3)),
    ("a failure of its own", ENDS, lambda h: h.tables.runs[1].update(status="failed", error='{"type": "agent_error"}')),
    (
        "a failure without a dead letter",
        ENDS,
        lambda h: h.tables.runs[1].update(status="failed", error='{"type": "effect_unknown"}'),
    ),
    ("a dead letter too early", ENDS, lambda h: h.tables.dead_letters.append({"run_id": SECOND})),
    ("a hole", NUMBERS, lambda h: h.tables.messages.pop(3)),
    ("two ends", NUMBERS, lambda h: h.tables.messages[3].update(kind="failed")),
    ("another end than the run's", NUMBERS, lambda h: h.tables.messages[-1].update(kind="failed")),
    ("a dead attempt writes", NUMBERS, lambda h: h.tables.messages[-1].update(epoch=1)),
    ("a reader with another text", READERS, lambda h: setattr(h.seen.readers[1], "text", "aab")),
    ("a reader without an end", READERS, lambda h: setattr(h.seen.readers[1], "end", None)),
    ("a reader who misses an event", READERS, lambda h: h.seen.readers[1].seqs.pop(2)),
    ("a reader who sees one twice", READERS, lambda h: h.seen.readers[1].seqs.insert(2, 2)),
    ("an output that is not the log's", ANSWERS, lambda h: h.tables.runs[1].update(result='{"output": "a"}')),
    ("an answer that no call gave", ANSWERS, lambda h: setattr(h, "calls", [])),
    ("an input without a fate", FATES, lambda h: h.tables.inputs[0].update(fate=None, fate_run=None)),
    ("another fate than its run's", FATES, lambda h: h.tables.inputs[0].update(fate="failed_in")),
    ("an input that got lost", FATES, lambda h: h.tables.inputs.pop(0)),
    ("answered out of order", FATES, lambda h: h.tables.inputs[1].update(held_by=FIRST)),
    ("booked twice", MONEY, lambda h: h.tables.ledger.append({**h.tables.ledger[0], "call": 1})),
    ("booked otherwise", MONEY, lambda h: h.tables.ledger[0].update(output_tokens=2)),
    ("not booked by a worker that lived", MONEY, lambda h: h.tables.ledger.clear()),
    ("not booked though it lived", MONEY, lambda h: setattr(h, "killed", frozenset())),
    ("two calls lost with one worker", MONEY, lambda h: h.calls.append(h.calls[0])),
    ("without a price", MONEY, lambda h: h.tables.ledger[0].update(cost_usd=None)),
    ("spent and not counted", BUDGETS, lambda h: h.tables.counters[0].update(spent=0)),
    ("counted for nobody", BUDGETS, lambda h: h.tables.counters.pop(1)),
    ("counted and not spent", BUDGETS, lambda h: h.tables.counters[1].update(spent=2)),
    ("set aside for ever", BUDGETS, lambda h: h.tables.counters[1].update(reserved=1)),
    ("refused and stored", REFUSED, lambda h: h.tables.runs[0].update(client_key="m2")),
    ("refused and done", REFUSED, lambda h: setattr(h, "acted", {"m1": 1, "m2": 1})),
    ("refused and held", FATES, lambda h: h.tables.inputs.append({**h.tables.inputs[0], "text": "three"})),
    ("given up without a reason", ENDS, lambda h: h.seen.refused.clear()),
    ("an effect twice", EFFECTS, lambda h: setattr(h, "acted", {"m1": 2})),
    ("an effect that never happened", EFFECTS, lambda h: setattr(h, "acted", {})),
    ("an effect without a record", EFFECTS, lambda h: h.tables.effects.clear()),
    ("an effect that nobody settled", EFFECTS, lambda h: h.tables.effects[0].update(state="initiated")),
    ("entries left behind", REDIS, lambda h: setattr(h, "left", 3)),
    ("a wrong answer", "no client gets an answer that it cannot deal with", lambda h: h.seen.wrong.append("400")),
]


@pytest.mark.parametrize(("promise", "harm"), [case[1:] for case in HARM], ids=[case[0] for case in HARM])
def test_each_harm_is_found(promise: str, harm: Callable[[History], Any]) -> None:
    history = copy.deepcopy(good())
    harm(history)
    assert judge(history).findings[promise]


def test_a_failure_shows_seed_rows_and_where_the_rest_is(tmp_path: Path) -> None:
    history = good()
    history.tables.ledger[0]["output_tokens"] = 2
    history.seen.counts["503"] += 1
    outcome = Outcome(plan(7, 20), history, judge(history), Counter(), 1.0, 1.0, 1.0)
    shown = shown_failure(outcome, tmp_path)
    assert "seed 7" in shown and str(tmp_path) in shown
    assert f"run {SECOND}" in shown and "'output_tokens': 2" in shown and "5/2 completed" in shown
    assert json.loads((tmp_path / "history.json").read_text())["seen"]["readers"][1]["text"] == "ab"
    assert f"BROKEN: {MONEY}: 1" in str(outcome)


def test_a_fault_that_was_not_felt_is_named() -> None:
    bites = Counter({"attempts lost": 1, "runs swept": 0})
    short, usual, long = (Outcome(plan(7, runs), good(), judge(good()), bites, 1.0, 1.0, 1.0) for runs in (20, 200, 2000))
    assert short.toothless() == []
    assert "runs swept" in usual.toothless() and not {"attempts lost", "kill worker"} & set(usual.toothless())
    assert {"runs swept", "kill worker"} <= set(long.toothless()) and "attempts lost" not in long.toothless()
