"""Where requests and replies begin and end on a connection: Postgres' protocol, or bytes of any other.

Postgres: https://www.postgresql.org/docs/current/protocol-message-formats.html. Encrypted connections are not understood.
"""

import struct
from dataclasses import dataclass
from typing import Protocol

_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104


@dataclass(frozen=True)
class Piece:
    """Bytes that travel together. `text` is what they execute, if they do; `ends`: the request or reply ends here."""

    raw: bytes
    text: str | None
    ends: bool


class Wire(Protocol):
    def requests(self, data: bytes) -> list[Piece]: ...

    def replies(self, data: bytes) -> list[Piece]: ...

    def number(self, sent: int, answered: int) -> int:
        """The number of the request that is now being sent; replies are counted in the same way."""
        ...


class PlainWire:
    """Every read is a whole request or reply: right for a client that waits for each answer."""

    def requests(self, data: bytes) -> list[Piece]:
        return [Piece(data, data.decode("latin-1"), True)]

    def replies(self, data: bytes) -> list[Piece]:
        return [Piece(data, None, True)]

    def number(self, sent: int, answered: int) -> int:
        return answered + 1


class PostgresWire:
    """A request ends with Sync or a simple Query, its reply with ReadyForQuery; the start-up is request 1."""

    def __init__(self) -> None:
        self._statements: dict[bytes, str] = {}
        self._up = self._down = b""
        self._started = False
        self._single_bytes = 0  # the answers to requests for encryption have no length

    def number(self, sent: int, answered: int) -> int:
        return sent + 1

    def requests(self, data: bytes) -> list[Piece]:
        self._up += data
        pieces = []
        while (piece := self._next_request()) is not None:
            pieces.append(piece)
        return pieces

    def replies(self, data: bytes) -> list[Piece]:
        self._down += data
        pieces = []
        while self._down:
            if self._single_bytes:
                raw, self._down = self._down[:1], self._down[1:]
                self._single_bytes -= 1
                pieces.append(Piece(raw, None, False))
                continue
            raw, self._down = _typed(self._down)
            if not raw:
                break
            pieces.append(Piece(raw, None, raw[:1] == b"Z"))
        return pieces

    def _next_request(self) -> Piece | None:
        if not self._started:
            if len(self._up) < 8 or len(self._up) < struct.unpack("!i", self._up[:4])[0]:
                return None
            length, code = struct.unpack("!ii", self._up[:8])
            raw, self._up = self._up[:length], self._up[length:]
            asks_encryption = code in (_SSL_REQUEST, _GSS_REQUEST)
            self._single_bytes += asks_encryption
            self._started = not asks_encryption
            return Piece(raw, None, self._started)
        raw, self._up = _typed(self._up)
        if not raw:
            return None
        kind, body = raw[:1], raw[5:]
        text = None
        if kind == b"Q":
            text = body[:-1].decode(errors="replace")
        elif kind == b"P":
            name, sql = body.split(b"\0", 2)[:2]
            self._statements[name] = sql.decode(errors="replace")
        elif kind == b"B":
            text = self._statements.get(body.split(b"\0", 2)[1], "")
        return Piece(raw, text, kind in b"QSF")


def _typed(data: bytes) -> tuple[bytes, bytes]:
    """The first message that is a type byte and a length; b"" if it is not all there yet."""
    if len(data) < 5:
        return b"", data
    end = 1 + int(struct.unpack("!i", data[1:5])[0])
    return (data[:end], data[end:]) if len(data) >= end else (b"", data)
