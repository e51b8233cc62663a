"""Who is calling: API keys from a file of hashed records, which is read again when it changes.

A key belongs to a user. With the scope `act-as` it may name the end user in `X-Agentrun-User` and then sees what that user sees; with
`admin`, and no user named, it sees every user's data.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.types import Scope as HttpScope

from agentrun.domain import keys
from agentrun.domain.errors import ConfigurationError
from agentrun.domain.text import NAME_RULE, is_name
from agentrun.gateway.problems import FORBIDDEN, INVALID_HEADER, INVALID_PARAMETER, UNAUTHENTICATED, Problem

USER_HEADER = "X-Agentrun-User"
LOOK_SECONDS = 1.0

_SCHEME = re.compile("[A-Za-z][A-Za-z0-9-]{0,19}")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is made, and whether it may see everybody's data."""

    user: str
    admin: bool

    @property
    def sees(self) -> str | None:
        """The one user whose data this caller sees; None: everybody's."""
        return None if self.admin else self.user

    def asking_for(self, user: str | None) -> str | None:
        """The one user whose data a request is about that names `user` in `?user=`; None: everybody's. Raises Problem."""
        if user is None:
            return self.sees
        if not is_name(user):
            raise Problem(INVALID_PARAMETER, f"`user` has {NAME_RULE}.")
        if not self.may_see(user):
            raise Problem(FORBIDDEN, "This key has no scope `admin`. Leave `user` out or use a key that has it.")
        return user

    def must_be_admin(self, what: str) -> None:
        """Raises Problem unless the key has the scope `admin` and names no user. `what` begins the sentence, such as "CronTasks are"."""
        if not self.admin:
            detail = f"{what} for keys with the scope `admin`, without {USER_HEADER}. Use one that has it."
            raise Problem(FORBIDDEN, detail)

    def may_see(self, user: str) -> bool:
        """Whether data of `user` may be shown."""
        return self.admin or user == self.user


class Authenticator:
    """The keys of one file. A change takes effect within a second; a file that cannot be read keeps the keys that were there."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        self._path = path
        self._looked = time.monotonic()
        try:
            self._stamp = self._look()
            self._records = self._read()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"AGENTRUN_API_KEYS: {path}: {error}; make the file with `agentrun keys create`") from error

    def caller(self, scope: HttpScope) -> Caller:
        """Who sent the request. Raises Problem: 401 without a valid key, 403 if the key may not act for the user it names."""
        presented: list[bytes] = []
        users: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"authorization":
                presented.append(value)
            elif name == b"x-agentrun-user":
                users.append(value)
        record = self._verify(presented)
        if not users:
            return Caller(record.user, keys.Scope.ADMIN in record.scopes)
        user = _user(users)
        if user != record.user and keys.Scope.ACT_AS not in record.scopes:
            raise Problem(FORBIDDEN, f"This key has no scope `act-as`. Leave {USER_HEADER} out or use a key that has it.")
        return Caller(user, admin=False)

    def _verify(self, presented: list[bytes]) -> keys.KeyRecord:
        self._reload()
        if len(presented) != 1:
            raise _unauthenticated("Send your API key as `Authorization: Bearer ar_…`, once.")
        scheme, _, token = presented[0].decode("latin-1").strip().partition(" ")
        if scheme.lower() != "bearer":
            shown = (
                f"The scheme `{scheme}`" if token and _SCHEME.fullmatch(scheme) else "An Authorization without the scheme Bearer"
            )
            raise _unauthenticated(f"{shown} is not taken. Send your API key as `Authorization: Bearer ar_…`.")
        if not token.strip():
            raise _unauthenticated("This Authorization holds no key. Send your API key as `Authorization: Bearer ar_…`.")
        record = keys.verify(token.strip(), self._records)
        if record is None:
            raise _unauthenticated("This API key is not known. Check it, or make one with `agentrun keys create`.")
        return record

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._records = self._read()
                self._stamp = stamp
                _log.info("API keys read again", keys=len(self._records))
        except (OSError, ValueError) as error:
            _log.error("API keys cannot be read; the former ones stay valid", path=str(self._path), error=str(error))

    def _look(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> dict[str, keys.KeyRecord]:
        return keys.parse_records(self._path.read_text(encoding="utf-8"))


def _user(values: list[bytes]) -> str:
    try:
        user = values[0].decode()
    except UnicodeDecodeError:
        user = ""
    if len(values) > 1 or not is_name(user):
        raise Problem(INVALID_HEADER, f"{USER_HEADER} must be there once, in UTF-8, with {NAME_RULE}.")
    return user


def _unauthenticated(detail: str) -> Problem:
    return Problem(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": 'Bearer realm="agentrun"'})
