"""Every error that a client can get, as an RFC 9457 problem document.

`type` and `code` are stable and meant for programs; `title` is the same for every occurrence; `detail` says what was wrong with this
request and what to do next. Raise `Problem`; the app turns it into the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from agentrun.domain.errors import AgentrunError

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1
SUSPENDED_RETRY_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of error: its stable code, its HTTP status, its title."""

    code: str
    status: int
    title: str

    @property
    def uri(self) -> str:
        """What stands in `type`."""
        return f"urn:agentrun:problem:{self.code}"


MALFORMED_REQUEST = ProblemType("malformed_request", 400, "The request is not valid HTTP/1.1")
INVALID_BODY = ProblemType("invalid_body", 400, "The request body is not what this endpoint takes")
INVALID_HEADER = ProblemType("invalid_header", 400, "A request header cannot be used")
INVALID_PARAMETER = ProblemType("invalid_parameter", 400, "A parameter of the request cannot be used")
INVALID_CURSOR = ProblemType("invalid_cursor", 400, "The position does not exist in this run's events")
UNAUTHENTICATED = ProblemType("unauthenticated", 401, "An API key is needed")
FORBIDDEN = ProblemType("forbidden", 403, "This API key may not do that")
NOT_FOUND = ProblemType("not_found", 404, "There is nothing here")
METHOD_NOT_ALLOWED = ProblemType("method_not_allowed", 405, "This address does not take that method")
REQUEST_TIMEOUT = ProblemType("request_timeout", 408, "The request did not arrive in time")
ALREADY_FINISHED = ProblemType("already_finished", 409, "The run has ended")
LETTER_CLOSED = ProblemType("dead_letter_closed", 409, "The dead letter was decided otherwise")
EFFECT_SETTLED = ProblemType("effect_settled", 409, "The effect cannot be settled so")
SESSION_BUSY = ProblemType("session_busy", 409, "The session has a run that has not ended")
BODY_TOO_LARGE = ProblemType("body_too_large", 413, "The request body is too large")
UNSUPPORTED_MEDIA_TYPE = ProblemType("unsupported_media_type", 415, "The request body has the wrong content type")
IDEMPOTENCY_KEY_REUSED = ProblemType("idempotency_key_reused", 422, "The Idempotency-Key was used for another body")
BUDGET_EXHAUSTED = ProblemType("budget_exhausted", 429, "The day's budget is spent or set aside")
HEADERS_TOO_LARGE = ProblemType("headers_too_large", 431, "The address and headers are too large")
INTERNAL = ProblemType("internal", 500, "The gateway made a mistake")
STORE_UNAVAILABLE = ProblemType("store_unavailable", 503, "The database does not answer")
NOT_READY = ProblemType("not_ready", 503, "The gateway cannot work on its database")
OVERLOADED = ProblemType("overloaded", 503, "The gateway has as much to do as it can")
SUSPENDED = ProblemType("suspended", 503, "The agent is suspended and takes no messages")

TYPES = {kind.code: kind for kind in vars().copy().values() if isinstance(kind, ProblemType)}


class Problem(AgentrunError):
    """An answer that is a problem document. `members` are further members of the document, `headers` of the answer."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.members = dict(members or {})
        if kind.status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_SECONDS))

    @property
    def document(self) -> dict[str, object]:
        """The problem document."""
        kind = self.kind
        return {
            "type": kind.uri,
            "code": kind.code,
            "title": kind.title,
            "status": kind.status,
            "detail": self.detail,
            **self.members,
        }

    @property
    def body(self) -> bytes:
        """The problem document, encoded."""
        return msgspec.json.encode(self.document)

    def fields(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """The headers of an answer with that body, encoded."""
        headers = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), "cache-control": "no-store"}
        headers |= {name.lower(): value for name, value in self.headers.items()}
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends itself: a problem is also an ASGI application."""
        body = self.body
        await send({"type": "http.response.start", "status": self.kind.status, "headers": self.fields(body)})
        await send({"type": "http.response.body", "body": body if scope.get("method") != "HEAD" else b""})


def not_found(what: str) -> Problem:
    """The same answer for what does not exist and for what belongs to somebody else."""
    return Problem(NOT_FOUND, f"There is no {what} that this API key may see. Check the id.")


def request_timeout(seconds: float) -> Problem:
    """The answer to a request of which a part is missing."""
    # What has come of it is not used, so the connection cannot be used again.
    detail = (
        f"A part of it was missing after {seconds:g} s. Send the same request again, with the same Idempotency-Key if it had one."
    )
    return Problem(REQUEST_TIMEOUT, detail, headers={"Connection": "close"})


def suspended() -> Problem:
    """The answer to submissions while spec.suspend is set."""
    return Problem(
        SUSPENDED,
        "Nothing was stored. Runs can still be read and cancelled. Send the same request again once the agent is resumed.",
        headers={"Retry-After": str(SUSPENDED_RETRY_SECONDS)},
    )


def store_unavailable() -> Problem:
    """The answer while Postgres is away."""
    return Problem(
        STORE_UNAVAILABLE,
        "The database did not answer in time. Send the same request again, with the same Idempotency-Key if it had one.",
    )
