"""Request bodies: read within the limit, decoded strictly, and refused if they could not be stored as they are."""

from typing import Any

import msgspec
from starlette.types import Receive, Scope

from agentrun.domain import idempotency
from agentrun.domain.text import unstorable
from agentrun.gateway.problems import BODY_TOO_LARGE, INVALID_BODY, UNSUPPORTED_MEDIA_TYPE, Problem

MAX_DEPTH = 64


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


_decoder = msgspec.json.Decoder(MessageBody)


async def read(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body.

    Raises Problem for a body over `limit` bytes, whether its length was announced or not, ClientLeft if it never comes.
    """
    announced = _header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
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


def check_content_type(scope: Scope) -> None:
    """Raises Problem unless the request says that its body is plain JSON.

    A form or text/plain is refused even if it holds JSON: browsers send those across sites without asking.
    """
    media_type, _, parameters = (_header(scope, b"content-type") or b"").decode("latin-1").lower().partition(";")
    charset = parameters.strip().removeprefix("charset=").strip('" ')
    if media_type.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "Send the body as UTF-8 JSON with `Content-Type: application/json`.")
    if (_header(scope, b"content-encoding") or b"identity").lower() != b"identity":
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "Send the body without Content-Encoding: compressed bodies are not taken.")


def parse_message(raw: bytes) -> MessageBody:
    """The submission in `raw`. Raises Problem that says where it is wrong."""
    try:
        body = _decoder.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise Problem(INVALID_BODY, f'{error}. The body is {{"input": text, object or list}} and nothing else.') from None
    except msgspec.DecodeError as error:
        raise Problem(INVALID_BODY, f"{error}. The body must be one JSON document in UTF-8.") from None
    if not body.input:
        raise Problem(INVALID_BODY, "`input` is empty. Send a text, an object or a list that says something.")
    check_value(body.input)
    return body


def check_value(value: object) -> None:
    """Raises Problem for a value that is nested too deeply or has text that Postgres cannot hold."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return
        level = deeper
    for item in level:
        if isinstance(item, dict | list):
            raise _too_deep()
        if isinstance(item, str):
            _check_text(item)


def _check_text(text: str) -> None:
    if unstorable(text):
        raise Problem(INVALID_BODY, "A string holds U+0000 or half of a surrogate pair, which cannot be stored. Remove it.")


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
