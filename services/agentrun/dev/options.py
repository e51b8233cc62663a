"""How `agentrun dev` was called, and what follows from it: state folder, port, model, settings, the workers' environment."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from agentrun.domain.errors import ConfigurationError
from agentrun.manifests import AgentRun, parse
from agentrun.settings import Settings, environment_of

HOST = "127.0.0.1"
USUAL_PORT = 8080
USUAL_STATE = Path(".agentrun")
OPENAI = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class Options:
    """How `agentrun dev` was called.

    Without a `state`: a folder of `.agentrun` for each AgentRun. Without a `port`: the usual one, or any. `model` replaces the
    manifest's, `base_url` is an OpenAI-compatible server for it. `serve`: no message is sent, HTTP is served until the end.
    """

    manifest: Path
    state: Path | None = None
    port: int | None = None
    message: str | None = None
    model: str | None = None
    base_url: str | None = None
    serve: bool = False

    @property
    def interactive(self) -> bool:
        """Whether to stay as a prompt."""
        return self.message is None and not self.serve and sys.stdin.isatty()


def state_folder(options: Options, agent_run: AgentRun) -> Path:
    """Where the data lies, as an absolute path. Two AgentRuns cannot share a database, so each has a folder of its own."""
    metadata = agent_run.metadata
    return (options.state or USUAL_STATE / f"{metadata.namespace}-{metadata.name}").resolve()


def settings_of(read: Settings, agent_run: AgentRun, *, manifest: Path, state: Path, port: int) -> Settings:
    """What was read from the environment, with what is different on one machine."""
    return read.model_copy(
        update={
            "namespace": agent_run.metadata.namespace,
            "name": agent_run.metadata.name,
            "manifest": manifest,
            "api_keys": state / "api-keys",
            "host": HOST,
            "port": port,
            "health_port": None,
        }
    )


def port_of(options: Options) -> int:
    """The port that was asked for, else the usual one, else 0: any. Raises ConfigurationError if the wish cannot be had."""
    wanted = USUAL_PORT if options.port is None else options.port
    try:
        with socket.create_server((HOST, wanted)):
            return wanted
    except OSError as error:
        if options.port is None:
            return 0
        raise ConfigurationError(
            f"--port: cannot listen on {HOST}:{wanted} ({error.strerror or error}); choose another, or leave it out for a free one"
        ) from None


def with_model(agent_run: AgentRun, model: str, state: Path) -> tuple[AgentRun, Path]:
    """The same AgentRun with another model, and the file that says so. Raises ManifestError if it is not provider:name."""
    document = agent_run.as_document()
    agent = document["spec"]["agent"]
    agent.pop("entrypoint", None)
    agent.pop("modelSettings", None)
    agent["model"] = model
    text = yaml.safe_dump(document, sort_keys=False)
    (changed,) = parse(text, source="--model")
    path = state / "agentrun.yaml"
    path.write_text(text, encoding="utf-8")
    return changed, path


def worker_environment(settings: Settings, options: Options) -> dict[str, str]:
    """What workers are told: the settings, where the manifest's modules are, and the server for its model."""
    environment = environment_of(settings)
    code = str(options.manifest.resolve().parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [code, environment.get("PYTHONPATH", "")]))
    if options.base_url is not None:
        environment["OPENAI_BASE_URL"] = options.base_url
        environment["OPENAI_API_KEY"] = environment.get("OPENAI_API_KEY") or "none"
    return environment


def model_server(agent_run: AgentRun, environment: dict[str, str]) -> str | None:
    """Where the model is asked, as far as it is known here: it belongs into what is said of a failed connection."""
    if not (agent_run.spec.agent.model or "").startswith("openai:"):
        return None
    return environment.get("OPENAI_BASE_URL") or OPENAI
