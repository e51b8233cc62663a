"""What went wrong in an agent, in words that stay the same: a type to act on, a message to read, and whether another try can help.

Types: timeout, rate_limited, quota_exceeded, provider_unavailable, provider_auth, provider_error, invalid_output, content_filtered,
limit_exceeded, platform_unavailable, agent_error, and whatever an agent raises itself as `AgentFailure`.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

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
    named, after, by_model = isinstance(error, AgentrunError), None, None
    if "pydantic_ai" in sys.modules:  # otherwise it can be none of its errors
        from agentrun.agents import model_failures

        named = named or model_failures.says_enough(error)
        by_model, after = model_failures.kind(error), model_failures.retry_after(error)
    kind, retryable = by_model or _kind(error)
    return Failure(kind, _message(error, named=named), retryable, after if retryable else None)


def _kind(error: BaseException) -> tuple[str, bool]:
    if isinstance(error, AgentFailure):
        return error.type, error.retryable
    if isinstance(error, TimeoutError):
        return "timeout", True
    if isinstance(error, StoreUnavailable | BusUnavailable):
        return "platform_unavailable", True
    if isinstance(error, ConnectionError) or _from_transport(error):
        return "provider_unavailable", True
    return "agent_error", False


def _from_transport(error: BaseException) -> bool:
    """Whether an HTTP client's connection failed. Known by name: which client a provider uses is not ours to import."""
    return any(cls.__name__ in ("TransportError", "APIConnectionError") for cls in type(error).__mro__)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _message(error: BaseException, *, named: bool) -> str:
    text = " ".join(_parts(error, named=named))
    text = _SECRET.sub("[redacted]", mend(text)).strip()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _parts(error: BaseException, *, named: bool) -> Iterator[str]:
    """What is shown of an error; its type first unless it is `named` well enough by what it says."""
    if not named:
        yield f"{type(error).__name__}:"
    yield str(error) or type(error).__name__
