"""The reducer, and the two readers of docs/streaming.md, on event logs of runs whose attempts are lost at any point.

The logs are written by a small simulation of attempts, which knows what the agent has said in the end.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrun.domain.events import GAP, TERMINAL, Kind
from agentrun.domain.reducer import Transcript

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
JsonEvent = dict[str, Any]
Reader = Callable[[Sequence[JsonEvent]], tuple[str, int, str | None]]
"""From events to the text, the cursor and the kind of the last event."""

LOOP = """
require("node:readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const transcript = new Transcript();
  for (const event of JSON.parse(line)) transcript.feed(event);
  console.log(JSON.stringify([transcript.text, transcript.cursor, transcript.end === null ? null : transcript.end.kind]));
});
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def product_reader(events: Sequence[JsonEvent]) -> tuple[str, int, str | None]:
    transcript = Transcript()
    for event in events:
        transcript.feed(event.get("seq"), event["kind"], event["data"])
    return transcript.text, transcript.cursor, transcript.end


def python_reader(events: Sequence[JsonEvent]) -> tuple[str, int, str | None]:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    transcript = names["Transcript"]()
    for event in events:
        transcript.feed(event)
    return transcript.text, transcript.cursor, transcript.end and transcript.end["kind"]


@pytest.fixture(scope="module", params=["the product", "Python", "JavaScript"])
def read(request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Each of the three readers."""
    if request.param != "JavaScript":
        yield product_reader if request.param == "the product" else python_reader
        return
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    with subprocess.Popen(
        [node, "-e", block("javascript") + LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        stdin, stdout = process.stdin, process.stdout

        def reader(events: Sequence[JsonEvent]) -> tuple[str, int, str | None]:
            stdin.write(json.dumps(list(events)) + "\n")
            stdin.flush()
            text, cursor, end = json.loads(stdout.readline())
            return text, cursor, end

        yield reader
        stdin.close()
        process.wait(10)


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
COMMON = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@COMMON
@given(log=LOGS)
def test_a_reader_has_what_the_attempts_have_left(read: Reader, log: Log) -> None:
    last = log.events[-1]
    assert read(log.events) == ("".join(log.texts), last["seq"], last["kind"])


@COMMON
@given(log=LOGS, at=st.integers(0, 60), back=st.integers(0, 10))
def test_events_that_come_again_after_a_reconnect_change_nothing(read: Reader, log: Log, at: int, back: int) -> None:
    at %= len(log.events) + 1
    again = log.events[:at] + log.events[max(0, at - back) :]
    assert read(again) == read(log.events)


TAKEN_BACK = written([("message", ["a"]), ("checkpoint", None), ("message", ["b"]), ("lose", 0)], ["c"], Kind.COMPLETED)


@COMMON
@example(log=TAKEN_BACK, at=9, start=0)
@given(log=LOGS, at=st.integers(0, 60), start=st.integers(0, 60))
def test_a_gap_replaces_what_came_before_also_when_a_restart_follows(read: Reader, log: Log, at: int, start: int) -> None:
    """One part up to the last checkpoint before the gap, one after it: no later restart can keep less than the first and more than none."""
    through = at % (len(log.events) - 1)
    shown = log.events[: through + 1]
    kept = max([-1, *(seq for seq, _, _ in log.checkpoints if seq <= through and not taken_back(log, seq, through))])
    parts = [{"through": kept, "text": product_reader(log.events[: kept + 1])[0]}] if kept >= 0 else []
    parts.append({"through": through, "text": product_reader(shown)[0].removeprefix(parts[0]["text"] if parts else "")})
    gap = {"kind": GAP, "data": {"parts": parts}}

    seen = [*log.events[: start % (through + 1)], gap, *log.events[through + 1 :]]

    if not open_item(shown):  # deltas of an item that is half sent join no text of a gap: a gap ends between items
        assert read(seen) == read(log.events)


def taken_back(log: Log, seq: int, through: int) -> bool:
    """Whether a restart up to `through` has taken back this checkpoint."""
    return any(event["kind"] == "restart" and event["data"]["keep"] < seq < event["seq"] for event in log.events[: through + 1])


def open_item(events: Sequence[JsonEvent]) -> bool:
    """Whether the last output in these events is a message that goes on."""
    kinds = [event["kind"] for event in events if event["kind"] not in ("void",)]
    return bool(kinds) and kinds[-1] in ("item_added", "text_delta", "text_done")


def test_the_page_names_every_kind() -> None:
    table = PAGE.split("## What comes")[1].split("## Reading")[0]
    assert {kind for kind in Kind if f"`{kind}`" not in table} == set()
    assert f"`{GAP}`" in table


def test_the_page_shows_frames_as_they_are() -> None:
    from agentrun.domain.events import Event
    from agentrun.gateway import frames

    shown = [line.strip() for line in PAGE.split("\n\n## What comes")[0].splitlines()]
    made = (frames.RETRY + frames.frame(Event(1, 1, Kind.STARTED, b'{"attempt":1}')).data).decode().split()
    assert all(any(piece in line for line in shown) for piece in made), made
