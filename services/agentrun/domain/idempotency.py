"""Idempotency keys: the same submission, sent again, finds its own run.

The key is a digest over agent, user, session as the caller gave it, client message id and canonical body. Without a client message id
the id is the body itself in a coarse time bucket, so that a nervous double click is one run and the same words an hour later are two.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_CLIENT_KEY = 255
_canonical = msgspec.json.Encoder(order="deterministic")


def canonical(body: Mapping[str, Any]) -> bytes:
    """The body as JSON with sorted members and no spacing: member order and white space do not make another message."""
    return _canonical.encode(body)


def body_hash(body: bytes) -> str:
    """Hex SHA-256 of a canonical body."""
    return hashlib.sha256(body).hexdigest()


def key(*, agent: str, user: str, session_given: str, client_key: str, body: bytes) -> str:
    """The key of a submission with a client message id: hex SHA-256; parts are length-prefixed, so no two tuples collide."""
    digest = hashlib.sha256()
    for part in (agent, user, session_given, "id:" + client_key):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    digest.update(body)
    return digest.hexdigest()


def bucket(now: float, dedupe_seconds: int) -> str:
    """The name of the time bucket that holds `now` (Unix seconds), for submissions without a client message id.

    Raises ValueError unless `dedupe_seconds` is positive: with 0 such a submission is not deduplicated at all.
    """
    if dedupe_seconds <= 0:
        raise ValueError("dedupe_seconds must be positive")
    return f"bucket:{dedupe_seconds}:{int(now // dedupe_seconds)}"
