"""A changed text of the database's functions comes with a migration: the schema version says which functions are there."""

import hashlib
from pathlib import Path

from agentrun.store.migrations import LATEST, TRANSITIONS

PINS = Path(__file__).with_name("function_texts.txt")


def test_the_functions_are_those_that_are_pinned_to_the_newest_schema() -> None:
    pins = {int(version): checksum for version, checksum in (line.split() for line in PINS.read_text().splitlines())}
    assert list(pins) == sorted(pins)
    assert max(pins) == LATEST, f"schema {LATEST} has no line in {PINS.name}"
    found = hashlib.sha256(TRANSITIONS.encode()).hexdigest()
    assert pins[LATEST] == found, (
        f"the functions of schema {LATEST} have changed (now {found}). If {LATEST} was released: add a migration (it may be empty) and a "
        f"line of its own to {PINS.name}. If not: correct the line, and see that a database of an earlier commit can still be migrated"
    )
