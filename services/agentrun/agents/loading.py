"""From the `agent` part of a manifest to an executor. Every mistake is a ManifestError of one line: field, what, remedy."""

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_ai import AbstractToolset, Agent, Tool
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model, infer_model

from agentrun.agents import demo
from agentrun.agents.base import Executor
from agentrun.agents.generator import GeneratorExecutor, is_run_function
from agentrun.agents.pydantic_ai import PydanticAIExecutor
from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentSpec


def load(spec: AgentSpec, *, search: Sequence[Path] = ()) -> Executor:
    """The executor that `spec` describes. Modules are also looked for in the directories of `search`.

    Raises ManifestError.
    """
    for directory in reversed(search):
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
    if spec.entrypoint is not None:
        return _entrypoint(spec.entrypoint)
    if spec.model is None:
        raise _error("model", "neither model nor entrypoint is given", "set one of them, for example model: demo:chat")
    return _with_model(spec.model, spec)


def _with_model(name: str, spec: AgentSpec) -> Executor:
    model = _model(name)
    if isinstance(model, demo.DemoModel) and (unknown := set(spec.model_settings) - demo.SETTINGS):
        known = ", ".join(sorted(demo.SETTINGS))
        raise _error("modelSettings", f"{min(unknown)} means nothing to {name}", f"use only {known}")
    tools = [_tool(path, f"tools[{index}]") for index, path in enumerate(spec.tools)]
    functions = [tool for tool in tools if not isinstance(tool, AbstractToolset)]
    toolsets = [tool for tool in tools if isinstance(tool, AbstractToolset)]
    if name == "demo:tools" and not tools:
        functions = [demo.word_count]
    try:
        agent = Agent(model, instructions=spec.instructions or None, tools=functions, toolsets=toolsets)
    except UserError as error:
        raise _error("tools", str(error), "change or remove the tool") from error
    return PydanticAIExecutor(agent, model_settings=spec.model_settings)


def _model(name: str) -> Model:
    provider, _, model = name.partition(":")
    if not model:
        raise _error("model", f"{name!r} has no provider", "write provider:name, such as openai:gpt-4.1 or demo:chat")
    if provider == "demo":
        if model not in demo.NAMES:
            raise _error("model", f"there is no {name}", "use one of " + ", ".join(f"demo:{it}" for it in demo.NAMES))
        return demo.DemoModel(model)
    try:
        if provider == "openai":
            return _openai(model)
        return infer_model(name)
    except ImportError as error:
        raise _error("model", f"the package for {provider} is missing", _first_line(error)) from error
    except UserError as error:
        if "API_KEY" in str(error) or "environment variable" in str(error):
            raise _error("model", f"{provider} has no API key", _first_line(error)) from error
        raise _error("model", _first_line(error), "write provider:name, such as openai:gpt-4.1 or demo:chat") from error


def _openai(name: str) -> Model:
    """Chat completions at OPENAI_BASE_URL, which any compatible server speaks, or at OpenAI. The SDK's own retries are off: a failed
    call ends the attempt, and the run's retries are durable and seen by its readers."""
    from pydantic_ai.models.openai import OpenAIChatModel  # half a second that only these models need
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider()
    provider.client.max_retries = 0
    return OpenAIChatModel(name, provider=provider)


def _tool(path: str, field: str) -> Any:
    value = _object(path, field)
    if isinstance(value, Tool | AbstractToolset) or inspect.isroutine(value):
        return value
    kind = type(value).__name__
    raise _error(field, f"{path} is a {kind}", "name a function, a pydantic-ai Tool or a toolset")


def _entrypoint(path: str) -> Executor:
    value = _object(path, "entrypoint")
    if isinstance(value, AbstractAgent):
        if value.model is None:
            raise _error("entrypoint", f"the Agent {path} has no model", "give it one: Agent('provider:name')")
        return PydanticAIExecutor(value)
    if isinstance(value, Executor) and not inspect.isclass(value):
        return value
    if is_run_function(value):
        return GeneratorExecutor(value)
    kind = type(value).__name__
    remedy = "name a pydantic-ai Agent, an async function run(ctx), or an object with an async method execute(context)"
    raise _error("entrypoint", f"{path} is a {kind} that cannot execute a run", remedy)


def _object(path: str, field: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise _error(field, f"{path!r} is not module:attribute", "write it as my_agent:agent")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        remedy = "put it beside the manifest, on PYTHONPATH or into the image"
        raise _error(field, f"there is no module {missing}", remedy) from error
    except Exception as error:
        what = f"importing {module_name} raised {type(error).__name__}: {_first_line(error)}"
        raise _error(field, what, f"make `python -c 'import {module_name}'` work") from error
    value: Any = module
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise _error(field, f"module {module_name} has no {attribute}", "correct the name after the colon")
        value = getattr(value, name)
    return value


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _error(field: str, what: str, remedy: str) -> ManifestError:
    return ManifestError(f"spec.agent.{field}: {what}; {remedy}")
