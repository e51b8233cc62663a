"""The checker: explicit states, breadth first. It knows nothing of the protocol.

Checked are the model's own invariants (it raises `Violation`) and, in a complete graph, that from every
reachable state some path without a further fault reaches a good state. A path that a breadth-first search
finds is a shortest one. Only a state's number is kept after its visit; a trace is rebuilt from labels.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

STUCK = "P1/P4 no continuation without faults reaches a good end"

S = TypeVar("S", bound=Hashable)


class Violation(Exception):
    """A property does not hold after the step `label`; `text` starts with the property's name."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(text)
        self.label, self.text = label, text


class Checkable(Protocol[S]):
    """What the checker needs of a model. States are hashable and canonical."""

    def start(self) -> S: ...

    def steps(self, state: S) -> list[tuple[str, S, bool]]:
        """The label, the next state and "is a fault" of every step that is possible in `state`."""
        ...

    def good(self, state: S) -> bool: ...


@dataclass
class Result:
    """What an exploration found: `violated` is empty if nothing failed."""

    name: str
    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    violated: str = ""
    trace: list[str] = field(default_factory=list)

    def line(self) -> str:
        graph = "complete" if self.complete else "cut"
        return (
            f"{self.name:<52} {self.states:>8} states {self.steps:>9} steps, depth {self.depth:>3}"
            f" {self.seconds:6.1f}s {graph:<8}  {self.violated or 'ok'}"
        )


def explore(model: Checkable[S], name: str, limit: int = 400_000) -> Result:
    """Visit every state, at most `limit` of them (then `complete` is False and liveness is not judged)."""
    collects = gc.isenabled()
    gc.disable()  # states hold no cycles, and to look for some among a million tuples costs a third of the time
    try:
        return _explore(model, name, limit)
    finally:
        if collects:
            gc.enable()


def _explore(model: Checkable[S], name: str, limit: int) -> Result:
    out, began = Result(name), time.perf_counter()
    first = model.start()
    number: dict[S, int] = {first: 0}
    label_number: dict[str, int] = {}
    parent, label_of, depth = array("i", [-1]), array("i", [-1]), array("i", [0])
    source, target, good = array("i"), array("i"), bytearray([model.good(first)])
    queue = deque([first])

    def path(n: int) -> list[str]:
        names, steps = list(label_number), []
        while parent[n] >= 0:
            steps.append(names[label_of[n]])
            n = parent[n]
        return steps[::-1]

    me = -1
    while queue and len(number) < limit:
        state = queue.popleft()
        me += 1  # states are numbered in the order in which they are visited
        try:
            successors = model.steps(state)
        except Violation as found:
            out.violated, out.trace = found.text, [*path(me), found.label]
            break
        out.steps += len(successors)
        for label, following, fault in successors:
            n = number.setdefault(following, len(number))
            if n == len(parent):
                parent.append(me)
                label_of.append(label_number.setdefault(label, len(label_number)))
                depth.append(depth[me] + 1)
                good.append(model.good(following))
                queue.append(following)
            if not fault:
                source.append(me)
                target.append(n)
    out.states, out.depth = len(number), depth[-1]
    out.complete = not queue and not out.violated
    if out.complete:
        stuck = _first_stuck(source, target, good)
        if stuck is not None:
            out.violated, out.trace = STUCK, path(stuck)
    out.seconds = time.perf_counter() - began
    return out


def _first_stuck(source: array[int], target: array[int], good: bytearray) -> int | None:
    """The first state from which the steps reach no good one: backwards from the good states."""
    begin = array("i", bytes(4 * (len(good) + 1)))
    for n in target:
        begin[n + 1] += 1
    for n in range(len(good)):
        begin[n + 1] += begin[n]
    fill, back = array("i", begin), array("i", bytes(4 * len(target)))
    for before, after in zip(source, target, strict=True):
        back[fill[after]] = before
        fill[after] += 1
    can, todo = bytearray(good), [n for n, is_good in enumerate(good) if is_good]
    while todo:
        after = todo.pop()
        for before in back[begin[after] : begin[after + 1]]:
            if not can[before]:
                can[before] = 1
                todo.append(before)
    return next((n for n, reaches in enumerate(can) if not reaches), None)


def walk(model: Checkable[S], seed: int, limit: int = 3000, fault_share: float = 0.08) -> Result:
    """One random behaviour to a good end: for sizes that a search cannot complete.

    It tests recovery under a fair random schedule, and replaces no search: of twelve rules taken away, walks of
    some seconds missed two.
    """
    out, random, state = Result(f"seed {seed}"), Random(seed), model.start()
    while not model.good(state):
        try:
            successors = model.steps(state)
        except Violation as found:
            out.violated = found.text
            out.trace.append(found.label)
            return out
        faults = [step for step in successors if step[2]]
        plain = [step for step in successors if not step[2]]
        if not successors or out.steps == limit:
            out.violated = f"P1/P4 no good end after {out.steps} steps"
            return out
        take_a_fault = faults and (not plain or random.random() < fault_share)
        label, state, _ = random.choice(faults if take_a_fault else plain)
        out.trace.append(label)
        out.steps += 1
    out.complete = True
    return out
