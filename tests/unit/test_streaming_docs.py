"""The reducer, and the two readers of docs/streaming.md, on event logs of runs whose attempts are lost at any point.

The logs are written by a small simulation of attempts, which knows what the agent has said in the end.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_logs import LOGS, JsonEvent, Log, written

from agentrun.domain import folding
from agentrun.domain.events import GAP, Event, Kind, encode_data
from agentrun.domain.folding import OUTLINE, Mark
from agentrun.domain.reducer import Transcript

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
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


def folded(log: Log, through: int, *, checkpoint: int) -> tuple[JsonEvent, int] | None:
    """The gap that the gateway makes of the log up to an event, and where it ends."""
    shown = log.events[: through + 1]
    marks = [
        Mark(
            event["seq"],
            Kind(event["kind"]),
            *(str(event["data"][name]) if name in event["data"] else None for name in ("item", "type")),
        )
        if event["kind"] != "restart"
        else Mark(event["seq"], Kind.RESTART, keep=event["data"]["keep"])
        for event in shown
        if event["kind"] in OUTLINE
    ]
    wanted = folding.fold(marks, checkpoint=checkpoint)
    if wanted is None:
        return None
    needed = {"item_added", "text_done", "restart"}
    events = [
        Event(event["seq"], event["epoch"], Kind(event["kind"]), encode_data(event["data"]))
        for event in shown[: wanted.through + 1]
        if event["kind"] in needed or (event["kind"] == "text_delta" and str(event["data"]["item"]) in wanted.loose)
    ]
    parts = folding.parts_of(wanted, events)
    assert parts is not None
    return {"kind": GAP, "data": {"parts": [{"through": part.through, "text": part.text} for part in parts]}}, wanted.through


@COMMON
@example(log=TAKEN_BACK, at=9, start=0)
@given(log=LOGS, at=st.integers(0, 60), start=st.integers(0, 60))
def test_the_gap_that_is_sent_fits_at_any_moment_and_whatever_comes_after(read: Reader, log: Log, at: int, start: int) -> None:
    through = at % len(log.events)
    kept = max([-1, *(seq for seq, _, _ in log.checkpoints if seq <= through and not taken_back(log, seq, through))])
    made = folded(log, through, checkpoint=kept)
    if made is None:
        return
    gap, end = made
    assert end <= through
    if through == len(log.events) - 1:
        assert end == through - 1, "of a run that has ended, all is folded but its end"
    seen = [*log.events[: start % (end + 1)], gap, *log.events[end + 1 :]]
    assert read(seen) == read(log.events)


def test_a_gap_ends_before_a_message_that_is_open() -> None:
    log = Log()
    log.add("started", attempt=1)
    log.message(["a", "b"], whole=True)
    end = len(log.events) - 1
    log.message(["c", "d"], whole=False)
    made = folded(log, len(log.events) - 1, checkpoint=-1)
    assert made == ({"kind": GAP, "data": {"parts": [{"through": end, "text": "ab"}]}}, end)
    log.checkpoint()  # an agent of one's own may make one within a message
    assert folded(log, len(log.events) - 1, checkpoint=log.checkpoints[-1][0]) == made


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
