"""Agents that pydantic-ai runs: made from a model's name with tools, or written with it. Every mistake is a ManifestError of one line.

Importing pydantic-ai takes longer than importing the rest of a worker, so `loading` imports this module only for agents that need it.
"""

import inspect
from typing import Any

from pydantic_ai import AbstractToolset, Agent, Tool
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model, infer_model

from agentrun.agents import demo
from agentrun.agents.base import Executor
from agentrun.agents.modules import first_line, mistake, named
from agentrun.agents.pydantic_ai import PydanticAIExecutor
from agentrun.manifests import AgentSpec


def with_model(name: str, spec: AgentSpec) -> Executor:
    """The executor for the model `name` with the tools and instructions of `spec`. Raises ManifestError."""
    model = _model(name)
    if isinstance(model, demo.DemoModel) and (unknown := set(spec.model_settings) - demo.SETTINGS):
        known = ", ".join(sorted(demo.SETTINGS))
        raise mistake("modelSettings", f"{min(unknown)} means nothing to {name}", f"use only {known}")
    tools = [_tool(path, f"tools[{index}]") for index, path in enumerate(spec.tools)]
    functions = [tool for tool in tools if not isinstance(tool, AbstractToolset)]
    toolsets = [tool for tool in tools if isinstance(tool, AbstractToolset)]
    if name == "demo:tools" and not tools:
        functions = [demo.word_count]
    try:
        agent = Agent(model, instructions=spec.instructions or None, tools=functions, toolsets=toolsets)
    except UserError as error:
        raise mistake("tools", str(error), "change or remove the tool") from error
    return PydanticAIExecutor(agent, model_settings=spec.model_settings)


def _model(name: str) -> Model:
    provider, _, model = name.partition(":")
    if not model:
        raise mistake("model", f"{name!r} has no provider", "write provider:name, such as openai:gpt-4.1 or demo:chat")
    if provider == "demo":
        if model not in demo.NAMES:
            raise mistake("model", f"there is no {name}", "use one of " + ", ".join(f"demo:{it}" for it in demo.NAMES))
        return demo.DemoModel(model)
    try:
        if provider == "openai":
            return _openai(model)
        return infer_model(name)
    except ImportError as error:
        raise mistake("model", f"the package for {provider} is missing", first_line(error)) from error
    except UserError as error:
        if "API_KEY" in str(error) or "environment variable" in str(error):
            raise mistake("model", f"{provider} has no API key", first_line(error)) from error
        raise mistake("model", first_line(error), "write provider:name, such as openai:gpt-4.1 or demo:chat") from error


def _openai(name: str) -> Model:
    """Chat completions at OPENAI_BASE_URL, which any compatible server speaks, or at OpenAI. The SDK's own retries are off: a failed
    call ends the attempt, and the run's retries are durable and seen by its readers."""
    from pydantic_ai.models.openai import OpenAIChatModel  # half a second that only these models need
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider()
    provider.client.max_retries = 0
    return OpenAIChatModel(name, provider=provider)


def _tool(path: str, field: str) -> Any:
    value = named(path, field)
    if isinstance(value, Tool | AbstractToolset) or inspect.isroutine(value):
        return value
    kind = type(value).__name__
    raise mistake(field, f"{path} is a {kind}", "name a function, a pydantic-ai Tool or a toolset")


def written(path: str, value: object) -> Executor | None:
    """The executor for an Agent that somebody wrote at `path`; None if `value` is no Agent. Raises ManifestError."""
    if not isinstance(value, AbstractAgent):
        return None
    if value.model is None:
        raise mistake("entrypoint", f"the Agent {path} has no model", "give it one: Agent('provider:name')")
    return PydanticAIExecutor(value)
