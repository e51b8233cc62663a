"""Schedules for property tests: numbers, lists, ranges, `*` and steps. Some have no time at all."""

from cron_oracle import RANGES
from hypothesis import strategies as st


def field(low: int, high: int) -> st.SearchStrategy[str]:
    """One field."""
    number = st.integers(low, high)
    span = st.lists(number, min_size=2, max_size=2, unique=True).map(sorted).map(lambda pair: f"{pair[0]}-{pair[1]}")
    stepped = st.integers(1, high - low).map(lambda step: f"*/{step}")
    item = st.one_of(st.just("*"), number.map(str), span, stepped)
    return st.lists(item, min_size=1, max_size=3).map(",".join)


EXPRESSIONS = st.one_of(
    st.tuples(*(field(low, high) for low, high in RANGES)).map(" ".join),
    st.tuples(field(0, 59), field(0, 4)).map(lambda pair: f"{pair[0]} {pair[1]} * * *"),
    st.tuples(st.integers(0, 59), st.integers(0, 3)).map(lambda pair: f"{pair[0]} {pair[1]} * * *"),
)
