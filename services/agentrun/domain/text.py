"""Text that every part of the system can hold: no NUL, no half of a surrogate pair.

Postgres' text and json refuse U+0000, and UTF-8 cannot carry a lone surrogate; model and tool output contains both now and then.
They are replaced visibly by U+FFFD. Input from clients is refused instead (`unstorable`), since silently changing what a user wrote is
worse than telling them.

Names are for people too: what a list shows as one name must be one name (`is_name`).
"""

import math
import re
import unicodedata

_BAD = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT = "\ufffd"
MAX_NAME = 255
NAME_RULE = f"1 to {MAX_NAME} printable characters, no space at an end"
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def unstorable(text: str) -> bool:
    """Whether `text` has a character that cannot be stored."""
    return _BAD.search(text) is not None


def is_name(text: str) -> bool:
    """Whether `text` can name a user or a session: without control characters, line breaks, changes of direction and U+FFFD."""
    return 0 < len(text) <= MAX_NAME and text == text.strip() and all(_shows(character) for character in text)


def _shows(character: str) -> bool:
    return character != REPLACEMENT and character not in _DIRECTIONS and unicodedata.category(character) not in _UNPRINTABLE


def clean(value: object) -> object:
    """A copy of a JSON-like value in which keys and strings can be stored; NaN and infinities become their names as strings."""
    if isinstance(value, str):
        return _BAD.sub(REPLACEMENT, value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
