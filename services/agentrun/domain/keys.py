"""API keys: `ar_<id>_<secret>`, of which only a hash is stored.

The file of keys has one JSON object per line (folded here); empty lines and lines that begin with `#` are skipped:

    {"id": "k3v…", "hash": "<hex SHA-256 of the secret>", "user": "alice", "scopes": ["act-as"],
     "created": "2025-01-31T09:00:00Z"}

A plain hash is enough because the secret has 256 random bits; a slow one would only slow down every request.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from agentrun.domain.text import NAME_RULE, is_name

RANDOM_BYTES = 42
"""How many random bytes `generate` needs: 10 for the id, 32 for the secret."""

_FORM = re.compile(r"ar_([a-z2-7]{16})_([a-z2-7]{52})")
_NO_HASH = "0" * 64


class Scope(StrEnum):
    """What a key may do beyond acting as its own user."""

    ACT_AS = "act-as"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One stored key: everything but the secret."""

    id: str
    hash: str
    user: str
    scopes: frozenset[Scope]
    created: datetime


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    hash: str
    user: str
    created: datetime
    scopes: list[Scope] = msgspec.field(default_factory=list)


def generate(randomness: bytes, *, user: str, scopes: Iterable[Scope], created: datetime) -> tuple[str, KeyRecord]:
    """A new key, shown once, and the record to be stored.

    Raises ValueError unless there are RANDOM_BYTES bytes of randomness, a user with a proper name, and a `created` with a time zone.
    """
    if len(randomness) != RANDOM_BYTES:
        raise ValueError(f"a key is made of {RANDOM_BYTES} random bytes, not {len(randomness)}")
    if not is_name(user):
        raise ValueError(f"a key belongs to a user; give a name of {NAME_RULE}")
    if created.tzinfo is None:
        raise ValueError("created must have a time zone")
    key_id, secret = _letters(randomness[:10]), _letters(randomness[10:])
    return f"ar_{key_id}_{secret}", KeyRecord(key_id, _hash(secret), user, frozenset(scopes), created)


def record_line(record: KeyRecord) -> str:
    """The record as a line of the file of keys, without the line break."""
    line = _Line(record.id, record.hash, record.user, record.created, sorted(record.scopes))
    return msgspec.json.encode(line).decode()


def parse_records(text: str) -> dict[str, KeyRecord]:
    """The records of a file of keys, by id. Raises ValueError that names the line."""
    records: dict[str, KeyRecord] = {}
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also cut at U+2028 within a name
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            read = msgspec.json.decode(line.encode(), type=_Line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ValueError(f"line {number}: not a key record: {error}; make one with agentrun keys create") from None
        if not re.fullmatch("[0-9a-f]{64}", read.hash) or not is_name(read.user):
            raise ValueError(f"line {number}: hash or user is not valid; make a record with agentrun keys create")
        if read.id in records:
            raise ValueError(f"line {number}: the id {read.id} is there twice; remove one of the lines")
        records[read.id] = KeyRecord(read.id, read.hash, read.user, frozenset(read.scopes), read.created)
    return records


def verify(presented: str, records: Mapping[str, KeyRecord]) -> KeyRecord | None:
    """The record of a presented key, or None. Takes the same time whether the id or the secret is wrong."""
    form = _FORM.fullmatch(presented)
    if form is None:
        return None
    record = records.get(form.group(1))
    stored = record.hash if record else _NO_HASH
    return record if hmac.compare_digest(_hash(form.group(2)), stored) else None


def _letters(random: bytes) -> str:
    return base64.b32encode(random).decode().rstrip("=").lower()


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
