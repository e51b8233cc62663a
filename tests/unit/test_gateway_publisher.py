"""The stage after the commit, whose faults nobody waits for."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs
from waiting import eventually

from agentrun.domain.errors import BusMisconfigured, BusUnavailable
from agentrun.gateway.publisher import Publisher


@pytest.mark.parametrize(
    ("error", "told"),
    [(BusUnavailable("away"), 0), (BusMisconfigured("wrong"), 1), (ValueError("a fault"), 1), (KeyError("x"), 1)],
)
async def test_what_cannot_be_sent_is_dropped_told_and_holds_nothing_up(error: Exception, told: int) -> None:
    sent: list[UUID] = []
    errors = [error]

    async def heads(run_ids: Sequence[UUID]) -> None:
        if errors:
            raise errors.pop()
        sent.extend(run_ids)

    async def nothing(*_what: Any) -> None:
        pass

    publisher = Publisher(heads=heads, events=nothing, cancel=nothing)
    first, second = uuid4(), uuid4()

    async def dropped() -> bool:
        return publisher.dropped > 0 or not errors

    with capture_logs() as logs:
        publisher.publish([first])
        await eventually(dropped, within=5, what="the first was tried")
        publisher.publish([second])
        await publisher.close()

    assert sent == [second]
    assert len([entry for entry in logs if entry["log_level"] == "error"]) == told
