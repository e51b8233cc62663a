"""From the `agent` part of a manifest to an executor. Every mistake is a ManifestError of one line: field, what, remedy."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrun.agents.base import Executor
from agentrun.agents.generator import GeneratorExecutor, is_run_function
from agentrun.agents.modules import mistake, named
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
        raise mistake("model", "neither model nor entrypoint is given", "set one of them, for example model: demo:chat")
    from agentrun.agents import models

    return models.with_model(spec.model, spec)


def _entrypoint(path: str) -> Executor:
    value = named(path, "entrypoint")
    if "pydantic_ai" in sys.modules:  # imported by the agent's own code, or this is none of its Agents
        from agentrun.agents import models

        if executor := models.written(path, value):
            return executor
    if isinstance(value, Executor) and not inspect.isclass(value):
        return value
    if is_run_function(value):
        return GeneratorExecutor(value)
    kind = type(value).__name__
    remedy = "name a pydantic-ai Agent, an async function run(ctx), or an object with an async method execute(context)"
    raise mistake("entrypoint", f"{path} is a {kind} that cannot execute a run", remedy)
