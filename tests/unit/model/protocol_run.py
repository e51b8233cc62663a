"""python tests/unit/model/protocol_run.py base|large|without|bug|harmless|all|START OF A NAME [STATES], or walk [SECONDS]

Explores the scenarios and prints each with its size, its verdict and the trace of what failed."""

from __future__ import annotations

import sys
import time

from protocol_checker import explore, walk
from protocol_model import Model
from protocol_scenarios import BASE, BUGS, HARMLESS, LARGE, WALKS, WITHOUT
from protocol_state import Scenario


def table() -> dict[str, tuple[Scenario, str]]:
    """Every scenario by its name, with the property that must fail ("" = none)."""
    return {
        **{f"base {name}": (scenario, "") for name, scenario in BASE.items()},
        **{f"large {name}": (scenario, "") for name, scenario in LARGE.items()},
        **{f"without {name}": (proof.scenario, proof.property) for name, proof in WITHOUT.items()},
        **{f"bug {name}": (proof.scenario, proof.property) for name, proof in BUGS.items()},
        **{f"harmless {name}": (scenario, "") for name, scenario in HARMLESS.items()},
    }


def explore_all(which: str, limit: int) -> bool:
    """True if every scenario gave what it must."""
    fine = True
    for name, (scenario, must_fail) in table().items():
        if which != "all" and not name.startswith(which):
            continue
        result = explore(Model(scenario), name, limit)
        as_expected = result.violated.startswith(must_fail) if must_fail else not result.violated
        fine = fine and as_expected and bool(must_fail or result.complete)
        print(result.line(), "" if as_expected else f"EXPECTED {must_fail or 'ok'}", flush=True)
        if not must_fail or not as_expected or which not in ("all", "without", "bug"):
            print(*(f"      {step}" for step in result.trace), sep="\n", end="\n" * bool(result.trace))
    return fine


def walk_all(seconds: float) -> bool:
    """Random behaviours of each full-size scenario for some seconds."""
    fine = True
    for name, scenario in WALKS.items():
        model, seed, steps, end = Model(scenario), 0, 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            result = walk(model, seed)
            seed, steps = seed + 1, steps + result.steps
            if result.violated:
                print(f"walk {name}: {result.name}: {result.violated}", *result.trace[-60:], sep="\n      ")
                fine = False
                break
        else:
            print(f"walk {name}: {seed} behaviours, {steps} steps, all ok", flush=True)
    return fine


if __name__ == "__main__":
    what, number = [*sys.argv[1:], "all", ""][0], [*sys.argv[2:], ""][0]
    done = walk_all(float(number or 10)) if what == "walk" else explore_all(what, int(number or 900_000))
    sys.exit(0 if done else 1)
