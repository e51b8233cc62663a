"""The OpenAPI description: what FastAPI finds, the routes that it cannot see, the API key and the problem document."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from agentrun.gateway import problems
from agentrun.gateway.problems import MEDIA_TYPE, TYPES, ProblemType

_GUARDED = (
    problems.INVALID_HEADER,
    problems.UNAUTHENTICATED,
    problems.FORBIDDEN,
    problems.INTERNAL,
    problems.STORE_UNAVAILABLE,
    problems.NOT_READY,
)
"""What every address behind an API key may answer."""
_SUBMITTING = (
    *_GUARDED,
    problems.INVALID_BODY,
    problems.INVALID_CURSOR,
    problems.REQUEST_TIMEOUT,
    problems.BODY_TOO_LARGE,
    problems.UNSUPPORTED_MEDIA_TYPE,
    problems.IDEMPOTENCY_KEY_REUSED,
    problems.BUDGET_EXHAUSTED,
    problems.OVERLOADED,
    problems.SUSPENDED,
)
_PROBLEMS: dict[tuple[str, str], tuple[ProblemType, ...]] = {
    ("/v1/sessions/{session}/messages", "post"): (*_SUBMITTING, problems.INVALID_PARAMETER, problems.SESSION_BUSY),
    ("/v1/sessions/{session}/messages", "get"): (*_GUARDED, problems.INVALID_PARAMETER, problems.NOT_FOUND),
    ("/v1/sessions", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/runs", "post"): _SUBMITTING,
    ("/v1/runs", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/runs/{run_id}", "get"): (*_GUARDED, problems.NOT_FOUND),
    ("/v1/runs/{run_id}/events", "get"): (*_GUARDED, problems.INVALID_CURSOR, problems.NOT_FOUND, problems.OVERLOADED),
    ("/v1/runs/{run_id}/cancel", "post"): (*_GUARDED, problems.NOT_FOUND, problems.ALREADY_FINISHED),
    ("/v1/usage", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/dead-letters", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/dead-letters/{run_id}", "get"): (*_GUARDED, problems.NOT_FOUND),
    ("/v1/dead-letters/{run_id}/redrive", "post"): (
        *_GUARDED,
        problems.NOT_FOUND,
        problems.LETTER_CLOSED,
        problems.BUDGET_EXHAUSTED,
        problems.SUSPENDED,
    ),
    ("/v1/dead-letters/{run_id}/discard", "post"): (*_GUARDED, problems.NOT_FOUND, problems.LETTER_CLOSED),
    ("/v1/effects", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/runs/{run_id}/effects/settle", "post"): (
        *_GUARDED,
        problems.INVALID_BODY,
        problems.REQUEST_TIMEOUT,
        problems.BODY_TOO_LARGE,
        problems.UNSUPPORTED_MEDIA_TYPE,
        problems.NOT_FOUND,
        problems.EFFECT_SETTLED,
    ),
    ("/v1/cron-tasks", "get"): (*_GUARDED, problems.INVALID_PARAMETER),
    ("/v1/cron-tasks/{name}", "get"): (*_GUARDED, problems.NOT_FOUND),
    ("/v1/cron-tasks/{name}/slots", "get"): (*_GUARDED, problems.INVALID_PARAMETER, problems.NOT_FOUND),
    ("/v1/cron-tasks/{name}/trigger", "post"): (*_GUARDED, problems.NOT_FOUND, problems.BUDGET_EXHAUSTED, problems.SUSPENDED),
    ("/v1/cron-tasks/{name}/backfill", "post"): (
        *_GUARDED,
        problems.INVALID_PARAMETER,
        problems.NOT_FOUND,
        problems.BUDGET_EXHAUSTED,
        problems.SUSPENDED,
    ),
}

_PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "RFC 9457. `type` and `code` are stable.",
    "required": ["type", "code", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "code": {"type": "string", "enum": sorted(TYPES)},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What was wrong with this request and what to do."},
    },
}
_MESSAGE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["input"],
    "properties": {
        "input": {
            "description": "What the user says: a text that is not empty, or a JSON object or list for agents that take one.",
            "oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "object", "minProperties": 1},
                {"type": "array", "items": {}, "minItems": 1},
            ],
        }
    },
}
_SETTLEMENT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "key", "state"],
    "properties": {
        "name": {"type": "string"},
        "key": {"type": "string"},
        "state": {"type": "string", "enum": ["done", "failed"], "description": "failed: nothing has happened."},
        "response": {"description": "With done: what later attempts get instead of making the call. Any JSON value."},
    },
}
_ACCEPTED = {
    "type": "object",
    "required": ["run_id", "session_id", "session", "status", "events_url"],
    "properties": {
        "run_id": {"type": "string", "format": "uuid"},
        "session_id": {"type": "string", "format": "uuid"},
        "session": {"type": "string", "description": "The session's name, as in /v1/sessions/{session}/messages."},
        "status": {"type": "string", "enum": ["pending", "running", "succeeded", "failed", "cancelled", "superseded"]},
        "events_url": {"type": "string"},
    },
}
_STREAM = {
    "description": (
        "The run's events: one frame each, `id` is the event's seq, `data` is {seq, epoch, kind, data}. Ends after the terminal "
        "event; a body that is cut instead is to be resumed with Last-Event-ID."
    ),
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
_NOTHING_MORE = {"description": "The client has all events of a run that has ended: do not reconnect."}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "string", "pattern": "^(-1|[0-9]{1,15})$"},
    "description": "The id of the last event that the client has; the stream goes on after it.",
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    "description": (
        "The client's id of this message: sent again, it finds the same run. Without one, the same body within "
        "`submission.dedupeSeconds` is the same run; where that is 0, nothing is deduplicated."
    ),
}
_USER = {
    "name": "X-Agentrun-User",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "The end user, for a key with the scope act-as.",
}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _responses(kinds: Sequence[ProblemType]) -> dict[str, Any]:
    answer = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    return {
        str(status): {"description": ", ".join(kind.code for kind in kinds if kind.status == status), **answer}
        for status in sorted({kind.status for kind in kinds})
    }


def _submission(summary: str, operation: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    located = {"Location": {"schema": {"type": "string"}}, "Idempotency-Replayed": {"schema": {"const": "true"}}}
    return {
        "tags": ["runs"],
        "summary": summary,
        "operationId": operation,
        "parameters": [*parameters, _IDEMPOTENCY_KEY, _LAST_EVENT_ID],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _MESSAGE}}},
        "responses": {
            "200": {**_STREAM, "description": f"If the client accepts text/event-stream. {_STREAM['description']}"},
            "202": {
                "description": (
                    "Stored. The row is the promise: it will run. If the session has an unfinished run, `followUps.policy` decides: "
                    "with Merge that run may end as `superseded` and this one answers its messages too."
                ),
                "headers": located,
                "content": {"application/json": {"schema": _ACCEPTED}},
            },
            "204": _NOTHING_MORE,
        },
    }


def _complete(operation: dict[str, Any], kinds: Sequence[ProblemType] | None) -> None:
    if kinds is None:  # open to everybody
        operation["security"] = []
        return
    if problems.IDEMPOTENCY_KEY_REUSED not in kinds:
        operation["responses"].pop("422", None)  # FastAPI's own
    operation["responses"] |= _responses(kinds)
    operation["parameters"] = [*operation.get("parameters", []), _USER]


_PLAIN_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/sessions/{session}/messages": {
        "post": _submission("Send a message to a session, which is made on first use", "send_message", [_path("session")])
    },
    "/v1/runs": {"post": _submission("Start a run in a session of its own", "start_run", [])},
    "/v1/runs/{run_id}/events": {
        "get": {
            "tags": ["runs"],
            "summary": "Follow a run",
            "operationId": "follow_run",
            "parameters": [
                _path("run_id"),
                _LAST_EVENT_ID,
                {"name": "after", "in": "query", "schema": {"type": "integer"}, "description": "Like Last-Event-ID."},
            ],
            "responses": {"200": _STREAM, "204": _NOTHING_MORE},
        }
    },
}


def describe(app: FastAPI) -> None:
    """Makes `app.openapi` complete."""
    found = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = found()
        for path, operations in _PLAIN_ROUTES.items():
            document["paths"].setdefault(path, {}).update(operations)
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = _PROBLEM
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer", "description": "ar_<id>_<secret>"}}
        document["security"] = [{"apiKey": []}]
        for unused in ("HTTPValidationError", "ValidationError"):  # a bad parameter is a problem with status 400 here
            components["schemas"].pop(unused, None)
        settle = document["paths"]["/v1/runs/{run_id}/effects/settle"]["post"]
        settle["requestBody"] = {"required": True, "content": {"application/json": {"schema": _SETTLEMENT}}}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(operation, _PROBLEMS.get((path, method)))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
