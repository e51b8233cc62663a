"""What can be stored, and what can be a name."""

import pytest

from agentrun.domain.text import is_name


@pytest.mark.parametrize("name", ["a", "a b", "x" * 255, "é", "😀", "a\u200db", "run:0ab", "..", "a/b", "\ue000", "مرحبا"])
def test_what_shows_as_one_thing_is_a_name(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "x" * 256, " a", "a ", "\u00a0a"]  # noqa: RUF005 - by what is wrong with them
    + ["a\x00", "a\nb", "a\x7fb", "a\x85b", "a\u2028b", "a\u2029b", "a\u202eb", "a\u200fb", "a\u2066b", "a\ufffdb", "a\ud800b"],
)
def test_what_hides_breaks_or_turns_text_is_no_name(name: str) -> None:
    assert not is_name(name)
