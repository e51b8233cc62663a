"""Request headers, read as RFC 9110 writes them."""

import re
from collections.abc import Sequence

Headers = Sequence[tuple[bytes, bytes]]

_VALUE = r'"(?:[^"\\]|\\.)*"|[^;,"\s]*'
_PARAMETER = re.compile(rf";\s*([^\s;,=\"]+)\s*=\s*({_VALUE})")
_ELEMENT = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^,"])+')
_ZERO = re.compile(r"0(?:\.0{0,3})?")


def named(headers: Headers, name: bytes) -> list[str]:
    """All values of a header; `name` is in lower case."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def media_type(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A media type and its parameters, in lower case and without quotes."""
    parameters = [(name.lower(), _unquoted(value).lower()) for name, value in _PARAMETER.findall(text)]
    return text.partition(";")[0].strip().lower(), parameters


def accepts_events(headers: Headers) -> bool:
    """Whether the client asked for a stream of events."""
    return any(_accepts(element) for value in named(headers, b"accept") for element in _ELEMENT.findall(value))


def _accepts(element: str) -> bool:
    kind, parameters = media_type(element)
    return kind == "text/event-stream" and not any(name == "q" and _ZERO.fullmatch(value) for name, value in parameters)


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
