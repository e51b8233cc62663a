"""One attempt at a run: gives the agent its context, watches over it, and brings it to one of its endings.

Must not know Redis or Postgres: what the attempt writes goes through `RunLog` and `Ending`, its right to do so is `Lease`.
"""

import asyncio
import time
from enum import StrEnum
from typing import Any

from agentrun.agents.base import Executor, Result, RunInfo
from agentrun.agents.failures import classify
from agentrun.domain.events import Kind
from agentrun.telemetry import RUNS_ACTIVE
from agentrun.worker.context import AttemptContext, Opening
from agentrun.worker.endings import Ending, Failure
from agentrun.worker.lease import Lease
from agentrun.worker.patience import log
from agentrun.worker.purse import Purse
from agentrun.worker.run_log import RunLog

CANCEL_SECONDS = 2.0
"""How long an agent may take to end after it was cancelled; then it is left behind, fenced."""


class End(StrEnum):
    """Why an attempt is ended from outside the agent."""

    FENCED = "fenced"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    HANDED_BACK = "handed_back"


class Attempt:
    """One attempt, from its first event to its ending."""

    def __init__(
        self,
        executor: Executor,
        run: RunInfo,
        opening: Opening,
        run_log: RunLog,
        lease: Lease,
        ending: Ending,
        purse: Purse,
    ) -> None:
        self._executor = executor
        self._run = run
        self._log = run_log
        self._lease = lease
        self._ending = ending
        self._asked: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._refusal: Exception | None = None
        self._context = AttemptContext(run, opening, run_log, lease, self._asked, purse)
        self._over = False
        self.left_behind: asyncio.Task[Result] | None = None
        run_log.on_refused = self._refused
        lease.on_lost = self._lost

    def ask(self, end: End) -> None:
        """Asks the attempt to end; the first one who asks decides how."""
        if not self._asked.done():
            self._asked.set_result(end)

    @property
    def cut_short(self) -> bool:
        """Whether the agent was told to end."""
        return self._asked.done()

    def _refused(self, error: Exception) -> None:
        """A write was refused: nothing that the attempt does can be stored any more."""
        self._refusal = error
        self.ask(End.FENCED)

    def _lost(self) -> None:
        """The keeper found the attempt's row ended. If the attempt is ending by itself, its own write decides."""
        if not self._over and not self._log.fenced:
            self._log.fence()

    async def execute(self) -> None:
        """Runs the agent and ends the attempt. Returns when the end is committed; raises only if it cannot be."""
        RUNS_ACTIVE.inc()
        try:
            if self._lease.lost:
                self._lost()
            outcome = await self._supervise()
            self._over = True
            await self._end(outcome)
        finally:
            self._log.abandon()
            RUNS_ACTIVE.dec()

    async def _supervise(self) -> Result | BaseException | End:
        task = asyncio.create_task(self._agent(), name=f"run {self._run.id}")
        left = self._lease.stops_at - time.monotonic()
        timer = asyncio.get_running_loop().call_later(left, self.ask, End.TIMEOUT)
        try:
            either: set[asyncio.Future[Any]] = {task, self._asked}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        finally:
            timer.cancel()
            if not task.done():
                task.cancel()
                self.left_behind = task
        return self._outcome(task)

    def _outcome(self, task: "asyncio.Task[Result]") -> Result | BaseException | End:
        asked = self._asked.result() if self._asked.done() else None
        if not task.done():
            assert asked is not None
            log.warning("an agent does not end when cancelled and is left behind", run_id=str(self._run.id), why=asked)
            return asked
        error = RuntimeError("the agent cancelled itself") if task.cancelled() else task.exception()
        if asked in (End.HANDED_BACK, End.TIMEOUT) and error is None:
            return task.result()  # it ended by itself, just in time: what it cost is not paid twice
        if asked is not None:
            return asked
        return task.result() if error is None else error

    async def _agent(self) -> Result:
        try:
            if self._run.attempt == 1:
                run = self._run
                opened = {"run_id": str(run.id), "session_id": str(run.session_id), "agent": run.agent}
                await self._context.write(Kind.CREATED, opened)
            await self._context.write(Kind.STARTED, {"attempt": self._run.attempt})
            result = await self._executor.execute(self._context)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"the agent tried to end the process: {error!r}") from error
        if not isinstance(result, Result):
            raise TypeError(f"the agent gave a {type(result).__name__} instead of a Result")
        return result

    async def _end(self, outcome: Result | BaseException | End) -> None:
        if self._refusal is not None and not self._log.fenced:
            await self._ending.fail(Failure("unstorable", f"an event cannot be stored: {self._refusal}"))
        elif self._log.fenced or outcome in (End.FENCED, End.CANCELLED):
            await self._ending.let_go()
        elif isinstance(outcome, Result):
            await self._ending.succeed(outcome)
        elif outcome is End.HANDED_BACK:
            await self._ending.hand_back()
        elif outcome is End.TIMEOUT:
            await self._ending.retry(Failure("timeout", "the attempt reached workers.maxRunSeconds"))
        else:
            assert isinstance(outcome, BaseException)
            await self._end_with(outcome)

    async def _end_with(self, error: BaseException) -> None:
        verdict = classify(error)
        log.info("an agent failed", run_id=str(self._run.id), error=verdict.type, exc_info=error)
        failure = Failure(verdict.type, verdict.message)
        if verdict.retryable:
            await self._ending.retry(failure, after=verdict.retry_after or 0.0)
        else:
            await self._ending.fail(failure)
