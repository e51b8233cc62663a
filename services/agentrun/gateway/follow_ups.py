"""Messages to busy sessions, decided one by one: in their order within a session, a few sessions at a time.

Plain submissions do not wait for them: a row that leaves its group goes on here, and so does every later row of its session while any
waits.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from agentrun.domain.errors import StoreUnavailable
from agentrun.store.budgets import Refused
from agentrun.store.follow_ups import FollowedUp
from agentrun.store.transitions import Submission

Session = tuple[str, str]
"""A session by its user and its name."""
Answer = FollowedUp | Refused
Waiting = tuple[Submission, "asyncio.Future[Answer]"]


def session_of(submission: Submission) -> Session:
    """Whose session the message is for, and its name."""
    return submission.user_id, submission.external_id


class FollowUps:
    """Decides messages with `decide`, in the order of `put` within each session. Belongs to one event loop."""

    def __init__(self, decide: Callable[[Submission], Awaitable[Answer]], *, at_once: int) -> None:
        self._decide = decide
        self._room = asyncio.Semaphore(at_once)
        self._sessions: dict[Session, deque[Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0

    def __len__(self) -> int:
        """How many messages have no answer yet."""
        return self._waiting

    def busy(self, session: Session) -> bool:
        """Whether messages of the session wait here: a later one must wait behind them."""
        return session in self._sessions

    def put(self, submission: Submission) -> "asyncio.Future[Answer]":
        """Takes a message; the future gets what `decide` answers or raises. Whoever waits may be cancelled: it is decided all the same."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_looked_at)
        session = session_of(submission)
        self._waiting += 1
        if session in self._sessions:
            self._sessions[session].append((submission, future))
        else:
            self._sessions[session] = deque([(submission, future)])
            task = asyncio.create_task(self._work(session), name="follow-ups")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return future

    async def close(self) -> None:
        """Waits until everything put in has its answer."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _work(self, session: Session) -> None:
        waiting = self._sessions[session]
        try:
            while waiting:
                async with self._room:
                    submission, future = waiting.popleft()
                    await self._one(submission, future, waiting)
        finally:
            self._drop(waiting, asyncio.CancelledError())
            del self._sessions[session]  # in the same step as the last look at `waiting`, or a message could be left behind

    async def _one(self, submission: Submission, future: "asyncio.Future[Answer]", behind: deque[Waiting]) -> None:
        try:
            if future.cancelled():
                return  # nobody waits for it, and nothing is stored: as if the request had not come
            answer = await self._decide(submission)
        except BaseException as error:
            if not future.done():
                future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if isinstance(error, StoreUnavailable):
                self._drop(behind, error)  # trying them singly would only take longer
            elif not isinstance(error, Exception):
                raise
        else:
            if not future.done():
                future.set_result(answer)
        finally:
            self._waiting -= 1

    def _drop(self, waiting: deque[Waiting], error: BaseException) -> None:
        while waiting:
            future = waiting.popleft()[1]
            self._waiting -= 1
            if not future.done():
                future.set_exception(error) if isinstance(error, Exception) else future.cancel()


def _looked_at(future: "asyncio.Future[Answer]") -> None:
    """Whoever waited may have left: an error that nobody asks for is no news."""
    if not future.cancelled():
        future.exception()
