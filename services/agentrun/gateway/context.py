"""What the routes work with, and what several of them do the same way."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.ids import parse_id
from agentrun.domain.text import unstorable
from agentrun.gateway.auth import Authenticator, Caller
from agentrun.gateway.feeds import Feeds
from agentrun.gateway.problems import INVALID_PARAMETER, Problem, not_found, store_unavailable
from agentrun.gateway.publisher import Publisher
from agentrun.gateway.submissions import Submissions
from agentrun.store import runs
from agentrun.store.pool import Pool

MAX_SESSION = 255
ANSWER_SECONDS = 10.0
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufffd]")


@dataclass(frozen=True)
class Gateway:
    """The parts of a gateway. `agent` is the AgentRun's name in the tables."""

    agent: str
    max_body_bytes: int
    pool: Pool
    authenticator: Authenticator
    submissions: Submissions
    publisher: Publisher
    feeds: Feeds
    ready: Callable[[], str | None]
    """What stands against getting traffic, None if nothing does."""

    async def run_of(self, caller: Caller, text: str) -> runs.RunRow:
        """The run with that id. Raises Problem if there is none that the caller may see, StoreUnavailable."""
        run_id = parse_id(text)
        run = await runs.get(self.pool, run_id, agent=self.agent) if run_id else None
        if run is None or not caller.may_see(run.user_id):
            raise not_found("run")
        return run


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Limits the time that a request waits for the database, and turns its absence into the answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except (StoreUnavailable, TimeoutError):
        raise store_unavailable() from None


def session_name(text: str) -> str:
    """A session's name as callers give it. Raises Problem."""
    if not 0 < len(text) <= MAX_SESSION or _CONTROL.search(text) or unstorable(text):
        raise Problem(
            INVALID_PARAMETER, f"A session's name has 1 to {MAX_SESSION} characters, valid UTF-8, without control characters."
        )
    return text


def page_position(text: str | None) -> UUID | None:
    """The `after` of a list. Raises Problem unless it is an id."""
    if text is None:
        return None
    position = parse_id(text)
    if position is None:
        raise Problem(INVALID_PARAMETER, "`after` is the `next` of the page before: an id.")
    return position


def events_url(run_id: UUID | str) -> str:
    """Where a run's events are."""
    return f"/v1/runs/{run_id}/events"


def headers_named(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """All values of a header."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def accepts_events(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client asked for a stream of events."""
    return any("text/event-stream" in value.lower() for value in headers_named(headers, b"accept"))
