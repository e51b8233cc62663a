"""What the routes work with, and what several of them do the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from agentrun.domain.ids import parse_id
from agentrun.domain.text import NAME_RULE, is_name
from agentrun.gateway.auth import Authenticator, Caller
from agentrun.gateway.feeds import Feeds
from agentrun.gateway.problems import INVALID_PARAMETER, Problem, not_found
from agentrun.gateway.publisher import Publisher
from agentrun.gateway.submissions import Submissions
from agentrun.store import runs
from agentrun.store.budgets import Budget
from agentrun.store.pool import Pool

SESSION_RULE = f"A session's name has {NAME_RULE}, is valid UTF-8 without `/`, and is neither `.` nor `..`."


@dataclass(frozen=True)
class Gateway:
    """The parts of a gateway. `agent` is the AgentRun's name in the tables."""

    agent: str
    max_body_bytes: int
    suspended: bool
    """Whether submissions are refused."""
    pool: Pool
    authenticator: Authenticator
    submissions: Submissions
    publisher: Publisher
    feeds: Feeds
    budget: Budget | None
    """Into what new runs must fit."""
    ready: Callable[[], str | None]
    """What stands against getting traffic, None if nothing does."""

    async def run_of(self, caller: Caller, text: str) -> runs.RunRow:
        """The run with that id. Raises Problem if there is none that the caller may see, StoreUnavailable."""
        run_id = parse_id(text)
        run = await runs.get(self.pool, run_id, agent=self.agent) if run_id else None
        if run is None or not caller.may_see(run.user_id):
            raise not_found("run")
        return run


def session_name(text: str) -> str:
    """A session's name as callers give it. Raises Problem."""
    # Clients and proxies resolve the steps `.` and `..` away.
    if not is_name(text) or "/" in text or text in (".", ".."):
        raise Problem(INVALID_PARAMETER, SESSION_RULE)
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
