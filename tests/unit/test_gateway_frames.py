"""Frames, positions, request bodies, problems and keys, without any server."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sse_client import FrameParser

from agentrun.domain.errors import ConfigurationError
from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.keys import RANDOM_BYTES, Scope, generate, record_line
from agentrun.gateway import auth, bodies, frames
from agentrun.gateway.auth import Authenticator
from agentrun.gateway.bodies import MAX_DEPTH, MessageBody
from agentrun.gateway.feed import Backlog, Feed, Viewer
from agentrun.gateway.log import contiguous
from agentrun.gateway.problems import INVALID_BODY, STORE_UNAVAILABLE, TYPES, Problem
from agentrun.gateway.submissions import Message, prepare

AWKWARD = ["a\nb", "a\r\nb", "\r", "\n\ndata: x\n\n", "\u2028\u2029\u0085", "\ufeff", "id: 7", "😀", ":", " leading", ""]


def delta(seq: int, text: str = "t") -> Event:
    return Event(seq, 1, Kind.TEXT_DELTA, encode_data({"item": 0, "part": 0, "text": text}))


@pytest.mark.parametrize("text", AWKWARD)
def test_se_09_a_frame_is_one_event_with_exactly_the_text(text: str) -> None:
    made = frames.frame(delta(3, text))
    assert b"\r" not in made.data
    assert made.data.count(b"\n") == 3
    read = FrameParser().feed(made.data)
    assert [(frame.id, frame.event, frame.json()["data"]["text"]) for frame in read] == [("3", "message", text)]


def test_se_09_white_space_between_json_tokens_never_ends_a_line() -> None:
    made = frames.frame(Event(0, 1, Kind.COMPLETED, b'{\r\n "output":\n"a\\nb" }'))
    assert made.terminal
    assert FrameParser().feed(made.data)[0].json()["data"] == {"output": "a\nb"}


def test_a_heartbeat_is_no_event_and_moves_no_position() -> None:
    parser = FrameParser()
    stream = frames.RETRY + frames.frame(delta(0)).data + frames.HEARTBEAT + frames.HEARTBEAT + frames.frame(delta(1)).data
    assert [frame.id for frame in parser.feed(stream)] == ["0", "1"]
    assert (parser.retry, parser.comments) == (2000, ["hb", "hb"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("7", 7), ("007", 7), ("-1", -1), ("999999999999999", 999999999999999)]
    + [(bad, None) for bad in ("", "-2", "--1", "1.0", " 1", "1 ", "+1", "1_0", "x", "٣", "²", "1" * 16, "1\n", "\x00")],
)
def test_positions(text: str, expected: int | None) -> None:
    assert frames.parse_position(text) == expected


def test_what_follows_a_position_stops_at_the_first_hole() -> None:
    events = [delta(seq) for seq in (2, 3, 5, 6)]
    assert [event.seq for event in contiguous(events, after=1)] == [2, 3]
    assert [event.seq for event in contiguous(events, after=2)] == [3]
    assert contiguous(events, after=0) == contiguous(events, after=3) == contiguous([], after=0) == []


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def test_the_depth_of_a_body_is_limited_to_the_level() -> None:
    for leaf in ("x", 1, None, [], {}):
        empty = int(leaf in ([], {}))
        bodies.check_value(nested(MAX_DEPTH - empty, leaf))
        with pytest.raises(Problem, match="nested"):
            bodies.check_value(nested(MAX_DEPTH - empty + 1, leaf))
    with pytest.raises(Problem, match=r"U\+0000"):
        bodies.check_value(nested(MAX_DEPTH, "\x00"))


def message(text: Any = "x", *, session: str | None = "s", client_key: str | None = None, user: str = "ann") -> Message:
    return Message(user, session, client_key, MessageBody(input=text))


def prepared(said: Message, *, dedupe_seconds: int = 10, now: float = 1000.0) -> Any:
    ids = iter(UUID(int=number) for number in range(1, 4))
    return prepare(said, agent="n/a", dedupe_seconds=dedupe_seconds, now=now, make_id=lambda: next(ids))


def test_a_key_is_made_of_everything_that_tells_messages_apart() -> None:
    keys = {
        prepared(said).idempotency_key
        for said in (
            message(),
            message("y"),
            message(["x"]),
            message(session="t"),
            message(session=None),
            message(user="bob"),
            message(client_key="k"),
            message(client_key="l"),
        )
    }
    assert len(keys) == 8
    assert prepared(message({"a": 1, "b": 2})).idempotency_key == prepared(message({"b": 2, "a": 1})).idempotency_key


def test_without_a_client_key_a_message_is_itself_for_a_while() -> None:
    first = prepared(message(), now=1000.0)
    assert prepared(message(), now=1009.9).idempotency_key == first.idempotency_key
    assert prepared(message(), now=1010.0).idempotency_key != first.idempotency_key
    assert first.client_key is None
    never = prepared(message(), dedupe_seconds=0)
    assert never.idempotency_key == f"run:{never.run_id}"
    assert (
        prepared(message(client_key="k"), dedupe_seconds=0).idempotency_key == prepared(message(client_key="k")).idempotency_key
    )


def test_a_run_without_a_session_gets_one_that_its_repeats_share() -> None:
    said = prepared(message(session=None, client_key="k"))
    assert said.external_id == f"run:{said.idempotency_key}"
    assert said.session_given == ""


class FakeLog:
    """Has what it is given."""

    def __init__(self, *events: Event) -> None:
        self.events = list(events)

    async def refill(self, _run_id: UUID, *, after: int) -> list[Event]:
        return contiguous(self.events, after=after)


def viewer(cursor: int = -1, most_bytes: int = 10_000) -> Viewer:
    return Viewer(cursor=cursor, most_bytes=most_bytes, backlog=Backlog(10**9), abort=lambda: None)


def seen(of: Viewer) -> list[int]:
    return [int(frame.id or -1) for frame in FrameParser().feed(of.take())]


async def settle(feed: Feed) -> None:
    while feed._refilling is not None:
        await feed._refilling


async def test_a_feed_orders_drops_and_refills() -> None:
    log = FakeLog()
    feed, reader = Feed(UUID(int=1), log), viewer()  # type: ignore[arg-type]
    feed.receive(delta(0))  # before anybody has attached
    feed.attach(reader)
    await settle(feed)
    assert seen(reader) == [0]
    for seq in (1, 1, 0, 3):
        feed.receive(delta(seq))
    assert seen(reader) == [1]
    log.events = [delta(seq) for seq in range(3)]
    await settle(feed)
    assert seen(reader) == [2, 3]


async def test_a_hole_is_not_asked_for_again_and_again() -> None:
    log = FakeLog()
    feed, reader = Feed(UUID(int=1), log), viewer()  # type: ignore[arg-type]
    feed.attach(reader)
    feed.receive(delta(1))
    await settle(feed)
    assert feed.stuck
    feed.receive(delta(2))
    assert feed._refilling is None
    log.events = [delta(0)]
    feed.compare(0, finished=False)
    await settle(feed)
    assert not feed.stuck
    assert seen(reader) == [0, 1, 2]
    feed.receive(delta(4))
    assert feed._refilling is not None  # another hole is another question
    await settle(feed)


async def test_a_viewer_joins_where_the_others_are_or_takes_the_feed_back() -> None:
    log = FakeLog(*(delta(seq) for seq in range(400)))
    feed, first = Feed(UUID(int=1), log), viewer(most_bytes=10**6)  # type: ignore[arg-type]
    feed.attach(first)
    feed.compare(399, finished=False)
    await settle(feed)
    assert seen(first) == list(range(400))
    near, far, ahead = viewer(390), viewer(5, most_bytes=10**6), viewer(399)
    for joining in (near, far, ahead):
        feed.attach(joining)
    await settle(feed)
    feed.receive(delta(400))
    assert seen(near) == list(range(391, 401))
    assert seen(far) == list(range(6, 401))
    assert seen(ahead) == seen(first) == [400]


async def test_a_slow_viewer_is_cut_and_the_others_are_not() -> None:
    aborted = []
    feed = Feed(UUID(int=1), FakeLog())  # type: ignore[arg-type]
    slow, quick = viewer(most_bytes=500), viewer(most_bytes=10**6)
    slow.abort = lambda: aborted.append("slow")
    feed.attach(slow)
    feed.attach(quick)
    for seq in range(20):
        feed.receive(delta(seq, "x" * 50))
    assert slow.cut and not slow.open and aborted == ["slow"]
    assert slow.take() == b""
    assert seen(quick) == list(range(20))


def test_problem_types_are_unique_and_a_503_says_when_to_retry() -> None:
    assert len({kind.uri for kind in TYPES.values()}) == len(TYPES) > 10
    problem = Problem(INVALID_BODY, "why", members={"x": 1})
    assert json.loads(problem.body) == {
        "type": "urn:agentrun:problem:invalid_body",
        "code": "invalid_body",
        "title": INVALID_BODY.title,
        "status": 400,
        "detail": "why",
        "x": 1,
    }
    assert Problem(STORE_UNAVAILABLE, "later").headers == {"Retry-After": "1"}


def key_file(path: Path, *users: tuple[str, list[Scope]]) -> list[str]:
    made = [
        generate(bytes([n]) * RANDOM_BYTES, user=user, scopes=scopes, created=datetime.now(UTC))
        for n, (user, scopes) in enumerate(users)
    ]
    path.write_text("\n".join(record_line(record) for _, record in made))
    return [key for key, _ in made]


def scope(*headers: tuple[str, str]) -> dict[str, Any]:
    return {"type": "http", "headers": [(name.lower().encode(), value.encode()) for name, value in headers]}


def refused(keys: Authenticator, *headers: tuple[str, str]) -> str:
    with pytest.raises(Problem) as problem:
        keys.caller(scope(*headers))
    return problem.value.kind.code


def test_who_is_calling(tmp_path: Path) -> None:
    ann, backend, root, both = key_file(
        tmp_path / "keys", ("ann", []), ("svc", [Scope.ACT_AS]), ("root", [Scope.ADMIN]), ("all", [Scope.ADMIN, Scope.ACT_AS])
    )
    keys = Authenticator(tmp_path / "keys")

    def caller(key: str, user: str | None = None) -> tuple[str, str | None]:
        headers = [("Authorization", f"Bearer {key}")] + ([("X-Agentrun-User", user)] if user else [])
        found = keys.caller(scope(*headers))
        return found.user, found.sees

    assert caller(ann) == caller(ann, "ann") == ("ann", "ann")
    assert caller(backend) == ("svc", "svc")
    assert caller(backend, "zoë") == ("zoë", "zoë")
    assert caller(root) == ("root", None)
    assert caller(both) == ("all", None)
    assert caller(both, "ann") == ("ann", "ann")
    assert refused(keys, ("Authorization", f"Bearer {ann}"), ("X-Agentrun-User", "bob")) == "forbidden"
    for user in ("", "a\x01b", "x" * 256, "\x7f"):
        assert refused(keys, ("Authorization", f"Bearer {backend}"), ("X-Agentrun-User", user)) == "invalid_header"
    for bad in (f"Bearer {ann}x", "Bearer ", "Bearer", "", ann, f"Basic {ann}", f"Bearer {ann[:-1]}", "Bearer \x00"):
        assert refused(keys, ("Authorization", bad)) == "unauthenticated"
    assert refused(keys) == "unauthenticated"
    assert refused(keys, ("Authorization", f"Bearer {ann}"), ("Authorization", f"Bearer {root}")) == "unauthenticated"


def test_changed_keys_are_read_again_and_a_broken_file_keeps_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.0)
    path = tmp_path / "keys"
    (ann,) = key_file(path, ("ann", []))
    keys = Authenticator(path)
    key_file(path)
    assert refused(keys, ("Authorization", f"Bearer {ann}")) == "unauthenticated"
    key_file(path, ("ann", []), ("bob", []))
    assert keys.caller(scope(("Authorization", f"Bearer {ann}"))).user == "ann"
    path.write_text("nonsense")
    assert keys.caller(scope(("Authorization", f"Bearer {ann}"))).user == "ann"
    path.unlink()
    assert keys.caller(scope(("Authorization", f"Bearer {ann}"))).user == "ann"


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_gateway_does_not_start_with_keys_that_it_cannot_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match="agentrun keys create"):
        Authenticator(path)
