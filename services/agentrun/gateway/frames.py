"""Events as Server-Sent Events frames, and the position in them that a client resumes from.

The form holds in every decoder it was tried with (browsers' EventSource, openai-python, httpx, httpx-sse, eventsource-parser): LF only,
no BOM, exactly one `data:` line of JSON, `id:` in every frame, `retry:` only inside the first frame, and a heartbeat that is one comment
line without a blank line after it, since some decoders report a lone block as an empty event.
Source of the rules: html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrun.domain.events import GAP, TERMINAL, Event, encode_data
from agentrun.domain.folding import Part

RETRY = b"retry: 2000\n"  # milliseconds; to be put before the first frame of an answer
HEARTBEAT = b": hb\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
START = -1  # the position before the first event
_MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, encoded once for all clients."""

    seq: int
    data: bytes
    terminal: bool


def frame(event: Event) -> Frame:
    """The event's frame. Outside of strings a line break is white space in JSON, and inside JSON has none: it is taken out."""
    encoded = event.encode()
    if b"\n" in encoded or b"\r" in encoded:
        encoded = encoded.replace(b"\r", b" ").replace(b"\n", b" ")
    return Frame(event.seq, b"id: %d\ndata: %b\n\n" % (event.seq, encoded), event.kind in TERMINAL)


def gap(parts: Sequence[Part]) -> Frame:
    """The frame that stands for all events up to the last part's `through`. It has no id: it is not stored, and cannot be resumed from."""
    data = encode_data({"kind": GAP, "data": {"parts": [{"through": part.through, "text": part.text} for part in parts]}})
    return Frame(parts[-1].through, b"data: %b\n\n" % data, terminal=False)


def parse_position(text: str) -> int | None:
    """The seq that `text` names, -1 for "before the first"; None unless it is a decimal number in plain form."""
    if text == "-1":
        return START
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        return None
    return int(text)
