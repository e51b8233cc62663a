"""What went wrong in an agent, in words that stay the same: a type to act on, a message to read, and whether another try can help.

Types: timeout, rate_limited, quota_exceeded, provider_unavailable, provider_auth, provider_error, invalid_output, content_filtered,
limit_exceeded, platform_unavailable, agent_error, and whatever an agent raises itself as `AgentFailure`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic_ai import exceptions as ai

from agentrun.agents.output import mend
from agentrun.domain.errors import AgentrunError, BusUnavailable, StoreUnavailable

MAX_MESSAGE = 2_000
"""Characters."""

_SECRET = re.compile(r"\b(sk|pk|rk)-[A-Za-z0-9_\-*]{8,}|(?i:\bbearer\s+)[A-Za-z0-9._\-]{8,}")


class AgentFailure(AgentrunError):
    """Raised by an agent's own code to choose how its run fails."""

    def __init__(self, message: str, *, type: str = "agent_error", retryable: bool = False) -> None:
        super().__init__(message)
        self.type = type
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. `retry_after` is the provider's wish in seconds, if it said one."""

    type: str
    message: str
    retryable: bool
    retry_after: float | None = None


def classify(error: BaseException) -> Failure:
    """What to tell of an exception that an executor raised. Cancellation is not a failure and must not come here."""
    error = _innermost(error)
    kind, retryable = _kind(error)
    after = error.retry_after if isinstance(error, ai.ModelAPIError) and retryable else None
    return Failure(kind, _message(error), retryable, after)


def _kind(error: BaseException) -> tuple[str, bool]:
    for cls, kind, retryable in _BY_CLASS:
        if isinstance(error, cls):
            return kind, retryable
    if isinstance(error, AgentFailure):
        return error.type, error.retryable
    if isinstance(error, ai.ModelHTTPError):
        return _by_status(error.status_code)
    if isinstance(error, ai.ModelAPIError):
        return "provider_error", isinstance(error.__cause__, json.JSONDecodeError)  # garbled on its way
    if _from_transport(error):
        return "provider_unavailable", True
    return "agent_error", False


# The first class that fits decides, so a narrower one stands above its base.
_BY_CLASS: tuple[tuple[type[BaseException], str, bool], ...] = (
    (ai.ModelQuotaExceededError, "quota_exceeded", False),
    (ai.ModelRateLimitError, "rate_limited", True),
    (ai.ModelTimeoutError, "timeout", True),
    (ai.ModelRequestTimeout, "timeout", True),
    (ai.ModelAuthenticationError, "provider_auth", False),
    (ai.ModelUnavailableError, "provider_unavailable", True),
    (ai.ModelServerError, "provider_unavailable", True),
    (ai.ModelConnectionError, "provider_unavailable", True),
    (ai.UsageLimitExceeded, "limit_exceeded", False),
    (ai.ContentFilterError, "content_filtered", False),
    (ai.UnexpectedModelBehavior, "invalid_output", False),
    (TimeoutError, "timeout", True),
    (StoreUnavailable, "platform_unavailable", True),
    (BusUnavailable, "platform_unavailable", True),
    (ConnectionError, "provider_unavailable", True),
)


def _by_status(status: int) -> tuple[str, bool]:
    if status == 408:
        return "timeout", True
    if status == 429:
        return "rate_limited", True
    if status == 409 or status >= 500:
        return "provider_unavailable", True
    return ("provider_auth" if status in (401, 403) else "provider_error"), False


def _from_transport(error: BaseException) -> bool:
    """Whether an HTTP client's connection failed. Known by name: which client a provider uses is not ours to import."""
    return any(cls.__name__ in ("TransportError", "APIConnectionError") for cls in type(error).__mro__)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _message(error: BaseException) -> str:
    text = " ".join(_parts(error))
    text = _SECRET.sub("[redacted]", mend(text)).strip()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _parts(error: BaseException) -> Iterator[str]:
    if not isinstance(error, AgentrunError | ai.AgentRunError | ai.UserError):
        yield f"{type(error).__name__}:"
    yield str(error) or type(error).__name__
