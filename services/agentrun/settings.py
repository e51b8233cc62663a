"""What a process is told by its environment. Read once, in cli.py, and passed on; nobody else reads os.environ."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrun.domain.errors import ConfigurationError


class FromEnvironment(BaseModel):
    """Settings whose fields are filled from their `validation_alias` in the environment; what Python gives by name comes first.

    Only the alias is looked up: NAME, HOST and PORT are set by others.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def __init__(self, **given: Any) -> None:
        variables = ((field, str(info.validation_alias)) for field, info in type(self).model_fields.items())
        found = {variable: os.environ[variable] for field, variable in variables if field not in given and variable in os.environ}
        super().__init__(**found, **given)


class Settings(FromEnvironment):
    """The settings of one process. URLs carry passwords, so they are kept out of `repr`."""

    namespace: str = Field(default="default", min_length=1, max_length=63, validation_alias="AGENTRUN_NAMESPACE")
    name: str = Field(default="agent", min_length=1, max_length=63, validation_alias="AGENTRUN_NAME")
    """The AgentRun's name. With the namespace it keys every table and every key of the bus."""
    manifest: Path | None = Field(default=None, validation_alias="AGENTRUN_MANIFEST")
    """The AgentRun as YAML or JSON."""
    database_url: str = Field(default="", repr=False, validation_alias="DATABASE_URL")
    redis_url: str = Field(default="", repr=False, validation_alias="REDIS_URL")
    api_keys: Path | None = Field(default=None, validation_alias="AGENTRUN_API_KEYS")
    """The file of hashed API keys; see `domain.keys`."""
    pod_name: str = Field(default_factory=socket.gethostname, min_length=1, validation_alias="AGENTRUN_POD_NAME")
    host: str = Field(default="0.0.0.0", validation_alias="AGENTRUN_HOST")
    port: int = Field(default=8080, ge=0, le=65535, validation_alias="AGENTRUN_PORT")
    """Where the gateway listens; 0 takes any free port."""
    health_host: str = Field(default="0.0.0.0", validation_alias="AGENTRUN_HEALTH_HOST")
    health_port: int | None = Field(default=8081, ge=0, le=65535, validation_alias="AGENTRUN_HEALTH_PORT")
    """Where worker and scheduler serve /healthz, /readyz and /metrics; 0 takes any free port, empty switches it off."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", validation_alias="AGENTRUN_LOG_LEVEL")
    log_format: Literal["json", "console"] = Field(default="json", validation_alias="AGENTRUN_LOG_FORMAT")

    @field_validator("manifest", "api_keys", "health_port", mode="before")
    @classmethod
    def _empty_is_off(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("database_url")
    @classmethod
    def _postgres(cls, url: str) -> str:
        if url:
            parts = _split(url, {"postgresql", "postgres"}, "no URL of Postgres; write postgresql://user@host/database")
            options = dict(parse_qsl(parts.query))
            hosts = parts.netloc.rpartition("@")[2].split(",")
            _check_ports([*(host.rpartition("]")[2].partition(":")[2] for host in hosts), *options.get("port", "").split(",")])
            if options.get("sslmode", "prefer") not in _SSL_MODES:
                raise ValueError(f"sslmode means nothing; use one of {', '.join(_SSL_MODES)}")
        return url

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, url: str) -> str:
        if url:
            known = {"redis", "rediss", "unix"}
            parts = _split(url, known, "no URL of Redis; write redis://host:6379/0, rediss://host:6379/0 or unix:///path")
            if parts.scheme != "unix":
                _check_ports([parts.netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[2]])
        return url

    @property
    def agent(self) -> str:
        """The AgentRun as the tables name it: namespace/name."""
        return f"{self.namespace}/{self.name}"


_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def _split(url: str, schemes: set[str], otherwise: str) -> SplitResult:
    """The URL's parts. Raises ValueError, which never shows the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        text = str(error)
        raise ValueError(f"no URL: {text[:1].lower()}{text[1:]}; correct it") from None
    if parts.scheme not in schemes:
        raise ValueError(otherwise)
    return parts


def _check_ports(ports: list[str]) -> None:
    """Raises ValueError; an empty port is the usual one."""
    if any(port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536) for port in ports):
        raise ValueError("the port is no number from 1 to 65535; correct it")


_NEEDED = {
    "database_url": "postgresql://user@host/database",
    "redis_url": "redis://host:6379/0",
    "manifest": "the path of the AgentRun manifest",
}


def read(*needed: Literal["database_url", "redis_url", "manifest"]) -> Settings:
    """The settings, of which `needed` must be set.

    Raises ConfigurationError, whose message is one line: variable, what is wrong, what to do.
    """
    try:
        settings = Settings()
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        variable = ".".join(str(piece) for piece in detail["loc"])
        if detail["type"] == "value_error":
            raise ConfigurationError(f"{variable}: {detail['ctx']['error']}") from None
        shown = "" if variable.endswith("_URL") else f" is {detail['input']!r}"
        raise ConfigurationError(f"{variable}{shown}: {detail['msg'][:1].lower()}{detail['msg'][1:]}; correct it") from None
    for field in needed:
        if not getattr(settings, field):
            raise ConfigurationError(f"{variable_of(field)} is not set; set it to {_NEEDED[field]}")
    return settings


def variable_of(field: str) -> str:
    """The environment variable that sets a field."""
    return str(Settings.model_fields[field].validation_alias)


def environment_of(settings: Settings, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that gives a child process these settings, on top of `base` (this process' own if None)."""
    environment = dict(os.environ if base is None else base)
    for field in Settings.model_fields:
        value = getattr(settings, field)
        environment[variable_of(field)] = "" if value is None else str(value)
    return environment
