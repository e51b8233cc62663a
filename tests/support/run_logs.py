"""Logs of runs whose attempts are lost at any point, written by a small simulation of attempts, which knows what the agent has said."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from agentrun.domain.events import TERMINAL, Kind

JsonEvent = dict[str, Any]


@dataclass
class Log:
    """A run's log as it is written, with what the agent has said according to it."""

    events: list[JsonEvent] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of the messages so far."""
    items: int = 0
    checkpoints: list[tuple[int, int, int]] = field(default_factory=lambda: [(-1, 0, 0)])
    """Seq, and how many items and texts there were."""
    epoch: int = 1

    def add(self, kind: str, **data: Any) -> None:
        self.events.append({"seq": len(self.events), "epoch": self.epoch, "kind": kind, "data": data})

    def message(self, pieces: Sequence[str], *, whole: bool) -> None:
        self.texts.append("")
        self.add("item_added", item=self.items, type="message")
        for piece in pieces:
            self.add("text_delta", item=self.items, part=0, text=piece)
            self.texts[-1] += piece
        if whole:
            self.add("text_done", item=self.items, part=0, text=self.texts[-1])
            self.add("item_done", item=self.items)
        self.items += 1

    def tool(self) -> None:
        self.add("item_added", item=self.items, type="tool_call", call_id="c", name="charge")
        self.add("tool_arguments_delta", item=self.items, text="{}")
        self.add("tool_arguments_done", item=self.items, arguments="{}")
        self.add("tool_result", item=self.items, call_id="c", name="charge", content="ok", is_error=False)
        self.items += 1

    def checkpoint(self) -> None:
        self.checkpoints.append((len(self.events) - 1, self.items, len(self.texts)))

    def lose(self, reserved: int) -> None:
        """The attempt is lost; the next one goes on from its checkpoint."""
        for _ in range(reserved):
            self.add("void")
        keep, self.items, texts = self.checkpoints[-1]
        del self.texts[texts:]
        self.add("restart", keep=keep)
        self.epoch += 1
        self.add("started", attempt=self.epoch)


TEXT = st.text(st.sampled_from('ab é😀\n"\\'), max_size=4)
STEP = st.one_of(
    st.tuples(st.just("message"), st.lists(TEXT, max_size=4)),
    st.tuples(st.just("tool"), st.none()),
    st.tuples(st.just("checkpoint"), st.none()),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("lose in a message"), st.lists(TEXT, min_size=1, max_size=3)),
)


def written(steps: Sequence[tuple[str, Any]], cut: Sequence[str], end: Kind) -> Log:
    """A log of these steps, and a last message that is cut off by the run's end."""
    log = Log()
    log.add("created", run_id="r", session_id="s", agent="shop/support")
    log.add("started", attempt=1)
    for what, detail in steps:
        if what == "message":
            log.message(detail, whole=True)
        elif what == "tool":
            log.tool()
        elif what == "checkpoint":
            log.checkpoint()
        else:
            if what == "lose in a message":
                log.message(detail, whole=False)
            log.lose(detail if what == "lose" else 1)
    log.message(cut, whole=False)
    log.add(end)
    return log


LOGS = st.builds(written, st.lists(STEP, max_size=12), st.lists(TEXT, max_size=3), st.sampled_from(sorted(TERMINAL)))
