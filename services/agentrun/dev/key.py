"""The API key of one state folder: made at the first start, kept for the next ones."""

import contextlib
import secrets
from datetime import UTC, datetime
from pathlib import Path

from agentrun.domain.keys import RANDOM_BYTES, Scope, generate, parse_records, record_line, verify


def dev_key(state: Path) -> str:
    """The key in `dev-key` if `api-keys` still knows it, else a new pair. Only their owner can read them.

    Other keys of `api-keys` stay; a line of it that is no record is left for the gateway to refuse.
    """
    plain, hashed = state / "dev-key", state / "api-keys"
    with contextlib.suppress(OSError, ValueError):
        kept = plain.read_text(encoding="utf-8").strip()
        if verify(kept, parse_records(hashed.read_text(encoding="utf-8"))) is not None:
            return kept
    key, record = generate(
        secrets.token_bytes(RANDOM_BYTES),
        user="dev",
        scopes=[Scope.ACT_AS, Scope.ADMIN],
        created=datetime.now(UTC).replace(microsecond=0),
    )
    for path in (hashed, plain):
        path.touch(mode=0o600, exist_ok=True)
    with hashed.open("a", encoding="utf-8") as out:
        out.write(f"{record_line(record)}\n" if hashed.stat().st_size == 0 else f"\n{record_line(record)}\n")
    plain.write_text(key + "\n", encoding="utf-8")
    return key
