"""The examples do what they say."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recording_context import Killed, RecordingContext

from agentrun.agents.base import Executor
from agentrun.agents.loading import load
from agentrun.domain.events import Kind
from agentrun.manifests import load_one

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("shop", "countdown", "refunds"):
        sys.modules.pop(name, None)


def example(name: str) -> Executor:
    path = EXAMPLES / name / "agentrun.yaml"
    return load(load_one(path).spec.agent, search=[path.parent])


def test_every_example_has_a_manifest_that_loads() -> None:
    names = sorted(path.parent.name for path in EXAMPLES.glob("*/agentrun.yaml"))
    assert names == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    for name in names:
        assert isinstance(example(name), Executor)


async def test_minimal_answers() -> None:
    result = await example("minimal").execute(RecordingContext("Hello"))
    assert 'You said: "Hello"' in result.output


async def test_tools_looks_up_price_and_order_of_the_user_who_asks() -> None:
    context = RecordingContext("What does tea cost, and where is order 17?")
    result = await example("tools").execute(context)
    assert "tea costs 4.20 euros" in result.output
    assert "order 17 of user is on its way" in result.output
    assert context.kinds.count(Kind.TOOL_RESULT) == 2


async def test_own_goes_on_where_it_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = example("own")
    monkeypatch.setattr(sys.modules["countdown"], "STEP_SECONDS", 0)

    def kill(act: str) -> None:
        if act == "checkpointed" and len(context.journal.checkpoints) == 2:
            raise Killed

    context = RecordingContext("count from 4", on=kill)
    with pytest.raises(Killed):
        await executor.execute(context)
    later = context.next_attempt()
    result = await executor.execute(later)
    assert result.output == "4… 3… 2… 1… lift-off!" == later.journal.transcript.text


async def test_effects_refunds_once_though_its_worker_dies_after_the_call() -> None:
    executor = example("effects")
    context = RecordingContext("refund order 17", on=lambda act: _die(act, "settle refund done"))
    with pytest.raises(Killed):
        await executor.execute(context)
    later = context.next_attempt()
    result = await executor.execute(later)
    assert "1700" in result.output
    assert len(sys.modules["refunds"].BANK) == 1 and later.journal.effects["refund", "17"][3] == 2


def _die(act: str, at: str) -> None:
    if act == at:
        raise Killed
