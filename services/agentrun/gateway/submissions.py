"""From a request to a stored run: idempotency keys, one group commit for all requests that wait, and the answer.

The row is the promise: nothing here waits for Redis. What is to be published is handed to the publisher after the commit; if that fails,
the sweep finds the row. A message to a busy session leaves its group where the follow-up policy must decide (gateway/follow_ups.py).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from agentrun import failpoints, telemetry
from agentrun.domain import idempotency
from agentrun.domain.follow_ups import Policy
from agentrun.domain.states import RunStatus
from agentrun.gateway.answering import answering, read_back
from agentrun.gateway.bodies import MessageBody
from agentrun.gateway.follow_ups import FollowUps, session_of
from agentrun.gateway.problems import BUDGET_EXHAUSTED, IDEMPOTENCY_KEY_REUSED, INVALID_CURSOR, OVERLOADED, SESSION_BUSY, Problem
from agentrun.gateway.publisher import Publisher
from agentrun.store import follow_ups, runs
from agentrun.store.budgets import Budget, Refused
from agentrun.store.follow_ups import FollowedUp
from agentrun.store.group import Group
from agentrun.store.ids import new_id
from agentrun.store.pool import Pool
from agentrun.store.transitions import Reason, Submission, Submitted

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


@dataclass(frozen=True, slots=True)
class FollowUpRules:
    """What happens to a message while its session has an unfinished run; `at_once` sessions are decided at the same time."""

    policy: Policy
    window_seconds: float
    at_once: int


Decided = Submitted | Refused | asyncio.Future[FollowedUp | Refused]


class Submissions:
    """Stores submissions in groups. Belongs to one event loop."""

    def __init__(
        self,
        pool: Pool,
        publisher: Publisher,
        *,
        agent: str,
        dedupe_seconds: int,
        rules: FollowUpRules,
        budget: Budget | None = None,
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._agent = agent
        self._dedupe_seconds = dedupe_seconds
        self._rules = rules
        self._budget = budget
        self._group: Group[Submission, Decided] = Group(self._commit, weigh=_weight, stage="submit")
        self._follow_ups = FollowUps(self._follow_up, at_once=rules.at_once)

    async def accept(self, message: Message) -> Accepted:
        """Stores the submission, or finds the run of an earlier one that says the same.

        Raises Problem: the key was used for another body, the session is busy and the policy is Reject, the day's budget is exhausted, the
        database is away, or too many requests wait for it.
        """
        if len(self._group) + len(self._follow_ups) >= MOST_WAITING or self._group.weight >= MOST_WAITING_BYTES:
            raise Problem(OVERLOADED, "Send the same request again, with the same Idempotency-Key if it had one.")
        submission = self._prepare(message)
        async with answering():
            decided = await self._group.submit(submission)
            found = await self._decided(decided) if isinstance(decided, asyncio.Future) else decided
        if isinstance(found, Refused):
            raise refusal(found)
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
        await self._follow_ups.close()

    async def _commit(self, group: Sequence[Submission]) -> Sequence[Decided]:
        # Rows of a session that has others waiting wait behind them, in their order.
        plain = [item for item in group if not self._follow_ups.busy(session_of(item))]
        await failpoints.hit("gateway.submit.before")
        stored = await read_back(lambda: follow_ups.submit(self._pool, plain, self._rules.policy, self._budget)) if plain else []
        await failpoints.hit("gateway.submit.committed")
        self._publisher.publish([run.run_id for run in stored if isinstance(run, Submitted) and run.is_head and not run.reused])
        found = {item.run_id: run for item, run in zip(plain, stored, strict=True)}
        return [found.get(item.run_id) or self._follow_ups.put(item) for item in group]

    async def _follow_up(self, submission: Submission) -> FollowedUp | Refused:
        policy, window, budget = self._rules.policy, self._rules.window_seconds, self._budget
        await failpoints.hit("gateway.follow_up.before")
        done = await read_back(lambda: follow_ups.follow_up(self._pool, submission, policy, window_seconds=window, budget=budget))
        await failpoints.hit("gateway.follow_up.committed")
        if isinstance(done, Refused) or done.rejected:
            return done
        if (taken := done.superseded) is not None:
            if taken.owner is not None:
                self._publisher.cancel(taken.owner.rpartition("/")[0], taken.run_id, taken.epoch)
            self._publisher.send_events([(taken.run_id, event) for event in taken.events])
            telemetry.TAKEOVERS.labels(Reason.SUPERSEDED.value).inc()
            telemetry.RUNS_FINISHED.labels(RunStatus.SUPERSEDED.value).inc()
        if done.run.is_head and not done.run.reused:
            self._publisher.publish([done.run.run_id])
        return done

    async def _decided(self, decided: "asyncio.Future[FollowedUp | Refused]") -> Submitted | Refused:
        done = await decided
        if isinstance(done, Refused):
            return done
        if done.rejected:
            raise Problem(
                SESSION_BUSY,
                "Nothing was stored. Send the same request again, with the same Idempotency-Key if it had one, when that run has ended.",
                members={"run_id": str(done.run.run_id), "run_status": done.run.status.value},
            )
        return done.run


def refusal(refused: Refused) -> Problem:
    """The answer to a submission that does not fit into the day's budget."""
    telemetry.BUDGET_REFUSALS.labels(refused.scope).inc()
    whose = "The runs of this user have" if refused.scope == "user" else "The runs of this agent have"
    return Problem(
        BUDGET_EXHAUSTED,
        f"{whose} spent or set aside what they may cost today. Nothing was stored. Send the same request again after "
        f"{refused.wait_seconds} s, with the same Idempotency-Key if it had one.",
        headers={"Retry-After": str(refused.wait_seconds)},
        members={"scope": refused.scope},
    )


def _reused() -> Problem:
    return Problem(
        IDEMPOTENCY_KEY_REUSED,
        "This Idempotency-Key belongs to a request with another body. Nothing was stored. Use a new key for a new message.",
    )
