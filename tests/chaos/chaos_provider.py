"""The world outside: a model's provider that remembers each call and its attempt, and a service that acts and remembers how often."""

import asyncio
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from fake_provider import Answer, FakeProvider

_WHO = re.compile(r"run=(\S+) attempt=(\d+)")
LATENCY_SECONDS = 0.15
"""Before and after it acts, so that some workers die in between."""


@dataclass(frozen=True)
class ModelCall:
    """One call that was not refused. `tokens`: input, cached, output, reasoning."""

    run_id: str
    attempt: int
    finished: bool
    tokens: tuple[int, int, int, int]
    text: str


class World(FakeProvider):
    """`acted` counts by order what was really done; `dropped` repetitions of an id, `barred` tries that came after somebody was told
    that they never would.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acted: Counter[str] = Counter()
        self.dropped = self.barred = self.asked = 0
        self._done: dict[str, str] = {}
        self._barred: dict[str, int] = defaultdict(int)

    @property
    def calls(self) -> list[ModelCall]:
        return [_call(answer) for answer in self.answers]

    async def other(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """POST /effects/NAME/ORDER {id, try} acts; POST /asked/ID {try} says what came of it, or that it never will."""
        given = json.loads(body)
        await asyncio.sleep(LATENCY_SECONDS)
        match path.split("/"):
            case ["", "effects", name, order]:
                answer = self._act(name, order, given["id"], given["try"])
                await asyncio.sleep(LATENCY_SECONDS)
                return (200, {"answer": answer}) if answer is not None else (409, {"answer": None})
            case ["", "asked", known]:
                self.asked += 1
                if known not in self._done:
                    self._barred[known] = max(self._barred[known], given["try"])
                return 200, {"answer": self._done.get(known)}
        return 404, {}

    def _act(self, name: str, order: str, known: str, number: int) -> str | None:
        if number <= self._barred[known]:
            self.barred += 1
            return None
        if name == "refund" and known in self._done:
            self.dropped += 1
            return self._done[known]
        self.acted[order] += 1
        self._done[known] = f"{name} {order} done"
        return self._done[known]


def _call(answer: Answer) -> ModelCall:
    found = next(filter(None, (_WHO.search(str(message.get("content"))) for message in answer.body["messages"])))
    usage: dict[str, Any] = answer.usage
    tokens = (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )
    return ModelCall(found[1], int(found[2]), answer.finished, tokens, "".join(answer.plan.pieces))
