"""Request bodies: read within the limit, decoded strictly, and refused if they could not be stored as they are."""

import asyncio
import re
from typing import Any, Literal, TypeVar

import msgspec
from starlette.types import Receive, Scope

from agentrun.domain import idempotency
from agentrun.domain.text import unstorable
from agentrun.gateway import headers
from agentrun.gateway.problems import (
    BODY_TOO_LARGE,
    INVALID_BODY,
    INVALID_HEADER,
    UNSUPPORTED_MEDIA_TYPE,
    Problem,
    request_timeout,
)

T = TypeVar("T")

MAX_DEPTH = 64
BODY_SECONDS = 30.0
MAX_LENGTH_DIGITS = 18

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # asked only when decoding failed, so it is not one of a pair
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class ClientLeft(Exception):
    """The client closed the connection before its request was complete: there is nobody to answer."""


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a submission says: `input`, a text that is not empty, or a JSON object or list."""

    input: str | list[Any] | dict[str, Any]

    def canonical(self) -> bytes:
        """The body as its idempotency key sees it: the values, not their spelling."""
        return idempotency.canonical({"input": self.input})

    def content(self) -> str:
        """The message itself, as JSON."""
        return msgspec.json.encode(self.input).decode()


class SettlementBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What somebody says came of an effect: `done` with its response, or `failed`: nothing has happened."""

    name: str
    key: str
    state: Literal["done", "failed"]
    response: Any = msgspec.UNSET


_decoder = msgspec.json.Decoder(MessageBody)
_settlements = msgspec.json.Decoder(SettlementBody)


async def read(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body.

    Raises Problem for a body over `limit` bytes, whether its length was announced or not, and for one that does not come in time;
    ClientLeft if the client goes.
    """
    _check_length(_header(scope, b"content-length"), limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _pieces(receive, limit)
    except TimeoutError:
        raise request_timeout(BODY_SECONDS) from None


async def _pieces(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _check_length(announced: bytes | None, limit: int) -> None:
    if announced is None:
        return
    if not announced.isdigit() or len(announced) > MAX_LENGTH_DIGITS:
        detail = f"Content-Length is a whole number with {MAX_LENGTH_DIGITS} digits at most."
        raise Problem(INVALID_HEADER, detail, headers={"Connection": "close"})
    if int(announced) > limit:
        raise _too_large(limit)


def check_content_type(scope: Scope) -> None:
    """Raises Problem unless the request says that its body is plain JSON.

    A form or text/plain is refused even if it holds JSON: browsers send those across sites without asking.
    """
    kind, parameters = headers.media_type((_header(scope, b"content-type") or b"").decode("latin-1"))
    if kind != "application/json" or any(name == "charset" and value not in ("utf-8", "utf8") for name, value in parameters):
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "Send the body as UTF-8 JSON with `Content-Type: application/json`.")
    if (_header(scope, b"content-encoding") or b"identity").lower() != b"identity":
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "Send the body without Content-Encoding: compressed bodies are not taken.")


def parse_message(raw: bytes) -> MessageBody:
    """The submission in `raw`. Raises Problem that says where it is wrong."""
    body = _decoded(raw, _decoder, '{"input": text, object or list}')
    if not body.input:
        raise Problem(INVALID_BODY, "`input` is empty. Send a text, an object or a list that says something.")
    _check_members(raw, 1 + check_value(body.input))
    return body


def parse_settlement(raw: bytes) -> SettlementBody:
    """What somebody says came of an effect. Raises Problem that says where it is wrong."""
    body = _decoded(raw, _settlements, '{"name": text, "key": text, "state": "done" or "failed", "response": any value}')
    check_value([body.name, body.key])
    given = body.response is not msgspec.UNSET
    if given and body.state == "failed":
        raise Problem(INVALID_BODY, "`failed` means that nothing has happened, so there is no `response`. Leave it out.")
    _check_members(raw, 3 + given + (check_value(body.response) if given else 0))
    return body


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[T], form: str) -> T:
    try:
        return decoder.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise Problem(INVALID_BODY, f"{error}. The body is {form} and nothing else.") from None
    except msgspec.DecodeError as error:
        if _SURROGATE.search(raw):
            raise _unstorable() from None
        raise Problem(INVALID_BODY, f"{error}. The body must be one JSON document in UTF-8.") from None


def _check_members(raw: bytes, members: int) -> None:
    # The decoder keeps the last of two members of one name, other readers of the same body the first: nobody could say what was meant.
    if raw.count(b":") != members and _STRING.sub(b"", raw).count(b":") != members:
        raise Problem(INVALID_BODY, "An object has two members of one name. Send each once.")


def check_value(value: object) -> int:
    """How many members the objects in it have. Raises Problem if it is nested too deeply or has text that Postgres cannot hold."""
    members = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                members += len(item)
                for key in item:
                    _check_text(key)
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return members
        level = deeper
    for item in level:
        if isinstance(item, dict | list):
            raise _too_deep()
        if isinstance(item, str):
            _check_text(item)
    return members


def _check_text(text: str) -> None:
    if unstorable(text):
        raise _unstorable()


def _unstorable() -> Problem:
    return Problem(INVALID_BODY, "A string holds U+0000 or half of a surrogate pair, which cannot be stored. Remove it.")


def _too_deep() -> Problem:
    return Problem(INVALID_BODY, f"The body is nested more than {MAX_DEPTH} levels deep. Send it flatter, or as a text.")


def _too_large(limit: int) -> Problem:
    # The rest of the body is not read, so the connection cannot be used again.
    return Problem(BODY_TOO_LARGE, f"A body may have {limit} bytes at most.", headers={"Connection": "close"})


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None
