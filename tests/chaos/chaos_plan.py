"""What happens in a chaos run, decided beforehand by a seed: which fault each second, and what clients send. Pure."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

LEASE_SECONDS = 2
RUNS_PER_SECOND = 4
GATEWAYS, WORKERS = 2, 3
SESSIONS_PER_RUN = 0.1
SHIELDED_LEASES = 4
"""Faults after which nothing is reaped for a lease, as nobody can tell a dead worker from a deaf one, are so far apart."""


class Fault(StrEnum):
    """What is done to the system."""

    KILL_WORKER = "kill worker"
    STOP_WORKER = "stop worker"
    DRAIN_WORKER = "drain worker"
    KILL_GATEWAY = "kill gateway"
    STOP_GATEWAY = "stop gateway"
    KILL_SCHEDULER = "kill scheduler"
    STOP_SCHEDULER = "stop scheduler"
    FLUSH_REDIS = "FLUSHALL"
    RESTART_REDIS = "restart Redis"
    RESTART_POSTGRES = "restart Postgres"
    CUT = "cut link"
    SLOW = "slow link"
    LOSE_REPLIES = "lose replies"


class Store(StrEnum):
    """Which of a process' two links."""

    POSTGRES = "postgres"
    REDIS = "redis"


LINKS = [f"gateway-{n}" for n in range(GATEWAYS)] + [f"worker-{n}" for n in range(WORKERS)] + ["scheduler-0"]
_WEIGHTS = {
    Fault.KILL_WORKER: 4,
    Fault.STOP_WORKER: 4,
    Fault.DRAIN_WORKER: 2,
    Fault.CUT: 3,
    Fault.LOSE_REPLIES: 3,
    Fault.FLUSH_REDIS: 2,
}
_REPLIES = {
    Store.POSTGRES: {
        "gateway": ["submit_group", "follow_up", "take_over"],
        "worker": ["claim", "flush", "finish", "take_over", "renew", "begin_effects", "settle_effects"],
        "scheduler": ["take_over"],
    },
    Store.REDIS: {"gateway": ["EVALSHA"], "worker": ["XREADGROUP", "EVALSHA"], "scheduler": ["EVALSHA", "XADD"]},
}


@dataclass(frozen=True)
class Step:
    """One fault. `place` is a process by its role and number (its link for CUT, SLOW and LOSE_REPLIES), "" for a store's fault.

    `seconds` is how long it lasts, `text` which replies are lost.
    """

    at: float
    fault: Fault
    place: str
    seconds: float = 0.0
    store: Store = Store.POSTGRES
    text: str = ""

    @property
    def replies(self) -> list[str]:
        """All that may be lost on its link."""
        return _REPLIES[self.store][self.place.partition("-")[0]]

    @property
    def shields(self) -> bool:
        """Whether the reaper must begin anew to count its contact with Postgres."""
        return self.fault is Fault.RESTART_POSTGRES or (
            self.place.startswith("scheduler")
            and self.store is Store.POSTGRES
            and self.fault in (Fault.CUT, Fault.SLOW, Fault.LOSE_REPLIES)
        )

    def __str__(self) -> str:
        what = f"{self.store} {self.text}" if self.fault in (Fault.CUT, Fault.SLOW, Fault.LOSE_REPLIES) else ""
        return " ".join(
            filter(None, (f"{self.at:6.1f}", self.fault, self.place, what, f"{self.seconds:.1f} s" if self.seconds else ""))
        )


@dataclass(frozen=True)
class Submission:
    """One message of a client, and how it behaves.

    `copies` requests go out at once with one key, and `again` seconds later another. `followers` are seeds of readers that break off.
    `cancel` seconds after the answer the run is cancelled. `gives_up`: when the day's budget is set aside for others, it is not sent again.
    """

    at: float
    number: int
    session: str
    text: str
    copies: int = 1
    again: float | None = None
    followers: tuple[int, ...] = ()
    cancel: float | None = None
    gives_up: bool = False

    @property
    def key(self) -> str:
        return f"m{self.number}"


@dataclass(frozen=True)
class Plan:
    """A whole chaos run."""

    seed: int
    seconds: float
    steps: tuple[Step, ...]
    submissions: tuple[Submission, ...]


def plan(seed: int, runs: int) -> Plan:
    """The same seed and number of runs are the same plan."""
    seconds = runs / RUNS_PER_SECOND
    return Plan(seed, seconds, tuple(_steps(random.Random(f"{seed} faults"), seconds)), tuple(_submissions(seed, runs)))


