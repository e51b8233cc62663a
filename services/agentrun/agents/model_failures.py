"""The errors of pydantic-ai, in the words of `failures`, which asks here only when pydantic-ai was imported."""

import json

from pydantic_ai import exceptions as ai

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
)


def kind(error: BaseException) -> tuple[str, bool] | None:
    """Type and whether another try can help; None for an error that is nothing of a model's."""
    for cls, name, retryable in _BY_CLASS:
        if isinstance(error, cls):
            return name, retryable
    if isinstance(error, ai.ModelHTTPError):
        return _by_status(error.status_code)
    if isinstance(error, ai.ModelAPIError):
        return "provider_error", isinstance(error.__cause__, json.JSONDecodeError)  # garbled on its way
    return None


def retry_after(error: BaseException) -> float | None:
    """The provider's wish in seconds, if it said one."""
    return error.retry_after if isinstance(error, ai.ModelAPIError) else None


def says_enough(error: BaseException) -> bool:
    """Whether its text can be read without its type."""
    return isinstance(error, ai.AgentRunError | ai.UserError)


def _by_status(status: int) -> tuple[str, bool]:
    if status == 408:
        return "timeout", True
    if status == 429:
        return "rate_limited", True
    if status == 409 or status >= 500:
        return "provider_unavailable", True
    return ("provider_auth" if status in (401, 403) else "provider_error"), False
