"""Retries of runs and of calls: how long they wait, and how little is said about it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrun.domain.errors import StoreUnavailable
from agentrun.worker import patience
from agentrun.worker.endings import LONGEST_BACK_OFF_SECONDS, Retries
from agentrun.worker.patience import REMIND_SECONDS, Complaint, until_answered


@given(done=st.integers(0, 40), jitter=st.floats(0, 1))
def test_back_off_doubles_up_to_a_limit_and_jitter_takes_at_most_half(done: int, jitter: float) -> None:
    delay = Retries(3, 1.0, lambda: jitter).back_off(done)
    longest = min(2.0**done, LONGEST_BACK_OFF_SECONDS)
    assert longest / 2 <= delay <= longest


class Lines(list[tuple[str, dict[str, object]]]):
    """A logger that remembers."""

    def warning(self, event: str, **values: object) -> None:
        self.append((event, values))

    info = warning


def test_rs_06_a_repeated_error_is_said_at_once_then_rarely_and_its_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(patience, "log", lines)
    now = 0.0
    complaint = Complaint("cannot read", clock=lambda: now)
    for _ in range(6_000):
        complaint.about(ConnectionError("refused"))
        now += 0.01
    complaint.over()
    complaint.over()
    assert len(lines) <= 2 + 60 / REMIND_SECONDS
    assert lines[0] == ("cannot read", {"error": "ConnectionError: refused", "times": 1})
    assert lines[-1] == ("cannot read: works again", {"times": 6_000})


async def test_a_call_is_repeated_while_postgres_is_away_and_no_other_error_is_hidden() -> None:
    tries = 0

    async def call() -> int:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise StoreUnavailable("away")
        if tries == 5:
            raise ValueError("refused")
        return tries

    assert await until_answered(call, complaint=Complaint("test")) == 4
    with pytest.raises(ValueError, match="refused"):
        await until_answered(call, complaint=Complaint("test"))