def _steps(rng: random.Random, seconds: float) -> list[Step]:
    """One a second, dealt from a pack that holds every fault, so that none is left out for long."""
    steps: list[Step] = []
    pack: list[Fault] = []
    postponed: list[Step] = []
    last_shield = -float("inf")
    for second in range(1, int(seconds)):
        at = second + rng.random() / 2
        free = at - last_shield > SHIELDED_LEASES * LEASE_SECONDS
        if free and postponed:
            step = postponed.pop(0)
        else:
            if not pack:
                pack = [fault for fault in Fault for _ in range(_WEIGHTS.get(fault, 1))]
                rng.shuffle(pack)
            step = _step(rng, pack.pop())
            if step.shields and not free:
                postponed.append(step)
                step = _step(rng, rng.choice([Fault.KILL_WORKER, Fault.STOP_WORKER, Fault.FLUSH_REDIS]))
        step = Step(at, step.fault, step.place, step.seconds, step.store, step.text)
        if step.shields:
            last_shield = at + step.seconds
        steps.append(step)
    return steps


def _step(rng: random.Random, fault: Fault) -> Step:
    match fault:
        case Fault.KILL_WORKER | Fault.DRAIN_WORKER:
            return Step(0, fault, f"worker-{rng.randrange(WORKERS)}")
        case Fault.STOP_WORKER:  # half of them for longer than it takes to lose a run
            longest = rng.choice([1.0, 3.0])
            return Step(0, fault, f"worker-{rng.randrange(WORKERS)}", LEASE_SECONDS * longest - rng.random())
        case Fault.KILL_GATEWAY:
            return Step(0, fault, f"gateway-{rng.randrange(GATEWAYS)}")
        case Fault.STOP_GATEWAY:
            return Step(0, fault, f"gateway-{rng.randrange(GATEWAYS)}", rng.uniform(0.5, 3))
        case Fault.KILL_SCHEDULER:
            return Step(0, fault, "scheduler-0")
        case Fault.STOP_SCHEDULER:
            return Step(0, fault, "scheduler-0", rng.uniform(0.5, 3))
        case Fault.CUT | Fault.SLOW | Fault.LOSE_REPLIES:
            return _link_step(rng, fault)
        case _:
            return Step(0, fault, "")


def _link_step(rng: random.Random, fault: Fault) -> Step:
    step = Step(0, fault, rng.choice(LINKS), store=rng.choice(list(Store)))
    if fault is Fault.LOSE_REPLIES:
        return replace(step, seconds=2.5, text=rng.choice(step.replies))
    return replace(step, seconds=rng.choice([0.0, 1.0, 3.0]) if fault is Fault.CUT else 2.0)


def _submissions(seed: int, runs: int) -> list[Submission]:
    rng = random.Random(f"{seed} clients")
    sessions = max(int(runs * SESSIONS_PER_RUN), 10)
    made: list[Submission] = []
    for number in range(runs):
        at = number / RUNS_PER_SECOND + rng.random() / RUNS_PER_SECOND
        followed_up = made and rng.random() < 0.2
        session = made[-1].session if followed_up else f"{rng.choice('ppg')}{rng.randrange(sessions)}"
        one = Submission(
            at=made[-1].at + rng.uniform(0.05, 0.6) if followed_up else at,
            number=number,
            session=session,
            text=_text(rng, number, made=session.startswith("g")),
            copies=rng.choice([1, 1, 1, 2, 3]),
            again=rng.uniform(0.2, 5) if rng.random() < 0.25 else None,
            followers=tuple(rng.randrange(2**32) for _ in range(rng.choice([1, 1, 2]))),
            cancel=rng.uniform(0, 2.5) if rng.random() < 0.1 else None,
        )
        made.append(replace(one, gives_up=one.copies == 1 and one.again is None))
    return sorted(made, key=lambda one: one.at)


def _text(rng: random.Random, number: int, *, made: bool) -> str:
    """Directives of the provider, or of the function that the agent is in sessions `g…`; each message acts under a key of its own."""
    order = f'{{"order": "m{number}"}}'
    effects = [f"[[tool {rng.choice(['charge', 'refund', 'notify'])} {order}]]"] if rng.random() < 0.4 else []
    pieces = rng.randint(8, 40)
    if made:
        return " ".join([*effects, f"[[count n={pieces} of=m{number}]]"])
    refused = [f"[[fail status=503 times=1 m{number}]]"] if rng.random() < 0.06 else []
    return " ".join([*effects, *refused, f"[[slow ms={rng.randint(15, 60)}]] [[deltas n={pieces}]] m{number}"])
