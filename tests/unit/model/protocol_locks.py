"""The order of row locks: can transactions wait for each other?

A transaction is the list of the locks that it takes, in its order; the modes are Postgres' row locks
(https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS): KS = FOR KEY SHARE, which a foreign-key
check takes; NU = FOR NO KEY UPDATE; U = FOR UPDATE. To insert a unique key counts as NU on that key: a second
insert waits for the first one's end.

The rows: sessions s1, s2 with runs r1, r2, their running attempts a1, a2, budget counters b1, b2, the unique keys
of sessions (n…), of runs (k…) and of ledger rows (l…: a call that is reported again waits for the first report); ledger rows that are
there and change (m…).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

Lock = tuple[str, str]
Transaction = Sequence[Lock]

BLOCKS = frozenset((("KS", "U"), ("U", "KS"), ("NU", "NU"), ("NU", "U"), ("U", "NU"), ("U", "U")))


def locks(text: str) -> Transaction:
    """ "s1 r1 r1:KS" -> [(s1, NU), (r1, NU), (r1, KS)]"""
    return [(row, mode or "NU") for row, _, mode in (item.partition(":") for item in text.split())]


# Ledger rows by key (no fence holds for them), sessions by id, runs by id, attempts by (run, epoch), ledger rows that change,
# counters last.
# Where a group has one member, the second name of a row is left out.
TRANSACTIONS: Mapping[str, Transaction] = {
    "submit group": locks("n1 n2 s1 s2 k1 k2 b1 b2"),
    "submit, merges": locks("s2 k3 r2 a2 b1 b2"),
    "submit, queues": locks("s1 k1 b1"),
    "claim group": locks("r1 r2 a1 a2 r1:KS r2:KS"),
    "flush group": locks("l1 l2 a1 a2 r1:KS r2:KS m1 m2 b1 b2"),
    "checkpoint with booking": locks("l2 a2 r2:KS m2 b1 b2"),
    "effect": locks("a1 r1:KS"),
    "booking": locks("l1 a1 m1 b1 b2"),
    "renew group": locks("a1 a2"),
    "finish group": locks("l1 l2 s1 s2 r1 r2 a1 a2 r1:KS r2:KS m1 m2 b1 b2"),
    "take_over": locks("l1 s1 r1 a1 m1 r1:KS b1 b2"),
    "take_over group": locks("l1 l2 s1 s2 r1 r2 a1 a2 m1 r1:KS m2 r2:KS b1 b2"),
    # every later lock but the new key is held already; b1 and b2 may be days
    "slots, Replace": locks("t1 n1 s1 s2 r1 a1 b1 b2 s1 s2 r1 a1 r1:KS b1 s1 s2 k3 b1 b2"),
    "reprice": locks("a1 a2 m1 m2 b1 b2"),
}

# Each of these deadlocks with some transaction above.
PLANTED: Mapping[str, Transaction] = {
    "take_over locks the run FOR UPDATE": locks("s1 r1:U a1"),
    "finish fences first": locks("a1 r1 s1"),
    "finish reads the session last": locks("r1 a1 s1"),
    "claims of a group in no order": locks("r2 r1"),
    "flushes of a group in no order": locks("a2 a1 r2:KS r1:KS"),
    "finishes of a group in no order": locks("s1 s2 r1 r2 a2 a1"),
    "sessions of a group in no order": locks("s2 s1 k1 k2"),
    "new sessions of a group in no order": locks("n2 n1 s1 s2 k1 k2"),
    "a call is booked after the fence": locks("a1 l1"),
    "a re-report locks the row that is there": locks("l1 m1 a1"),
    "a late call's later attempts come after the group's": locks("l1 a2 a1"),
    "counters in no order": locks("a1 b2 b1"),
    "merges of one transaction count one by one": locks("s1 s2 k1 r1 a1 b1 k2 r2 a2 b1"),
    "Replace counts the day of the old run before that of the new one": locks("t1 s1 r1 a1 b2 k3 b1"),
    "slots of one transaction count one by one": locks("t1 s1 k1 b1 k2 r1 a1 b1"),
}


def deadlock(transactions: Sequence[Transaction]) -> str:
    """How these transactions come to wait for each other, or "" if they cannot."""
    start = (0,) * len(transactions)
    todo, seen = [start], {start}
    while todo:
        at = todo.pop()
        following = [
            (*at[:t], at[t] + 1, *at[t + 1 :]) for t in range(len(at)) if _may_go_on(transactions, at, t)
        ]  # fmt: skip
        if not following and any(at[t] < len(tx) for t, tx in enumerate(transactions)):
            stuck = [(list(tx[: at[t]]), tx[at[t]]) for t, tx in enumerate(transactions) if at[t] < len(tx)]
            return "; ".join(f"one holds {held} and waits for {wanted}" for held, wanted in stuck)
        todo += [state for state in following if state not in seen]
        seen.update(following)
    return ""


def _may_go_on(transactions: Sequence[Transaction], at: tuple[int, ...], t: int) -> bool:
    if at[t] == len(transactions[t]):
        return False
    row, mode = transactions[t][at[t]]
    return not any(
        held_row == row and (held_mode, mode) in BLOCKS
        for other, tx in enumerate(transactions)
        if other != t and at[other] < len(tx)  # what has all its locks commits and lets them go
        for held_row, held_mode in tx[: at[other]]
    )


def deadlocks(transactions: Mapping[str, Transaction], together: int) -> Iterable[str]:
    """Every combination of `together` transactions (also of two alike) that can deadlock."""
    for names in combinations_with_replacement(transactions, together):
        found = deadlock([transactions[name] for name in names])
        if found:
            yield f"{' + '.join(names)}: {found}"
