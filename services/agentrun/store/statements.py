"""Splits SQL text into its statements, so that the one that fails can be named."""

import re
from collections.abc import Iterator

_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_PIECES = re.compile(
    rf"(?P<comment>{_COMMENT.pattern})|'(?:[^']|'')*'|\"[^\"]*\"|(?P<quote>\$\w*\$).*?(?P=quote)|(?P<end>;)|[^-/'\"$;]+|.",
    re.DOTALL,
)
_LONGEST = 200


def statements(sql: str) -> Iterator[str]:
    """The statements in their order, without comments between them. Knows quoted and dollar-quoted text, not nested comments."""
    parts: list[str] = []
    for piece in _PIECES.finditer(f"{sql};"):
        if not piece["end"]:
            parts.append(" " if piece["comment"] else piece[0])
            continue
        if statement := "".join(parts).strip():
            yield statement
        parts = []


def shown(statement: str) -> str:
    """A statement in one line of at most 200 characters, for messages."""
    line = " ".join(statement.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
