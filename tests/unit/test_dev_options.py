"""`agentrun dev`: where its data lies, its port, its key, and what its workers are told."""

import os
import socket
from pathlib import Path

import pytest

from agentrun.dev.key import dev_key
from agentrun.dev.options import Options, model_server, port_of, settings_of, state_folder, worker_environment
from agentrun.domain.errors import ConfigurationError
from agentrun.domain.keys import parse_records, verify
from agentrun.manifests import AgentRun, parse
from agentrun.settings import Settings


def agent_run(name: str, *, model: str = "demo:chat") -> AgentRun:
    text = f"""{{apiVersion: agentrun.dev/v1alpha1, kind: AgentRun, metadata: {{name: {name}, namespace: shop}},
                 spec: {{agent: {{model: "{model}"}}}}}}"""
    return parse(text, source="test")[0]


def test_every_agent_run_has_a_state_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = Options(Path("agentrun.yaml"))

    assert state_folder(options, agent_run("sales")) == tmp_path / ".agentrun" / "shop-sales"
    assert state_folder(options, agent_run("support")) == tmp_path / ".agentrun" / "shop-support"
    assert state_folder(Options(Path("agentrun.yaml"), Path("mine")), agent_run("sales")) == tmp_path / "mine"


def test_a_port_that_is_taken_is_told_by_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(ConfigurationError, match=rf"^--port: cannot listen on 127\.0\.0\.1:{port} \(.+\); choose another"):
            port_of(Options(Path("agentrun.yaml"), port=port))
    assert port_of(Options(Path("agentrun.yaml"), port=port)) == port


def test_the_usual_port_is_given_up_where_somebody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("agentrun.dev.options.USUAL_PORT", int(taken.getsockname()[1]))
        assert port_of(Options(Path("agentrun.yaml"))) == 0


def test_workers_find_the_manifests_modules_and_the_server_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    run = agent_run("sales", model="openai:m")
    options = Options(tmp_path / "agentrun.yaml", base_url="http://localhost:1/v1")
    settings = settings_of(Settings(log_level="debug"), run, manifest=options.manifest, state=tmp_path, port=1)

    environment = worker_environment(settings, options)

    assert environment["PYTHONPATH"] == os.pathsep.join([str(tmp_path), "/elsewhere"])
    assert (environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]) == ("http://localhost:1/v1", "none")
    assert (environment["AGENTRUN_NAMESPACE"], environment["AGENTRUN_NAME"]) == ("shop", "sales")
    assert environment["AGENTRUN_LOG_LEVEL"] == "debug"
    assert model_server(run, environment) == "http://localhost:1/v1"
    assert model_server(agent_run("sales"), environment) is None


def test_the_key_is_kept_and_made_anew_when_half_of_it_is_gone(tmp_path: Path) -> None:
    plain, hashed = tmp_path / "dev-key", tmp_path / "api-keys"
    first = dev_key(tmp_path)
    assert dev_key(tmp_path) == first

    hashed.unlink()
    second = dev_key(tmp_path)
    assert second != first
    assert verify(second, parse_records(hashed.read_text()))

    plain.unlink()
    third = dev_key(tmp_path)
    assert [verify(key, parse_records(hashed.read_text())) is not None for key in (first, second, third)] == [False, True, True]
    assert [path.stat().st_mode & 0o777 for path in (plain, hashed)] == [0o600, 0o600]


def test_a_file_of_keys_without_a_last_line_break_is_added_to(tmp_path: Path) -> None:
    dev_key(tmp_path)
    hashed = tmp_path / "api-keys"
    hashed.write_text(hashed.read_text().rstrip("\n"))
    (tmp_path / "dev-key").unlink()

    dev_key(tmp_path)

    assert len(parse_records(hashed.read_text())) == 2
