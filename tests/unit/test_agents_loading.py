"""From a manifest's agent to an executor, and what is said if that cannot be done."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_provider import FakeProvider
from recording_context import RecordingContext

from agentrun.agents.base import close
from agentrun.agents.generator import GeneratorExecutor
from agentrun.agents.loading import load
from agentrun.agents.pydantic_ai import PydanticAIExecutor
from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentSpec

CODE = """
from pydantic_ai import Agent, Tool
from pydantic_ai.models.test import TestModel
from agentrun.agents.base import Result

agent = Agent(TestModel())
bare = Agent()
number = 5

async def run(ctx):
    yield "mine: " + ctx.inputs[0].text

async def two(ctx, other):
    yield ""

class Own:
    async def execute(self, context):
        return Result("own")

own = Own()

def double(n: int) -> int:
    return 2 * n

tool = Tool(double, name="twice")
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_agent_code.py").write_text(CODE)
    (tmp_path / "my_broken_code.py").write_text("import nothing_of_that_name")
    (tmp_path / "my_raising_code.py").write_text("raise ValueError('not like this')")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_agent_code", "my_broken_code", "my_raising_code"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [("agent", PydanticAIExecutor), ("run", GeneratorExecutor), ("own", object)],
)
async def test_an_entrypoint_is_an_agent_a_function_or_an_executor(code: Path, attribute: str, kind: type) -> None:
    executor = load(AgentSpec(entrypoint=f"my_agent_code:{attribute}"), search=[code])
    assert isinstance(executor, kind)
    result = await executor.execute(RecordingContext("hello"))
    assert str(result.output).startswith({"agent": "success", "run": "mine: hello", "own": "own"}[attribute])


async def test_tools_are_named_by_path_and_given_to_the_model(code: Path) -> None:
    spec = AgentSpec(model="demo:tools", tools=["my_agent_code:double", "my_agent_code:tool"], model_settings={"delay_ms": 0})
    result = await load(spec, search=[code]).execute(RecordingContext("take 21"))
    assert "double said 42; twice said 42" in result.output


async def test_openai_with_a_base_url_speaks_chat_completions_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeProvider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        spec = AgentSpec(model="openai:some-local-model", instructions="be brief", model_settings={"temperature": 0.5})
        executor = load(spec)
        result = await executor.execute(RecordingContext("hello"))
        assert result.output == "You said: hello (message 1)"
        (request,) = provider.requests
        assert (request["model"], request["temperature"]) == ("some-local-model", 0.5)
        assert request["messages"][0] == {"role": "system", "content": "be brief"}

        with pytest.raises(Exception, match="scripted 500"):
            await executor.execute(RecordingContext("[[fail status=500]]"))
        assert provider.counts["status_500"] == 1, "the SDK must not retry by itself"
        await close(executor)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"entrypoint": "no_such_module_here:x"}, "entrypoint: there is no module no_such_module_here; put it beside"),
        ({"entrypoint": "my_broken_code:x"}, "entrypoint: there is no module nothing_of_that_name; put it beside"),
        ({"entrypoint": "my_raising_code:x"}, "entrypoint: importing my_raising_code raised ValueError: not like this;"),
        ({"entrypoint": "my_agent_code:gone"}, "entrypoint: module my_agent_code has no gone; correct the name"),
        ({"entrypoint": "my_agent_code:number"}, "entrypoint: my_agent_code:number is a int that cannot execute a run;"),
        ({"entrypoint": "my_agent_code:two"}, "entrypoint: my_agent_code:two is a function that cannot execute a run;"),
        ({"entrypoint": "my_agent_code:Own"}, "entrypoint: my_agent_code:Own is a type that cannot execute a run;"),
        ({"entrypoint": "my_agent_code:bare"}, "entrypoint: the Agent my_agent_code:bare has no model; give it one"),
        ({"model": "openai:gpt-4.1"}, "model: openai has no API key; Set the `OPENAI_API_KEY` environment variable"),
        ({"model": "nobody:nothing"}, "model: Unknown model: nobody:nothing; write provider:name"),
        ({"model": "demo:nothing"}, "model: there is no demo:nothing; use one of demo:chat, demo:echo"),
        ({"model": "demo:chat", "model_settings": {"tempo": 1}}, "modelSettings: tempo means nothing to demo:chat; use"),
        ({"model": "demo:chat", "tools": ["my_agent_code:number"]}, "tools[0]: my_agent_code:number is a int; name a"),
        ({"model": "demo:chat", "tools": ["my_agent_code:double", "my_agent_code:gone"]}, "tools[1]: module my_agent"),
        ({"model": "demo:chat", "tools": ["my_agent_code:double"] * 2}, "tools: Tool name conflicts"),
    ],
)
def test_a_mistake_is_one_line_with_field_and_remedy(
    code: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], message: str
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ManifestError) as caught:
        load(AgentSpec(**spec), search=[code])
    assert str(caught.value).startswith("spec.agent." + message)
    assert "\n" not in str(caught.value)


def test_a_provider_whose_package_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROQ_API_KEY", "x")
    with pytest.raises(ManifestError, match=r"spec\.agent\.model: the package for groq is missing; Please install"):
        load(AgentSpec(model="groq:llama"))
