"""POST /v1/sessions/{session}/messages and POST /v1/runs: the hot path, so plain ASGI with msgspec inside the FastAPI app.

Answers 202 as soon as the row is committed, or streams the run's events if the client accepts text/event-stream.
"""

import re
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from agentrun import telemetry
from agentrun.domain.idempotency import MAX_CLIENT_KEY
from agentrun.gateway import bodies, headers, streams
from agentrun.gateway.answering import answering
from agentrun.gateway.context import Gateway, events_url, session_name
from agentrun.gateway.frames import START
from agentrun.gateway.problems import INVALID_CURSOR, INVALID_HEADER, OVERLOADED, Problem, suspended
from agentrun.gateway.submissions import Accepted, Message

_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_CLIENT_KEY}}}")


class Answer(msgspec.Struct):
    """What a client gets for a submission."""

    run_id: str
    session_id: str
    session: str
    status: str
    events_url: str


class Submit:
    """Both addresses: the session is named by the path, or made for the run."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            accepted, cursor = await self._accept(scope, receive)
        except Problem as problem:
            await problem(scope, receive, send)
            return
        except bodies.ClientLeft:
            return
        fields = [(b"location", f"/v1/runs/{accepted.run_id}".encode())]
        if accepted.replayed:
            fields.append((b"idempotency-replayed", b"true"))
        telemetry.RUNS_SUBMITTED.labels(str(accepted.replayed).lower()).inc()
        if cursor is None:
            await _answer(accepted, fields, send)
        else:
            await self._stream(scope, receive, send, Begun(accepted, cursor, fields))

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[Accepted, int | None]:
        """The stored run, and where its stream begins if the client wants one."""
        gateway = self._gateway
        caller = gateway.authenticator.caller(scope)
        bodies.check_content_type(scope)
        given = scope["path_params"].get("session")
        session = session_name(given) if given is not None else None
        client_key = _client_key(scope)
        cursor = streams.cursor_of(scope, None) if headers.accepts_events(scope["headers"]) else None
        if cursor is not None and gateway.feeds.full:
            raise Problem(OVERLOADED, "Too many clients follow runs. Nothing was stored. Send the same request again.")
        resumes = cursor is not None and cursor != START
        if gateway.suspended and not resumes:
            raise suspended()
        if resumes and client_key is None:
            raise Problem(
                INVALID_CURSOR,
                "To resume, send the Idempotency-Key of the first request too: without it this could start another run.",
            )
        body = bodies.parse_message(await bodies.read(scope, receive, limit=gateway.max_body_bytes))
        message = Message(caller.user, session, client_key, body)
        if resumes and client_key is not None:
            # Who has seen events has a run: a run made now would have none up to that position, and the client would miss its output.
            return await gateway.submissions.find(message, client_key), cursor
        return await gateway.submissions.accept(message), cursor

    async def _stream(self, scope: Scope, receive: Receive, send: Send, begun: "Begun") -> None:
        accepted = begun.accepted
        start = streams.Start(begun.cursor)
        if accepted.replayed:
            try:
                async with answering():
                    start = await streams.start_at(self._gateway.pool, accepted.run_id, begun.cursor)
            except Problem as problem:
                await problem(scope, receive, send)
                return
        if start.at_end:
            await streams.no_content(send, begun.headers)
            return
        await streams.RunStream(self._gateway.feeds, accepted.run_id, start, begun.headers)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Begun:
    """A submission whose answer is a stream."""

    accepted: Accepted
    cursor: int
    headers: list[tuple[bytes, bytes]]


def _client_key(scope: Scope) -> str | None:
    named = headers.named(scope["headers"], b"idempotency-key")
    if not named:
        return None
    if len(named) > 1 or not _KEY.fullmatch(named[0]):
        raise Problem(INVALID_HEADER, f"Idempotency-Key must be there once, with 1 to {MAX_CLIENT_KEY} visible ASCII characters.")
    return named[0]


async def _answer(accepted: Accepted, fields: list[tuple[bytes, bytes]], send: Send) -> None:
    body = msgspec.json.encode(
        Answer(
            str(accepted.run_id),
            str(accepted.session_id),
            accepted.session,
            accepted.status.value,
            events_url(accepted.run_id),
        )
    )
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 202, "headers": [*own, *fields]})
    await send({"type": "http.response.body", "body": body})
