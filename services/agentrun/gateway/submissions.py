"""From a request to a stored run: idempotency keys, one group commit for all requests that wait, and the answer.

The row is the promise: nothing here waits for Redis. What is to be published is handed to the publisher after the commit; if that fails,
the sweep finds the row.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from agentrun import failpoints
from agentrun.domain import idempotency
from agentrun.domain.states import RunStatus
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.bodies import MessageBody
from agentrun.gateway.problems import IDEMPOTENCY_KEY_REUSED, INVALID_CURSOR, OVERLOADED, Problem
from agentrun.gateway.publisher import Publisher
from agentrun.store import runs, transitions
from agentrun.store.group import Group
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool
from agentrun.store.transitions import Submission, Submitted

MOST_WAITING = 10_000
MOST_WAITING_BYTES = 64_000_000


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


def _weight(submission: Submission) -> int:
    """About how many bytes it takes to store."""
    return len(submission.body) + len(submission.content)


class Submissions:
    """Stores submissions in groups. Belongs to one event loop."""

    def __init__(self, pool: Pool, publisher: Publisher, *, agent: str, dedupe_seconds: int) -> None:
        self._pool = pool
        self._publisher = publisher
        self._agent = agent
        self._dedupe_seconds = dedupe_seconds
        self._group: Group[Submission, Submitted] = Group(self._commit, weigh=_weight, stage="submit")

    async def accept(self, message: Message) -> Accepted:
        """Stores the submission, or finds the run of an earlier one that says the same.

        Raises Problem: the key was used for another body, the database is away, or too many requests wait for it.
        """
        if len(self._group) >= MOST_WAITING or self._group.weight >= MOST_WAITING_BYTES:
            raise Problem(OVERLOADED, "Send the same request again, with the same Idempotency-Key if it had one.")
        submission = self._prepare(message)
        async with answering():
            found = await self._group.submit(submission)
        if found.reused:
            raise _reused()
        return Accepted(found.run_id, found.session_id, submission.external_id, found.status, found.replayed)

    async def find(self, message: Message, client_key: str) -> Accepted:
        """The run of an earlier submission that said the same under the same key; stores nothing.

        Raises Problem: there is none, the key was used for another body, or the database is away.
        """
        submission = self._prepare(message)
        async with answering():
            run = await runs.by_client_key(
                self._pool,
                agent=self._agent,
                user_id=message.user,
                session_given=submission.session_given,
                client_key=client_key,
            )
        if run is None:
            raise Problem(
                INVALID_CURSOR,
                "No run was started with this Idempotency-Key, so there is nothing to resume. Leave Last-Event-ID out to start one.",
            )
        if run.idempotency_key != submission.idempotency_key:
            raise _reused()
        return Accepted(run.id, run.session_id, run.external_id, run.status, replayed=True)

    def _prepare(self, message: Message) -> Submission:
        return prepare(message, agent=self._agent, dedupe_seconds=self._dedupe_seconds, now=time.time(), make_id=new_id)

    async def close(self) -> None:
        """Waits until every submission that was taken has its answer."""
        await self._group.close()

    async def _commit(self, group: Sequence[Submission]) -> Sequence[Submitted]:
        await failpoints.hit("gateway.submit.before")
        found = await read_back(lambda: transitions.submit(self._pool, group))
        await failpoints.hit("gateway.submit.committed")
        self._publisher.publish([run.run_id for run in found if run.is_head and not run.reused])
        return found


def _reused() -> Problem:
    return Problem(
        IDEMPOTENCY_KEY_REUSED,
        "This Idempotency-Key belongs to a request with another body. Nothing was stored. Use a new key for a new message.",
    )
