"""What the API server says instead of doing what it was asked for.

KubeError
├── NotFound       404: the object, its namespace, or its kind is not there
├── Conflict       409, and the 422 of another uid: exists already, changed meanwhile, or is not the object that was meant
├── Invalid        400, 413, 422, and the 500 of a server-side apply that names an undeclared field: trying again does not help
├── Forbidden      403: a permission is missing
├── Expired        410: the resourceVersion or the continue token is too old; list anew
└── Unavailable    no answer, 401 (a token is being replaced), 429, 5xx: try again, not before `retry_after` seconds
"""

from collections.abc import Mapping
from typing import Any

from agentrun.domain.errors import AgentrunError


class KubeError(AgentrunError):
    """The API server did not do what was asked. The message says what was asked and what it answered."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """It exists already (`reason` AlreadyExists), was changed meanwhile, or has another uid."""


class Invalid(KubeError):
    """The body was refused."""


class Forbidden(KubeError):
    """403."""


class Expired(KubeError):
    """410."""


class Unavailable(KubeError):
    """`retry_after` is in seconds; None if the server did not say."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, status=status, reason=reason)
        self.retry_after = retry_after


_KINDS: Mapping[int, type[KubeError]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    413: Invalid,
    422: Invalid,
}


def error_of(asked: str, status: int, body: Mapping[str, Any], *, retry_after: float | None = None) -> KubeError:
    """The error of an answer whose body is a Status. `asked` says what was asked for."""
    reason = str(body.get("reason", ""))
    text = f"{asked}: {status} {reason}: {body.get('message', '')}"
    if status == 500 and "failed to create typed patch object" in text:
        return Invalid(text, status=status, reason=reason)
    if status == 422 and "metadata.uid: Invalid value" in text:
        return Conflict(text, status=status, reason=reason)
    if status in (401, 429) or status >= 500:
        return Unavailable(text, status=status, reason=reason, retry_after=retry_after)
    return _KINDS.get(status, KubeError)(text, status=status, reason=reason)
