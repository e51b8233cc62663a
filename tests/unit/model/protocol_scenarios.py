"""The scenarios: `BASE` (all rules), `WITHOUT` (one rule taken away), `BUGS` (one bug planted), `WALKS` (full size).

A `Proof` of `WITHOUT` or `BUGS` names the property that must fail. Each is small: the search stops at a shortest trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from protocol_checker import STUCK
from protocol_state import Scenario


def kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


STREAM: dict[str, Any] = {"client": True, "tokens": 2}
QUEUE: dict[str, Any] = {"tokens": 0}
ONE_OF_TWO_PLACES: dict[str, Any] = {"tokens": 0, "workers": 1, "places": 2}

# Complete graphs, each small enough for every test run.
BASE: dict[str, Scenario] = {
    "queue: one run, two reapers": Scenario(**QUEUE, reapers=2, faults=1),
    "queue: one run, two faults": Scenario(**QUEUE, kinds=kinds("crash pause flush lost")),
    "queue: late requests": Scenario(workers=1, kinds=kinds("crash pause late")),
    "queue: the stream is lost alone": Scenario(**QUEUE, kinds=kinds("evict crash pause")),
    "queue: two runs, retry or drain": Scenario(
        **QUEUE, sessions=(0, 0), gives=1, faults=1, kinds=kinds("crash pause")
    ),
    "merge: effect, any fault": Scenario(sessions=(0, 0), policy="Merge", effect_at=1, faults=1, workers=1),
    "merge: three submissions": Scenario(sessions=(0, 0, 0), policy="Merge", effect_at=1, faults=0, workers=1),
    "reject: any fault": Scenario(**QUEUE, sessions=(0, 0), policy="Reject", faults=1),
    "effect: lost replies and a crash": Scenario(effect_at=1, workers=1, kinds=kinds("crash lost")),
    "effect: a zombie": Scenario(effect_at=1, faults=1, kinds=kinds("pause")),
    "effect: give-back": Scenario(effect_at=1, gives=1, faults=1, kinds=kinds("crash lost")),
    "outage of Postgres": Scenario(kinds=kinds("outage crash")),
    "outage of Postgres: workers that are slow": Scenario(**QUEUE, kinds=kinds("outage crash pause")),
    "stream: any fault": Scenario(**STREAM, workers=1, faults=1),
    "stream: two workers": Scenario(client=True, faults=1, kinds=kinds("crash pause")),
    "stream: cancel": Scenario(**STREAM, workers=1, faults=1, cancel=True, kinds=kinds("crash cut flush")),
    "stream: checkpoint, give-back": Scenario(
        **STREAM, faults=1, workers=1, checkpoint=1, gives=1, kinds=kinds("lost cut")
    ),
    "stream: gap": Scenario(**STREAM, faults=1, workers=1, checkpoint=1, replay_limit=1, kinds=kinds("crash cut")),
    # wider: two places, two sessions, groups, lost replies of submit and take_over, dead letters
    "places: two entries of one run": Scenario(**ONE_OF_TWO_PLACES, kinds=kinds("crash pause flush lost")),
    "sessions: two": Scenario(**QUEUE, sessions=(0, 1), faults=1, kinds=kinds("crash")),
    "groups: two sessions": Scenario(
        **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=1, kinds=kinds("crash flush lost")
    ),
    "groups: one session": Scenario(**ONE_OF_TWO_PLACES, sessions=(0, 0), groups=True, faults=1),
    "groups: a bad member": Scenario(
        **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=1, bad_run=0, kinds=kinds("lost")
    ),
    "groups: a fenced member": Scenario(
        **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=0, cancel=True
    ),
    "groups: rows that leave the group": Scenario(
        **QUEUE, sessions=(0, 0, 0), policy="Merge", groups=True, workers=1, faults=0
    ),
    "groups: rows that leave the group, lost replies": Scenario(
        **QUEUE, sessions=(0, 0), policy="Merge", groups=True, workers=1, faults=1, kinds=kinds("lost")
    ),
    "lost: submit and take_over": Scenario(gives=1, faults=2, kinds=kinds("lost crash")),
    "lost: late give-back": Scenario(gives=1, faults=1, kinds=kinds("crash late pause")),
    "lost: cancel": Scenario(cancel=True, faults=1),
    "dead letter: the session goes on": Scenario(**QUEUE, sessions=(0, 0), max_lost=2, kinds=kinds("crash lost")),
    "dead letter: a give-back does not count": Scenario(**QUEUE, max_lost=2, gives=1, kinds=kinds("crash lost")),
    "dead letter: the stream ends": Scenario(**STREAM, workers=1, max_lost=1, faults=1),
}  # fmt: skip

# Complete graphs for `protocol_run.py large`.
LARGE: dict[str, Scenario] = {
    "queue: one run, two reapers, two faults": Scenario(**QUEUE, reapers=2, kinds=kinds("crash pause flush lost")),
    "queue: late requests": Scenario(kinds=kinds("crash pause late")),
    "merge: effect, any fault": Scenario(sessions=(0, 0), policy="Merge", effect_at=1, faults=1),
    "merge: three submissions": Scenario(sessions=(0, 0, 0), policy="Merge", effect_at=1, faults=0),
    "effect: two faults": Scenario(effect_at=1, kinds=kinds("crash pause lost")),
    "groups: rows that leave the group, lost replies": Scenario(
        **QUEUE, sessions=(0, 0, 0), policy="Merge", groups=True, workers=1, faults=1, kinds=kinds("lost")
    ),
    "stream: any fault, give-back": Scenario(**STREAM, workers=1, faults=1, gives=1),
    "stream: two workers": Scenario(**STREAM, faults=1),
    "queue: two runs, retry or drain": Scenario(**QUEUE, sessions=(0, 0), gives=1, faults=1),
    "lost: submit and take_over, pause": Scenario(gives=1, faults=2, kinds=kinds("lost crash pause")),
    "stream: cancel": Scenario(**STREAM, workers=1, faults=1, cancel=True),
    "stream: checkpoint, give-back": Scenario(
        **STREAM, faults=1, workers=1, checkpoint=1, gives=1, kinds=kinds("crash cut flush lost")
    ),
    "sessions: two": Scenario(**QUEUE, sessions=(0, 1), faults=1),
    "groups: two sessions": Scenario(**ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=1),
    "groups: one session, give-back": Scenario(
        **ONE_OF_TWO_PLACES, sessions=(0, 0), groups=True, gives=1, faults=1
    ),
    "groups: a bad member": Scenario(
        **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=1, bad_run=0, kinds=kinds("crash lost pause")
    ),
    "groups: rows that leave the group, effect": Scenario(
        sessions=(0, 0, 0), racing=True, policy="Merge", effect_at=1, groups=True, workers=1, faults=0
    ),
    "dead letter: a give-back does not count": Scenario(max_lost=2, gives=1, kinds=kinds("crash pause")),
}  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """Without its rule, or with its bug, `scenario` must violate `property`."""

    scenario: Scenario
    property: str


def without(rule: str, must_fail: str, **size: Any) -> Proof:
    return Proof(Scenario(without=frozenset((rule,)), symmetry=False, **size), must_fail)


def bug(name: str, must_fail: str, **size: Any) -> Proof:
    return Proof(Scenario(bugs=frozenset((name,)), symmetry=False, **size), must_fail)


WITHOUT: dict[str, Proof] = {
    "lease_scan, FLUSHALL": without("lease_scan", STUCK, **QUEUE, kinds=kinds("crash flush")),
    "lease_scan, pause": without("lease_scan", STUCK, **QUEUE, kinds=kinds("crash pause")),
    "claim_names_epoch": without("claim_names_epoch", "P10", **QUEUE, gives=1, faults=1, kinds=kinds("late")),
    "reserve_never_falls": without(
        "reserve_never_falls", "P4",
        client=True, tokens=3, reserve=1, workers=1, kinds=kinds("late"), faults=1, cancel=True,
    ),
    "cursor_up_to_top": without("cursor_up_to_top", "P4", **STREAM, kinds=kinds("crash cut")),
    "gap_in_parts": without(
        "gap_in_parts", "P4", **STREAM, workers=1, checkpoint=1, replay_limit=1, kinds=kinds("crash cut")
    ),
    "claim_copies_checkpoint": without(
        "claim_copies_checkpoint", "P4", **STREAM, workers=1, checkpoint=1, kinds=kinds("crash")
    ),
    "merge_the_last": without(
        "merge_the_last", "P7", **QUEUE, sessions=(0,) * 4, policy="Merge", effect_at=1, faults=0, workers=1
    ),
    "effects_after_lock": without(
        "effects_after_lock", "P8", sessions=(0, 0), policy="Merge", effect_at=1, faults=0, workers=1
    ),
    "effect_has_token": without("effect_has_token", "P11", effect_at=1, kinds=kinds("lost"), faults=1),
    "insert_before_policy, Merge": without("insert_before_policy", "P7", policy="Merge", faults=1, kinds=kinds("again")),
    "insert_before_policy, Reject": without("insert_before_policy", "P7", policy="Reject", faults=1, kinds=kinds("lost")),
    "take_over_rechecks_lease": without("take_over_rechecks_lease", "P9", **QUEUE, faults=1, kinds=kinds("pause")),
    "attempt_outlives_its_deadline": without("attempt_outlives_its_deadline", "P10", faults=1, kinds=kinds("outage")),
    "reaper_waits_after_outage": without("reaper_waits_after_outage", "P10", faults=1, kinds=kinds("outage")),
    "take_over_names_contact": without("take_over_names_contact", "P10", kinds=kinds("outage pause")),
    "owner_has_nonce": without("owner_has_nonce", "P6", **ONE_OF_TWO_PLACES, faults=1, kinds=kinds("flush")),
    "run_once_in_group": without(
        "run_once_in_group", "P6", **ONE_OF_TWO_PLACES, groups=True, faults=1, kinds=kinds("flush")
    ),
    "bad_member_splits_group": without(
        "bad_member_splits_group", "P11", **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, faults=0, bad_run=0
    ),
    "own_give_back_stores_buffer": without("own_give_back_stores_buffer", "P4", **STREAM, gives=1, faults=0, workers=1),
    "lost_entries_leave_the_hash": without("lost_entries_leave_the_hash", STUCK, **QUEUE, kinds=kinds("evict"), faults=1),
    "dead_letter_in_take_over": without("dead_letter_in_take_over", "P11", **QUEUE, max_lost=1, kinds=kinds("crash")),
    "only_a_running_claim_is_mine": without(
        "only_a_running_claim_is_mine", "P5", **QUEUE, cancel=True, kinds=kinds("lost"), faults=1
    ),
    "rows_apart_in_order": without(
        "rows_apart_in_order", "P7", **QUEUE, sessions=(0, 0, 0), policy="Merge", groups=True, workers=1, faults=0
    ),
    "position_with_insert": without(
        "position_with_insert", "P6",
        sessions=(0, 0, 0), racing=True, policy="Merge", effect_at=1, groups=True, faults=0, workers=1, places=2,
    ),
}  # fmt: skip

BUGS: dict[str, Proof] = {
    "answer_before_commit": bug("answer_before_commit", STUCK, faults=1),
    "ack_before_finish, no lease scan": Proof(
        Scenario(
            **QUEUE,
            kinds=kinds("crash"),
            faults=1,
            without=kinds("lease_scan"),
            bugs=kinds("ack_before_finish"),
        ),
        STUCK,
    ),
    "check_then_write": bug("check_then_write", "P5", kinds=kinds("pause"), faults=1),
    "no_lease_check": bug("no_lease_check", "P9", **QUEUE, kinds=kinds("pause crash")),
    "contact_before_the_look": bug("contact_before_the_look", "P10", faults=1, kinds=kinds("outage")),
    "zero_is_fenced": bug("zero_is_fenced", "P10", **QUEUE, kinds=kinds("lost"), faults=1),
    "hash_never_cleared, no look-up": Proof(
        Scenario(**QUEUE, faults=0, without=kinds("lost_entries_leave_the_hash"), bugs=kinds("hash_never_cleared")), STUCK
    ),
    "published_at": Proof(
        Scenario(
            **QUEUE,
            kinds=kinds("flush"),
            faults=1,
            without=kinds("lost_entries_leave_the_hash"),
            bugs=kinds("published_at"),
        ),
        STUCK,
    ),
    "terminal_before_commit": bug("terminal_before_commit", "P4", **STREAM, kinds=kinds("crash"), faults=1),
    "reserve_not_durable": bug("reserve_not_durable", "P4", **STREAM, reserve=1, faults=0, cancel=True),
    "no_voids": bug("no_voids", "P4", **STREAM, kinds=kinds("crash"), faults=1),
    "no_top_comparison": bug("no_top_comparison", STUCK, **STREAM, kinds=kinds("channel"), faults=1, workers=1),
    "any_effect_is_mine": bug("any_effect_is_mine", "P8", effect_at=1, kinds=kinds("crash"), faults=1),
    "id_made_per_try": bug("id_made_per_try", "P7", **QUEUE, kinds=kinds("lost"), faults=1),
    "give_back_names_no_epoch": bug("give_back_names_no_epoch", "P5", **QUEUE, gives=1, kinds=kinds("lost pause")),
    "one_fenced_member_fails_group": bug(
        "one_fenced_member_fails_group", "P10",
        **ONE_OF_TWO_PLACES, sessions=(0, 1), groups=True, cancel=True, faults=0,
    ),
    "merge_across_sessions": bug("merge_across_sessions", "P7", **QUEUE, sessions=(0, 1), policy="Merge", faults=0),
    "quarantine_counts_attempts": bug("quarantine_counts_attempts", "P11", **QUEUE, max_lost=2, gives=1, faults=1),
    "dead_letter_leaves_the_run": bug("dead_letter_leaves_the_run", "P11", **QUEUE, max_lost=1, faults=1),
}  # fmt: skip

# Not bugs: the protocol bears these orders, so nothing may be built on their absence.
HARMLESS: dict[str, Scenario] = {
    "ack_before_claim": Scenario(**QUEUE, kinds=kinds("crash"), faults=1, bugs=kinds("ack_before_claim")),
    "ack_before_finish": Scenario(**QUEUE, kinds=kinds("crash"), faults=1, bugs=kinds("ack_before_finish")),
}

FULL = Scenario(
    sessions=(0, 1, 0, 0),
    tokens=3,
    checkpoint=2,
    places=2,
    groups=True,
    reapers=2,
    gives=1,
    client=True,
    cancel=True,
    max_lost=2,
)
WALKS: dict[str, Scenario] = {
    "Enqueue": FULL,
    "Merge": replace(FULL, policy="Merge"),
    "Merge, effect": replace(FULL, policy="Merge", effect_at=2, racing=True),
    "Merge, gap, four faults": replace(FULL, policy="Merge", replay_limit=2, faults=4),
    "Reject, a bad member": replace(FULL, policy="Reject", bad_run=1),
}
