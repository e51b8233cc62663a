"""Short fingerprints of values. Pure."""

import hashlib
from typing import Any

import msgspec


def digest(value: Any, *, length: int = 16) -> str:
    """The first `length` hex digits of the SHA-256 of a JSON value; equal values give equal digests, whatever their order of members."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:length]
