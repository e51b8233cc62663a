"""API keys: their form, what is stored of them, and who is let in."""

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun.domain.keys import RANDOM_BYTES, KeyRecord, Scope, generate, parse_records, record_line, verify
from agentrun.domain.text import is_name

NOW = datetime(2025, 1, 31, 9, tzinfo=UTC)


def new(seed: int = 1, user: str = "alice", *scopes: Scope) -> tuple[str, KeyRecord]:
    return generate(random.Random(seed).randbytes(RANDOM_BYTES), user=user, scopes=scopes, created=NOW)


def test_a_key_opens_its_own_record_and_no_other() -> None:
    key, record = new(1, "alice", Scope.ACT_AS)
    other, other_record = new(2, "bob")
    records = {record.id: record, other_record.id: other_record}

    assert verify(key, records) == record
    assert verify(other, records) == other_record


def test_the_secret_is_not_stored() -> None:
    key, record = new()

    assert key.rpartition("_")[2] not in record_line(record)


@pytest.mark.parametrize("wrong", ["", "ar_", "ar_a_b", "Bearer x", "ar_é_ü", "\x00"])
def test_nonsense_is_nobodys_key(wrong: str) -> None:
    _, record = new()

    assert verify(wrong, {record.id: record}) is None


def test_a_wrong_secret_of_a_known_id_is_refused() -> None:
    key, record = new()
    last = "a" if key[-1] != "a" else "b"

    assert verify(key[:-1] + last, {record.id: record}) is None
    assert verify(key + "a", {record.id: record}) is None
    assert verify(key, {}) is None


@given(
    st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES),
    st.text(min_size=1, max_size=255).filter(is_name),
    st.sets(st.sampled_from(Scope)),
)
def test_a_record_survives_the_file(randomness: bytes, user: str, scopes: set[Scope]) -> None:
    key, record = generate(randomness, user=user, scopes=scopes, created=NOW)
    line = record_line(record)

    assert "\n" not in line
    assert verify(key, parse_records(f"# keys\n\n{line}\n")) == record


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "line 1: not a key record"),
        ("\n{}", "line 2: not a key record"),
        ('{"id": "a", "hash": "b", "user": "c", "created": "2025-01-31T09:00:00Z"}', "line 1: hash or user is not valid"),
        ('{"id": "a", "hash": "b", "user": "c", "created": "2025-01-31T09:00:00Z", "scopes": ["root"]}', "line 1: not a key"),
    ],
)
def test_a_bad_line_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_records(text)


def test_one_id_has_one_record() -> None:
    line = record_line(new()[1])

    with pytest.raises(ValueError, match=r"line 2: the id .* is there twice"):
        parse_records(f"{line}\n{line}")


@pytest.mark.parametrize("randomness", [b"", b"x" * (RANDOM_BYTES - 1), b"x" * (RANDOM_BYTES + 1)])
def test_a_key_needs_its_full_randomness(randomness: bytes) -> None:
    with pytest.raises(ValueError, match="random bytes"):
        generate(randomness, user="alice", scopes=(), created=NOW)


def test_a_key_needs_a_user_and_a_time_zone() -> None:
    for user in ("", " ", "bob ", "b\u202eob", "bob\u2028", "bob\n", "x" * 256):
        with pytest.raises(ValueError, match="belongs to a user"):
            new(user=user)
    with pytest.raises(ValueError, match="time zone"):
        generate(b"x" * RANDOM_BYTES, user="alice", scopes=(), created=NOW.replace(tzinfo=None))
