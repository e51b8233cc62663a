"""Text that every part of the system can hold: no NUL, no half of a surrogate pair.

Postgres' text and json refuse U+0000, and UTF-8 cannot carry a lone surrogate; model and tool output contains both now and then.
They are replaced visibly by U+FFFD. Input from clients is refused instead (`unstorable`), since silently changing what a user wrote is
worse than telling them.
"""

import math
import re

_BAD = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def unstorable(text: str) -> bool:
    """Whether `text` has a character that cannot be stored."""
    return _BAD.search(text) is not None


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
