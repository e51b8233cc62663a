"""Request headers, read as they are written."""

import pytest

from agentrun.gateway.headers import accepts_events, media_type


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("text/event-stream", True),
        ("Text/Event-Stream; charset=utf-8", True),
        ("application/json, text/event-stream;q=0.5", True),
        ("text/event-stream;q=0.001", True),
        ("text/event-stream;q=0", False),
        ("text/event-stream; Q=0.000, application/json", False),
        ('application/json; profile="text/event-stream"', False),
        ('application/json; profile="a,text/event-stream"', False),
        ("text/event-stream-x", False),
        ("*/*", False),
        ("text/*", False),
        ("", False),
    ],
)
def test_only_who_asks_for_a_stream_gets_one(accept: str, wanted: bool) -> None:
    assert accepts_events([(b"accept", accept.encode())]) is wanted
    assert accepts_events([(b"accept", b"application/json"), (b"accept", accept.encode())]) is wanted
    assert accepts_events([(b"x-accept", accept.encode())]) is False


def test_parameters_of_a_media_type_are_told_apart() -> None:
    assert media_type('Application/JSON ; Charset="UTF-8";a="b;c\\"d" ;e=f') == (
        "application/json",
        [("charset", "utf-8"), ("a", 'b;c"d'), ("e", "f")],
    )
    assert media_type("text/plain;") == ("text/plain", [])
    assert media_type("") == ("", [])
