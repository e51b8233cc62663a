"""Each kind of error has a stable name and says whether another try can help."""

import pytest
from pydantic_ai import exceptions as ai

from agentrun.agents.failures import MAX_MESSAGE, AgentFailure, classify
from agentrun.domain.errors import BusUnavailable, StoreUnavailable


class ConnectTimeoutError(Exception):
    pass


TransportError = type("TransportError", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (TimeoutError(), "timeout", True),
        (ai.ModelRequestTimeout("m", 5), "timeout", True),
        (ai.ModelTimeoutError("m", "slow"), "timeout", True),
        (ai.ModelHTTPError(408, "m"), "timeout", True),
        (ai.ModelHTTPError(409, "m"), "provider_unavailable", True),
        (ai.ModelHTTPError(429, "m"), "rate_limited", True),
        (ai.ModelRateLimitError("m", "slower"), "rate_limited", True),
        (ai.ModelQuotaExceededError("m", "pay"), "quota_exceeded", False),
        (ai.ModelHTTPError(500, "m"), "provider_unavailable", True),
        (ai.ModelHTTPError(529, "m"), "provider_unavailable", True),
        (ai.ModelHTTPError(400, "m"), "provider_error", False),
        (ai.ModelHTTPError(404, "m"), "provider_error", False),
        (ai.ModelHTTPError(401, "m"), "provider_auth", False),
        (ai.ModelConnectionError("m", "gone"), "provider_unavailable", True),
        (ConnectionResetError("reset"), "provider_unavailable", True),
        (TransportError("reset"), "provider_unavailable", True),
        (ai.UnexpectedModelBehavior("nonsense"), "invalid_output", False),
        (ai.ContentFilterError("no"), "content_filtered", False),
        (ai.UsageLimitExceeded("too many"), "limit_exceeded", False),
        (ai.UserError("wrong use"), "agent_error", False),
        (ValueError("bug"), "agent_error", False),
        (ExceptionGroup("one", [TimeoutError("late")]), "timeout", True),
        (StoreUnavailable("down"), "platform_unavailable", True),
        (BusUnavailable("down"), "platform_unavailable", True),
        (AgentFailure("mine", type="out_of_stock", retryable=True), "out_of_stock", True),
        (AgentFailure("mine"), "agent_error", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_an_error_has_a_stable_type(error: Exception, kind: str, retryable: bool) -> None:
    failure = classify(error)
    assert (failure.type, failure.retryable) == (kind, retryable)
    assert failure.message


def test_the_wish_of_a_provider_is_passed_on_only_if_another_try_can_help() -> None:
    assert classify(ai.ModelRateLimitError("m", "slower", retry_after=7)).retry_after == 7
    assert classify(ai.ModelQuotaExceededError("m", "pay", retry_after=7)).retry_after is None


def test_a_message_is_bounded_storable_and_without_secrets() -> None:
    failure = classify(ValueError("bad \x00 \ud800 key sk-proj-abcdefghijklmnop " + "x" * 5000))
    assert len(failure.message) == MAX_MESSAGE
    assert failure.message.startswith("ValueError: bad \ufffd \ufffd key [redacted] xxx")


def test_an_error_without_words_is_named() -> None:
    assert classify(TimeoutError()).message == "TimeoutError: TimeoutError"
