"""One chaos run: faults and clients by a plan, then a quiet phase with a deadline, then the judgement.

make chaos RUNS=200 SEED=1
"""

import argparse
import asyncio
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path

from chaos_clients import Clients
from chaos_clock import Clock
from chaos_history import History, read_tables
from chaos_judge import Verdict, judge
from chaos_plan import Fault, Plan, Step, Submission, plan
from chaos_system import MAX_LOST_ATTEMPTS, ChaosSystem, chaos_system, within

QUIET_SECONDS = 180.0
"""After the last fault everything must be done within this time."""
LAST_AT_ONCE = 20
"""Last words under way: fewer than the budget has room for, as hundreds of clients that wait for room take longer than there is time."""

SHORT, LONG = 200, 2000
ALWAYS = (
    "attempts lost",
    "attempts handed back",
    "attempts interrupted",
    "restarts",
    "numbers voided",
    "writes fenced",
    "runs swept",
    "holes refilled",
    "runs superseded",
    "runs cancelled",
    "answers replayed",
    "streams taken up",
    "replies lost",
)
"""What bites in any run of SHORT messages or more: its schedule has the faults for it. From LONG on everything does."""


@dataclass
class Outcome:
    """What a chaos run gave. `bites` says how often each fault was felt."""

    plan: Plan
    history: History
    verdict: Verdict
    bites: Counter[str]
    seconds: float
    fault_seconds: float
    quiet_seconds: float

    def toothless(self) -> list[str]:
        """Faults that should have been felt and were not: of a long run all, of one too short to have each fault none."""
        runs = len(self.plan.submissions)
        wanted = [*self.bites, *Fault] if runs >= LONG else ALWAYS if runs >= SHORT else ()
        return [bite for bite in wanted if self.bites[bite] <= 0]

    def __str__(self) -> str:
        head = f"seed {self.plan.seed}: {len(self.plan.submissions)} messages and {len(self.plan.steps)} faults "
        head += f"in {self.fault_seconds:.0f} s (planned {self.plan.seconds:.0f}), "
        head += f"quiet after {self.quiet_seconds:.0f} s, {self.seconds:.0f} s in all"
        bites = [f"  {count:7}  {what}" for what, count in self.bites.items()]
        return "\n".join([head, "judged:", str(self.verdict), "felt:", *bites])


