"""How commands reach a gateway: its address and an API key, from the environment."""

from pydantic import Field, ValidationError, field_validator

from agentrun.domain.errors import ConfigurationError
from agentrun.settings import FromEnvironment


class Access(FromEnvironment):
    """Where the gateway is, and the key to ask it with, which is kept out of `repr`."""

    url: str = Field(default="http://127.0.0.1:8080", validation_alias="AGENTRUN_URL")
    api_key: str = Field(default="", repr=False, validation_alias="AGENTRUN_API_KEY")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("no address of a gateway; write http://host:8080")
        return url.rstrip("/")

    @field_validator("api_key")
    @classmethod
    def _one_line(cls, key: str) -> str:
        if not key.strip().isascii() or not key.strip().isprintable():
            raise ValueError("no API key; it begins with ar_")
        return key.strip()


def read() -> Access:
    """Raises ConfigurationError, whose message is one line and never shows the key."""
    try:
        access = Access()
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        raise ConfigurationError(f"{detail['loc'][0]}: {detail['msg'].removeprefix('Value error, ')}") from None
    if not access.api_key:
        raise ConfigurationError("AGENTRUN_API_KEY is not set; set it to a key, as `agentrun keys create` makes them")
    return access
