"""Short fingerprints of values. Pure."""

import hashlib
import json
from typing import Any


def digest(value: Any, *, length: int = 16) -> str:
    """The first `length` hex digits of the SHA-256 of a JSON value; equal values give equal digests, whatever their order of members."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
