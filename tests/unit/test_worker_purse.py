"""A purse tells of counts that contradict each other, and pays them as they are."""

from decimal import Decimal

import pytest
from structlog.testing import capture_logs

from agentrun.costs.rules import Rules
from agentrun.costs.usage import Usage
from agentrun.store.budgets import Purse as Spent
from agentrun.worker.purse import Purse


@pytest.mark.parametrize(
    ("counts", "contradict"),
    [
        (
            {"input_tokens": 10, "cached_tokens": 10, "audio_input_tokens": 10, "output_tokens": 5, "audio_output_tokens": 5},
            False,
        ),
        ({"input_tokens": 10, "cached_tokens": 6, "cache_write_tokens": 5}, True),
        ({"input_tokens": 10, "audio_input_tokens": 11}, True),
        ({"output_tokens": 10, "reasoning_tokens": 11}, True),
        ({"output_tokens": 10, "audio_output_tokens": 11}, True),
        ({"output_tokens": 10, "reasoning_tokens": 6, "audio_output_tokens": 5}, True),
    ],
)
def test_a_part_that_is_more_than_the_whole_is_told(counts: dict[str, int], contradict: bool) -> None:
    purse = Purse(Rules(), Spent(None, Decimal(0)))
    with capture_logs() as logs:
        purse.pay(Usage("demo:chat", "demo", **counts))
    assert [("contradict" in line["event"]) for line in logs] == [True] * contradict
