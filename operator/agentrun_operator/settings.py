"""What the operator is told by its environment. Read once, in cli.py, and passed on."""

import secrets
import socket
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from agentrun.domain.errors import ConfigurationError
from agentrun.settings import FromEnvironment


class OperatorSettings(FromEnvironment):
    """The settings of one operator process. Times are in seconds."""

    watched_namespaces: str = Field(default="", validation_alias="AGENTRUN_OPERATOR_NAMESPACES")
    """Namespaces with AgentRuns, separated by commas; empty: all of the cluster."""
    image: str = Field(default="", validation_alias="AGENTRUN_OPERATOR_IMAGE")
    """The image of pods whose AgentRun names none."""
    kubeconfig: str = Field(default="", validation_alias="KUBECONFIG")
    """Paths of kubeconfig files, separated by colons; empty: the pod's service account."""

    pod_name: str = Field(default_factory=lambda: _unique(socket.gethostname()), min_length=1, validation_alias="POD_NAME")
    """Who holds the Lease. Of a pod's restarted container the name is the same, so it need not wait for itself."""
    pod_namespace: str = Field(default="default", min_length=1, max_length=63, validation_alias="POD_NAMESPACE")
    """Where the Lease lives."""
    lease: str = Field(default="agentrun-operator", min_length=1, max_length=63, validation_alias="AGENTRUN_OPERATOR_LEASE")
    lease_seconds: int = Field(default=15, ge=2, le=600, validation_alias="AGENTRUN_OPERATOR_LEASE_SECONDS")
    """For so long another replica leaves a Lease alone that it sees unchanged."""
    renew_seconds: float = Field(default=10.0, gt=0, le=600, validation_alias="AGENTRUN_OPERATOR_RENEW_SECONDS")
    """The renew deadline: work is cancelled if the last renewal was begun longer ago than this. Below lease_seconds."""
    retry_seconds: float = Field(default=2.0, gt=0, le=60, validation_alias="AGENTRUN_OPERATOR_RETRY_SECONDS")
    """Pause between two tries to take or renew the Lease."""

    tick_seconds: float = Field(default=2.0, gt=0, le=60, validation_alias="AGENTRUN_OPERATOR_TICK_SECONDS")
    """Pause between two samples of the queues."""
    resync_seconds: float = Field(default=300.0, ge=1, le=86400, validation_alias="AGENTRUN_OPERATOR_RESYNC_SECONDS")
    """Pause between two full lists, which find what the watches missed."""
    workers: int = Field(default=8, ge=1, le=64, validation_alias="AGENTRUN_OPERATOR_WORKERS")
    """AgentRuns that are reconciled at the same time."""
    reconcile_seconds: float = Field(default=60.0, gt=0, le=600, validation_alias="AGENTRUN_OPERATOR_RECONCILE_SECONDS")
    """The longest that one reconcile may take before it is cancelled and tried again."""
    request_seconds: float = Field(default=10.0, gt=0, le=120, validation_alias="AGENTRUN_OPERATOR_REQUEST_SECONDS")
    """The longest that one call of the API server may take, with its retries."""
    silence_seconds: float = Field(default=70.0, gt=0, le=600, validation_alias="AGENTRUN_OPERATOR_SILENCE_SECONDS")
    """A watch that says nothing for so long is opened anew. The API server sends bookmarks each minute."""

    health_host: str = Field(default="0.0.0.0", validation_alias="AGENTRUN_OPERATOR_HEALTH_HOST")
    health_port: int | None = Field(default=8081, ge=0, le=65535, validation_alias="AGENTRUN_OPERATOR_HEALTH_PORT")
    """Where /healthz, /readyz and /metrics are served; 0 takes any free port, empty switches it off."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", validation_alias="AGENTRUN_LOG_LEVEL")
    log_format: Literal["json", "console"] = Field(default="json", validation_alias="AGENTRUN_LOG_FORMAT")

    @field_validator("health_port", mode="before")
    @classmethod
    def _empty_is_off(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _deadline_is_below_the_lease(self) -> Self:
        if not self.retry_seconds < self.renew_seconds < self.lease_seconds:
            raise ValueError(
                "AGENTRUN_OPERATOR_RETRY_SECONDS < AGENTRUN_OPERATOR_RENEW_SECONDS < AGENTRUN_OPERATOR_LEASE_SECONDS must hold: "
                "work has to end before another replica may take the Lease"
            )
        return self

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces to watch, sorted; empty: all of the cluster."""
        return tuple(sorted({name.strip() for name in self.watched_namespaces.split(",") if name.strip()}))

    @property
    def kubeconfig_paths(self) -> tuple[Path, ...]:
        return tuple(Path(path).expanduser() for path in self.kubeconfig.split(":") if path.strip())


def _unique(host: str) -> str:
    """Two operators of one machine are not the same."""
    return f"{host}-{secrets.token_hex(4)}"


def read() -> OperatorSettings:
    """The settings. Raises ConfigurationError, whose message is one line: variable, what is wrong, what to do."""
    try:
        return OperatorSettings()
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        variable = ".".join(str(piece) for piece in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if not variable:
            raise ConfigurationError(f"{message}; correct them") from None
        raise ConfigurationError(f"{variable} is {detail['input']!r}: {message[:1].lower()}{message[1:]}; correct it") from None
