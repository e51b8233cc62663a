"""What providers report, as it can be booked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun.costs.usage import COUNTS, MOST_TOKENS, NAME_CHARACTERS, Usage


@pytest.mark.parametrize(
    ("reported", "booked", "measured"),
    [
        (0, 0, True),
        (12, 12, True),
        (12.0, 12, True),
        (1.5, 2, False),
        (MOST_TOKENS, MOST_TOKENS, True),
        (MOST_TOKENS + 1, 0, False),
        (10**400, 0, False),
        (-1, 0, False),
        (float("nan"), 0, False),
        (float("-inf"), 0, False),
        (None, 0, False),
        ("7", 0, False),
        ([], 0, False),
    ],
)
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_cannot_be_one_is_none_and_the_call_is_not_measured(
    name: str, reported: Any, booked: int, measured: bool
) -> None:
    counted = Usage("m", **{name: reported}).counted()
    assert getattr(counted, name) == booked and type(getattr(counted, name)) is int
    assert counted.measured is measured


@given(st.dictionaries(st.sampled_from(COUNTS), st.one_of(st.integers(), st.floats(), st.none(), st.text(), st.booleans())))
def test_whatever_is_reported_can_be_stored_and_counting_it_again_changes_no_figure(counts: dict[str, Any]) -> None:
    counted = Usage("m", **counts).counted()
    assert all(0 <= getattr(counted, name) <= MOST_TOKENS for name in COUNTS)
    assert counted.counted() == counted


def test_names_are_text_that_can_be_stored_and_a_call_that_was_cut_stays_so() -> None:
    odd: Any = Usage(None, 3)  # type: ignore[arg-type]
    assert (odd.counted().model, odd.counted().provider) == ("", "3")
    assert Usage("a\x00b" + "x" * 1_000).counted().model == "a\ufffdb" + "x" * (NAME_CHARACTERS - 3)
    assert Usage("m", measured=False).counted().measured is False
