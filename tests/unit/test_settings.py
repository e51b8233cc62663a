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


def test_variables_that_only_sound_like_ours_are_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PORT", "3000"), ("HOST", "example"), ("NAME", "box"), ("NAMESPACE", "x"), ("LOG_LEVEL", "trace")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AGENTRUN_HEALTH_HOST", "::1")

    read = settings.read()

    assert (read.agent, read.host, read.port, read.log_level, read.health_host) == (
        "default/agent",
        "0.0.0.0",
        8080,
        "info",
        "::1",
    )


def test_empty_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_HEALTH_PORT", "")
    monkeypatch.setenv("AGENTRUN_API_KEYS", "")

    read = settings.read()

    assert read.health_port is None
    assert read.api_keys is None


@pytest.mark.parametrize("variable", ["DATABASE_URL", "REDIS_URL", "AGENTRUN_MANIFEST"])
def test_a_variable_that_is_needed_and_missing_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    given = {"DATABASE_URL": "postgresql://h/d", "REDIS_URL": "redis://h", "AGENTRUN_MANIFEST": "something"}
    for name in set(given) - {variable}:
        monkeypatch.setenv(name, given[name])

    with pytest.raises(ConfigurationError, match=f"^{variable} is not set; set it to "):
        settings.read("database_url", "redis_url", "manifest")


@pytest.mark.parametrize(
    ("variable", "value"), [("AGENTRUN_PORT", "http"), ("AGENTRUN_PORT", "70000"), ("AGENTRUN_LOG_FORMAT", "xml")]
)
def test_a_wrong_value_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigurationError, match=f"^{variable} is '{value}': .*; correct it$"):
        settings.read()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("foo", "no URL of Postgres; write postgresql://user@host/database"),
        ("http://u:secret@h/d", "no URL of Postgres; write postgresql://user@host/database"),
        ("postgresql+asyncpg://u:secret@h/d", "no URL of Postgres; write postgresql://user@host/database"),
        ("postgresql://u:secret@h:abc/d", "the port is no number from 1 to 65535; correct it"),
        ("postgresql://u:secret@h:5432,other:70000/d", "the port is no number from 1 to 65535; correct it"),
        ("postgresql://u:secret@[::1]:x/d", "the port is no number from 1 to 65535; correct it"),
        ("postgresql://u:secret@/d?host=/tmp&port=x", "the port is no number from 1 to 65535; correct it"),
        ("postgresql://u:secret@[::1/d", "no URL: invalid IPv6 URL; correct it"),
        (
            "postgresql://u:secret@h/d?sslmode=wrong",
            "sslmode means nothing; use one of disable, allow, prefer, require, verify-ca, verify-full",
        ),
    ],
)
def test_a_malformed_url_of_postgres_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch, url: str, told: str) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    with pytest.raises(ConfigurationError) as refused:
        settings.read("database_url")
    assert str(refused.value) == f"DATABASE_URL: {told}"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("foo", "no URL of Redis; write redis://host:6379/0, rediss://host:6379/0 or unix:///path"),
        ("redis://:secret@h:abc/0", "the port is no number from 1 to 65535; correct it"),
        ("redis://:secret@[::1", "no URL: invalid IPv6 URL; correct it"),
    ],
)
def test_a_malformed_url_of_redis_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch, url: str, told: str) -> None:
    monkeypatch.setenv("REDIS_URL", url)

    with pytest.raises(ConfigurationError) as refused:
        settings.read("redis_url")
    assert str(refused.value) == f"REDIS_URL: {told}"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%40ss@h:5432/d?sslmode=require&application_name=x",
        "postgres://u@h1:5432,h2,[::1]:5433/d",
        "postgresql://postgres@/postgres?host=%2Ftmp%2Fs&port=5433",
        "postgresql:///d",
    ],
)
def test_every_form_of_a_postgres_url_is_taken(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    assert settings.read("database_url").database_url == url


def test_urls_with_passwords_stay_out_of_the_repr() -> None:
    shown = repr(settings.Settings(database_url="postgresql://u:secret@h/d", redis_url="redis://:secret@h"))

    assert "secret" not in shown


def test_a_child_process_reads_back_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings.Settings(namespace="dev", name="a", database_url="postgresql://h/d", health_port=None, port=0)
    for name, value in settings.environment_of(given, base={}).items():
        monkeypatch.setenv(name, value)

    assert settings.read() == given