async def chaos(seed: int, runs: int, folder: Path) -> Outcome:
    """Plays the plan and judges it."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # writes to connections that the proxies have cut
    started = time.monotonic()
    made = plan(seed, runs)
    (folder / "plan.txt").write_text("\n".join([f"seed {seed}", *map(str, made.steps), *map(str, made.submissions)]))
    async with chaos_system(folder) as system:
        clients = Clients(system, system.http)
        clock = Clock(lambda: system.stands and not clients.crowded)
        background = [asyncio.create_task(system.watch()), asyncio.create_task(clock.run())]
        begun = time.monotonic()
        playing = [asyncio.create_task(_play(clock, clients, one)) for one in made.submissions]
        faults = [asyncio.create_task(_do(clock, system, step)) for step in made.steps]
        try:
            await asyncio.gather(*faults, clock.until(made.seconds))
            fault_seconds = time.monotonic() - begun
            calm, clients.calm = time.monotonic(), True
            await asyncio.wait(playing, timeout=QUIET_SECONDS)
            room = asyncio.Semaphore(LAST_AT_ONCE)
            last = [asyncio.create_task(_play_with_room(room, clients, one)) for one in _last_words(made)]
            playing += last
            await asyncio.wait(last, timeout=max(QUIET_SECONDS - (time.monotonic() - calm), 10))
            quiet = await within(lambda: _is_quiet(system), max(QUIET_SECONDS - (time.monotonic() - calm), 10))
            quiet_seconds = time.monotonic() - calm
            left = 0 if quiet else await system.left_in_redis()
        finally:
            for task in background:
                task.cancel()
            for task in playing:
                if task.done() and not task.cancelled() and task.exception():
                    clients.seen.wrong.append(f"a client failed: {task.exception()!r}")
                task.cancel()
            await asyncio.gather(*playing, *faults, *background, return_exceptions=True)
        await system.stop_workers()
        clients.seen.wrong += system.ended
        tables = await read_tables(system.pool)
        killed = frozenset(system.killed)
        history = History(clients.seen, tables, system.world.calls, system.world.acted, killed, left, MAX_LOST_ATTEMPTS)
        bites = _bites(system, history)
    return Outcome(made, history, judge(history), bites, time.monotonic() - started, fault_seconds, quiet_seconds)


async def _play(clock: Clock, clients: Clients, one: Submission) -> None:
    await clock.until(one.at)
    await clients.play(one)


async def _play_with_room(room: asyncio.Semaphore, clients: Clients, one: Submission) -> None:
    async with room:
        await clients.play(one)


async def _do(clock: Clock, system: ChaosSystem, step: Step) -> None:
    await clock.until(step.at)
    await system.do(step)


async def _is_quiet(system: ChaosSystem) -> bool:
    return await system.unfinished() == 0 and await system.left_in_redis() == 0


def _last_words(made: Plan) -> list[Submission]:
    """One more message to each session: none is blocked."""
    sessions = sorted({one.session for one in made.submissions})
    number = len(made.submissions)
    texts = {"g": "[[count n=3 of=m{0}]]", "p": "[[say good bye, m{0}]]"}
    return [
        Submission(0, number + n, session, texts[session[0]].format(number + n), followers=(n,))
        for n, session in enumerate(sessions)
    ]


def _bites(system: ChaosSystem, history: History) -> Counter[str]:
    """How often each fault was felt. Metrics of processes that were killed count as they were last seen."""
    outcomes = Counter(row["outcome"] for row in history.tables.attempts)
    status = Counter(row["status"] for row in history.tables.runs)
    kinds = Counter(row["kind"] for row in history.tables.messages)
    seen, readers = history.seen, history.seen.readers
    world, counted = system.world, system.counted
    return Counter(
        {
            **{str(fault): system.done[fault] for fault in Fault},
            "replies lost": sum(loss.count for loss in system.losses),
            "attempts lost": outcomes["lost"],
            "attempts handed back": outcomes["handed_back"],
            "attempts interrupted": outcomes["interrupted"],
            "attempts retrying": outcomes["retrying"],
            "restarts": kinds["restart"],
            "numbers voided": kinds["void"],
            "writes fenced": counted("agentrun_fenced_writes_total"),
            "renewals late": counted("agentrun_lease_renewals_total", result="late"),
            "runs swept": counted("agentrun_sweep_published_total"),
            "holes refilled": counted("agentrun_stream_refills_total"),
            "entries taken from the dead": counted("agentrun_entries_total", action="take_over")
            + counted("agentrun_entries_total", action="republish"),
            "runs superseded": status["superseded"],
            "runs cancelled": status["cancelled"],
            "answers replayed": sum(one.replayed for one in seen.accepted),
            "answers 503": seen.counts["503"],
            "answers 429": seen.counts["429"],
            "messages refused": len(seen.refused),
            "requests without an answer": seen.counts["requests without an answer"],
            "streams taken up": sum(reader.connections - 1 for reader in readers if reader.connections > 1),
            "restarts that readers saw": sum(reader.restarts for reader in readers),
            "effects asked for": world.asked,
            "effects repeated with their id": world.dropped,
        }
    )


def shown_failure(outcome: Outcome, folder: Path) -> str:
    """What somebody needs who looks into a failure: the rows of the runs that the findings name, and where everything else is."""
    tables = outcome.history.tables
    told = vars(tables) | {"seen": outcome.history.seen}
    (folder / "history.json").write_text(json.dumps(told, default=lambda it: vars(it) if is_dataclass(it) else str(it), indent=1))
    lines = [f"seed {outcome.plan.seed}; plan, logs and history in {folder}"]
    for run_id in sorted(outcome.verdict.runs())[:5]:
        lines.append(f"--- run {run_id}")
        for name in ("runs", "attempts", "inputs", "ledger", "effects", "dead_letters"):
            rows: Sequence[object] = [
                dict(row) for row in getattr(tables, name) if run_id in (row.get("id"), row.get("run_id"), row.get("held_by"))
            ]
            lines += [f"{name}: {row}"[:1000] for row in rows]
        log = [f"{row['seq']}/{row['epoch']} {row['kind']}" for row in tables.messages if row["run_id"] == run_id]
        lines.append(f"log: {', '.join(log[:5])} … {', '.join(log[-15:])}")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 if a promise was broken or a fault was not felt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"agentrun-chaos-{given.seed}-", dir="/tmp"))
    print(f"seed {given.seed}, {given.runs} messages, {folder}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    outcome = asyncio.run(chaos(given.seed, given.runs, folder))
    print(outcome)
    toothless = outcome.toothless()
    if outcome.verdict.good and not toothless:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"not felt: {', '.join(toothless) or 'nothing'}")
    print(shown_failure(outcome, folder))
    return 1


if __name__ == "__main__":
    sys.exit(main())
