"""Settings: defaults, what a wrong variable is told, and what a child process is given."""

import os
from pathlib import Path

import pytest

from agentrun import settings
from agentrun.domain.errors import ConfigurationError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AGENTRUN_") or name in ("DATABASE_URL", "REDIS_URL"):
            monkeypatch.delenv(name)


def test_defaults_suit_a_container() -> None:
    read = settings.read()

    assert (read.agent, read.port, read.health_port, read.log_format) == ("default/agent", 8080, 8081, "json")
    assert read.pod_name
    assert read.manifest is None


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_NAMESPACE", "shop")
    monkeypatch.setenv("AGENTRUN_NAME", "support")
    monkeypatch.setenv("AGENTRUN_MANIFEST", "/etc/agentrun/agentrun.yaml")
    monkeypatch.setenv("AGENTRUN_HEALTH_PORT", "0")
    monkeypatch.setenv("AGENTRUN_LOG_LEVEL", "DEBUG")

    read = settings.read("manifest")

    assert (read.agent, read.manifest, read.health_port) == ("shop/support", Path("/etc/agentrun/agentrun.yaml"), 0)
    assert read.log_level == "debug"


def test_empty_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_HEALTH_PORT", "")
    monkeypatch.setenv("AGENTRUN_API_KEYS", "")

    read = settings.read()

    assert read.health_port is None
    assert read.api_keys is None


@pytest.mark.parametrize("variable", ["DATABASE_URL", "REDIS_URL", "AGENTRUN_MANIFEST"])
def test_a_variable_that_is_needed_and_missing_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in {"DATABASE_URL", "REDIS_URL", "AGENTRUN_MANIFEST"} - {variable}:
        monkeypatch.setenv(name, "something")

    with pytest.raises(ConfigurationError, match=f"^{variable} is not set; set it to "):
        settings.read("database_url", "redis_url", "manifest")


@pytest.mark.parametrize(
    ("variable", "value"), [("AGENTRUN_PORT", "http"), ("AGENTRUN_PORT", "70000"), ("AGENTRUN_LOG_FORMAT", "xml")]
)
def test_a_wrong_value_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigurationError, match=f"^{variable} is '{value}': .*; correct it$"):
        settings.read()


def test_urls_with_passwords_stay_out_of_the_repr() -> None:
    shown = repr(settings.Settings(database_url="postgresql://u:secret@h/d", redis_url="redis://:secret@h"))

    assert "secret" not in shown


def test_a_child_process_reads_back_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings.Settings(namespace="dev", name="a", database_url="postgresql://h/d", health_port=None, port=0)
    for name, value in settings.environment_of(given, base={}).items():
        monkeypatch.setenv(name, value)

    assert settings.read() == given
