"""What `agentrun dev` shows: an answer over restarts, why a run failed, and what it used."""

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrun.dev.client import SeenEvent
from agentrun.dev.conversation import Conversation, Screen


class FakeClient:
    """A gateway that has one run, with these events and attempts."""

    def __init__(self, events: list[tuple[str, dict[str, Any]]], outcomes: list[str], **run: Any) -> None:
        self.events = [SeenEvent(seq, kind, data) for seq, (kind, data) in enumerate(events)]
        usage = {"calls": 0, "input_tokens": 0, "output_tokens": 0, "cost_usd": None, "price_ids": []}
        attempts = [{"attempt": number, "outcome": outcome} for number, outcome in enumerate(outcomes, 1)]
        self.state = {"status": "running", "events_url": "/events", "usage": usage, "attempts": attempts, **run}

    async def submit(self, session: str, text: str, *, key: str) -> str:
        return "r1"

    async def run(self, run_id: str) -> dict[str, Any]:
        return self.state

    async def follow(self, run_id: str) -> AsyncIterator[SeenEvent]:
        for event in self.events:
            yield event


async def shown(client: FakeClient, *, server: str | None = None) -> tuple[bool, str]:
    out = io.StringIO()
    talk = Conversation(client, Screen(out), "s", "http://gateway", server)  # type: ignore[arg-type]
    return await talk.ask("hello"), out.getvalue()


ITEM = ("item_added", {"item": 0, "type": "message"})
RESTART = ("restart", {"keep": -1})
COMPLETED = ("completed", {})


def text(what: str) -> tuple[str, dict[str, Any]]:
    return ("text_delta", {"item": 0, "text": what})


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("lost", "attempt 1 was lost with its worker; going on from the last checkpoint"),
        ("retrying", "attempt 1 failed in a way that may pass; going on from the last checkpoint"),
        ("handed_back", "attempt 1 was handed back by a worker that stopped; going on from the last checkpoint"),
        ("unheard-of", "attempt 1 has ended; going on from the last checkpoint"),
    ],
)
async def test_a_restart_is_told_as_what_became_of_the_attempt(outcome: str, told: str) -> None:
    succeeded, output = await shown(FakeClient([ITEM, text("on"), RESTART, ITEM, text("once"), COMPLETED], [outcome, "running"]))

    assert succeeded
    assert f"agent  on\n       [{told}]\n       once\n" in output
    assert "\nattempts 2\n" in output


async def test_a_run_that_ends_with_its_attempt_does_not_go_on() -> None:
    client = FakeClient([ITEM, RESTART, ("cancelled", {})], ["interrupted"], status="cancelled")
    succeeded, output = await shown(client)

    assert not succeeded
    assert "[attempt 1 was ended because the run was]" in output
    assert "\n       cancelled\n" in output


async def test_a_model_that_cannot_be_reached_is_told_with_its_address() -> None:
    error = {"type": "provider_unavailable", "message": "Connection error."}
    _, output = await shown(FakeClient([("failed", {"error": error})], ["finished"]), server="http://localhost:1/v1")

    assert "       failed: provider_unavailable Connection error. (asked: http://localhost:1/v1)\n" in output


@pytest.mark.parametrize(
    ("usage", "rows"),
    [
        ({}, ["tokens   0 in, 0 out, 0 model calls", "cost     nothing: no model was asked"]),
        ({"calls": 1, "cost_usd": "0.002"}, ["tokens   0 in, 0 out, 1 model call", "cost     $0.002"]),
        ({"calls": 2}, ["tokens   0 in, 0 out, 2 model calls", "cost     unknown (no price for this model)"]),
        (
            {"calls": 1, "cost_usd": "0.1", "price_ids": ["demo"]},
            ["tokens   0 in, 0 out, 1 model call", "cost     $0.1 (a pretend price: this is a demo model)"],
        ),
    ],
)
async def test_what_a_run_used_is_told_in_columns(usage: dict[str, Any], rows: list[str]) -> None:
    client = FakeClient([ITEM, COMPLETED], ["finished"])
    client.state["usage"] |= usage
    _, output = await shown(client)

    assert output.splitlines()[-5:] == [
        *rows,
        "run      r1",
        "events   http://gateway/events",
        "state    http://gateway/v1/runs/r1",
    ]


async def test_a_superseded_answer_goes_on_in_the_run_that_answers_both() -> None:
    client = FakeClient([ITEM, text("half"), RESTART, ("superseded", {"by": "r2"})], ["interrupted"])
    asked: list[str] = []

    async def follow(run_id: str) -> AsyncIterator[SeenEvent]:
        asked.append(run_id)
        whole = [ITEM, text("both"), COMPLETED]
        for event in client.events if run_id == "r1" else [SeenEvent(seq, *event) for seq, event in enumerate(whole)]:
            yield event

    client.follow = follow  # type: ignore[method-assign]
    succeeded, output = await shown(client)

    assert succeeded and asked == ["r1", "r2"]
    assert "[another message came; run r2 answers both]\n       both\n" in output
    assert "run      r2" in output
