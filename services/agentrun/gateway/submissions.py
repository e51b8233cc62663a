"""From a request to a stored run: idempotency keys, one group commit for all requests that wait, and the answer.

The row is the promise: nothing here waits for Redis. What is to be published is handed to the publisher after the commit; if that fails,
the sweep finds the row.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from agentrun import failpoints, telemetry
from agentrun.domain import idempotency
from agentrun.domain.errors import StoreUnavailable
from agentrun.domain.states import RunStatus
from agentrun.gateway.bodies import MessageBody
from agentrun.gateway.problems import IDEMPOTENCY_KEY_REUSED, OVERLOADED, Problem, store_unavailable
from agentrun.gateway.publisher import Publisher
from agentrun.store import transitions
from agentrun.store.group import Group
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool
from agentrun.store.transitions import Submission, Submitted

MOST_WAITING = 10_000
ANSWER_SECONDS = 10.0
"""A request is answered after this time, with 503 if need be, whatever the database does."""


@dataclass(frozen=True, slots=True)
class Message:
    """One submission as it came in. `session` is the caller's name for the session, None if they gave none."""

    user: str
    session: str | None
    client_key: str | None
    body: MessageBody


@dataclass(frozen=True, slots=True)
class Accepted:
    """The run that answers a submission; `replayed` if an earlier request made it. `session` is the name of its session."""

    run_id: UUID
    session_id: UUID
    session: str
    status: RunStatus
    replayed: bool


def prepare(message: Message, *, agent: str, dedupe_seconds: int, now: float, make_id: Callable[[], UUID]) -> Submission:
    """The rows of a submission, with every key decided; `now` is in Unix seconds."""
    run_id = make_id()
    body = message.body.canonical()
    given = message.session or ""
    if message.client_key is not None or dedupe_seconds > 0:
        key = idempotency.key(
            agent=agent,
            user=message.user,
            session_given=given,
            client_key=message.client_key if message.client_key is not None else idempotency.bucket(now, dedupe_seconds),
            body=body,
        )
    else:
        key = f"run:{run_id}"
    return Submission(
        run_id=run_id,
        session_id=make_id(),
        input_id=make_id(),
        agent=agent,
        user_id=message.user,
        external_id=message.session if message.session is not None else f"run:{key}",
        session_given=given,
        idempotency_key=key,
        client_key=message.client_key,
        body_hash=idempotency.body_hash(body),
        body=body.decode(),
        content=message.body.content(),
    )


class Submissions:
    """Stores submissions in groups. Belongs to one event loop."""

    def __init__(self, pool: Pool, publisher: Publisher, *, agent: str, dedupe_seconds: int) -> None:
        self._pool = pool
        self._publisher = publisher
        self._agent = agent
        self._dedupe_seconds = dedupe_seconds
        self._group: Group[Submission, Submitted] = Group(self._commit, stage="submit")

    async def accept(self, message: Message) -> Accepted:
        """Stores the submission, or finds the run of an earlier one that says the same.

        Raises Problem: the key was used for another body, the database is away, or too many requests wait for it.
        """
        if len(self._group) >= MOST_WAITING:
            raise Problem(OVERLOADED, "Send the same request again, with the same Idempotency-Key if it had one.")
        submission = prepare(message, agent=self._agent, dedupe_seconds=self._dedupe_seconds, now=time.time(), make_id=new_id)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._group.submit(submission)
        except (StoreUnavailable, TimeoutError):
            raise store_unavailable() from None
        if found.reused:
            raise Problem(
                IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key belongs to a request with another body. Nothing was stored. Use a new key for a new message.",
            )
        return Accepted(found.run_id, found.session_id, submission.external_id, found.status, found.replayed)

    async def close(self) -> None:
        """Waits until every submission that was taken has its answer."""
        await self._group.close()

    async def _commit(self, group: Sequence[Submission]) -> Sequence[Submitted]:
        telemetry.GROUP_SIZE.labels("submit").observe(len(group))
        await failpoints.hit("gateway.submit.before")
        try:
            found = await transitions.submit(self._pool, group)
        except StoreUnavailable:
            # The reply may have been lost after the commit: with the same ids the second try reads back what the first one did.
            found = await transitions.submit(self._pool, group)
        await failpoints.hit("gateway.submit.committed")
        self._publisher.publish([run.run_id for run in found if run.is_head and not run.reused])
        return found
