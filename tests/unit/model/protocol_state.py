"""The state of the protocol model: values only, and the reducer from events to text.

Every value is a tuple of ints, strings and tuples, so that states hash and compare. A missing number is -1.
Names are those of docs/architecture.md; where a number stands for an identity (entry, place), the model renames
it after every step, so that equal situations are equal states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

FINAL = frozenset(("succeeded", "failed", "cancelled", "superseded"))
GONE = -1  # an owner whom nobody can be any more: its process died, or its place let the entry go
REAPER = -2  # the reaper as the consumer of a pending entry
UP, PAUSED = 0, 1  # a worker process
DONE = -1  # Run.effect
BEGUN, CALLED, SETTLED, UNKNOWN = 1, 2, 3, 4  # Place.effect: how far the attempt is with it, or that nobody knows


class Event(NamedTuple):
    """One row of the log. kind: t = token, v = void, r = restart {keep}, E = terminal."""

    epoch: int
    kind: str
    value: Any


class Attempt(NamedTuple):
    epoch: int
    owner: int  # the place that claimed (stands for consumer name + "/" + nonce)
    outcome: str
    lease: bool  # alive by Postgres' clock
    reserved: int  # seq_reserved
    checkpoint_seq: int
    checkpoint: int  # the last token that the checkpoint holds
    hurt: bool  # not in the database: its worker really failed, so that it may count as lost


class Run(NamedTuple):
    key: int
    session: int
    position: int
    status: str
    epoch: int
    due: bool
    inputs: tuple[int, ...]
    superseded_by: int
    effect: int  # its row: 0 = none, an epoch = initiated by that attempt's call (stands for its token), DONE
    called: bool  # not in the database: the outside call was made
    attempts: tuple[Attempt, ...]
    log: tuple[Event, ...]
    lost: int  # number of attempts with outcome lost
    dead_letter: bool


class Place(NamedTuple):
    """One of a worker's free or used places: it holds at most one entry.

    pc: idle look claim run checked give fail terminal heads republish ack."""

    pc: str
    entry: int
    run: int
    epoch: int
    token: int  # the next one
    seq: int  # the next one
    known: int  # the seq_reserved that it has seen committed
    buffer: tuple[Event, ...]
    retry: int
    seen: int  # the run's epoch when it looked
    effect: int  # 0 or one of BEGUN, CALLED, SETTLED, UNKNOWN


class Reaper(NamedTuple):
    pc: str
    entry: int
    run: int
    epoch: int
    steady: bool  # its contact, a lease long, is good enough for a take-over; Postgres judges it, by its clock


class Client(NamedTuple):
    """A client of run 0 together with the gateway's side of its stream."""

    pc: str
    cursor: int
    items: tuple[tuple[int, Any], ...]
    inbox: tuple[tuple[int, Event], ...]
    ended: bool


class Submission(NamedTuple):
    """state: new committed done retry rejected | decided apart (value: see there)."""

    state: str
    value: int


class State(NamedTuple):
    runs: tuple[Run, ...]
    stream: tuple[tuple[int, int], ...]  # undelivered (entry, run)
    pending: tuple[tuple[int, int, int], ...]  # delivered (entry, run, worker)
    entries: tuple[int, ...]  # the hash: run -> entry, 0 = none
    events: tuple[tuple[int, Event], ...]  # run 0's stream of events
    workers: tuple[int, ...]  # UP or PAUSED
    places: tuple[Place, ...]  # worker w's are w * places … w * places + places - 1
    reapers: tuple[Reaper, ...]
    sweep: int  # the run that the sweep is about to publish
    submissions: tuple[Submission, ...]
    cancel: str
    client: Client
    network: tuple[tuple[Any, ...], ...]  # requests that arrive late
    faults: int  # left
    gives: int  # hand-backs and retryable errors left
    outage: bool  # less than one lease ago


Step = tuple[str, State, bool]

FENCED: dict[str, Any] = {"pc": "ack", "buffer": (), "retry": 0}
IDLE = Place("idle", 0, -1, -1, 0, -1, -1, (), 0, -1, 0)
RESTING = Reaper("idle", 0, -1, -1, False)
ALL_KINDS = frozenset(("crash", "pause", "lost", "flush", "channel", "again", "late", "cut"))

# The rules of docs/architecture.md that can be taken away one by one.
RULES = frozenset(
    (
        # submit
        "insert_before_policy",  # a replay changes nothing and is never a 409
        "merge_the_last",  # the session's last unfinished run, not its head
        "effects_after_lock",  # read in a statement after the one that locked the attempt
        "position_with_insert",  # a row that left its group takes its position where it is inserted
        "rows_apart_in_order",
        # claim
        "claim_names_epoch",
        "claim_copies_checkpoint",
        "owner_has_nonce",
        "only_a_running_claim_is_mine",  # an attempt that has ended meanwhile is not begun
        "run_once_in_group",
        "bad_member_splits_group",
        # attempts and their end
        "reserve_never_falls",
        "own_give_back_stores_buffer",
        "effect_has_token",  # a call that is asked for again finds its own row
        "lease_scan",
        "take_over_rechecks_lease",
        "attempt_outlives_its_deadline",  # past it an attempt pauses and may renew late
        "reaper_waits_after_outage",
        "take_over_names_contact",  # refused when Postgres was away between the reaper's contact and its act
        "dead_letter_in_take_over",
        # bus and stream
        "lost_entries_leave_the_hash",
        "cursor_up_to_top",
        "gap_in_parts",
    )
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The size of a model, what may happen in it, which rules it lacks and which bugs are planted."""

    sessions: tuple[int, ...] = (0,)  # of each submission
    racing: bool = False  # submissions of one session do not wait for each other
    policy: str = "Enqueue"
    tokens: int = 1
    reserve: int = 2  # numbers reserved by a claim and a flush (the code: 128)
    checkpoint: int = 0  # after this token; 0 = none
    workers: int = 2
    places: int = 1
    groups: bool = False  # several members in one transaction
    reapers: int = 1
    faults: int = 2
    kinds: frozenset[str] = ALL_KINDS
    gives: int = 0
    max_lost: int = 99
    cancel: bool = False
    client: bool = False
    effect_at: int = 0  # before this token; 0 = none
    replay_limit: int = 99
    bad_run: int = -1  # the run whose result no transaction can store
    symmetry: bool = True
    without: frozenset[str] = frozenset()
    bugs: frozenset[str] = frozenset()


def up(s: State, q: int, **changes: Any) -> State:
    """One of the places, changed."""
    return s._replace(places=put(s.places, q, s.places[q]._replace(**changes)))


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def reduce_event(items: tuple[tuple[int, Any], ...], seq: int, event: Event) -> tuple[tuple[tuple[int, Any], ...], bool]:
    """The items after the event, and whether it was the terminal one."""
    if event.kind == "t":
        return (*items, (seq, event.value)), False
    if event.kind == "r":
        return tuple(item for item in items if item[0] <= event.value), False
    return items, event.kind == "E"


def reduce_log(log: tuple[Event, ...]) -> tuple[tuple[int, Any], ...]:
    items: tuple[tuple[int, Any], ...] = ()
    for seq, event in enumerate(log):
        items, _ = reduce_event(items, seq, event)
    return items


def text_of(items: tuple[tuple[int, Any], ...]) -> tuple[tuple[int, int], ...]:
    """The tokens as (epoch, token); a gap's part holds several."""
    out: tuple[tuple[int, int], ...] = ()
    for _, token in items:
        out += token if isinstance(token[0], tuple) else (token,)
    return out
