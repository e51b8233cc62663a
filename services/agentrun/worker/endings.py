"""How an attempt ends, each way one transaction: finished, given back, or let go because somebody else has ended it.

Whatever the way, the entry is acknowledged or exchanged afterwards, and the ledger rows are stored. Every transition here may
be repeated after a lost reply: what was done the first time is read back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from agentrun import failpoints
from agentrun.agents.base import Result
from agentrun.agents.effects import UNKNOWN as EFFECT_UNKNOWN
from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.states import Outcome, RunStatus
from agentrun.domain.text import clean
from agentrun.store.transitions import Claimed, Finish, Finished, Flush, Reason, TakeOver
from agentrun.telemetry import ATTEMPTS_ENDED, DEAD_LETTERS, RUNS_FINISHED, TAKEOVERS
from agentrun.worker.context import STATE_BYTES, TOO_LARGE
from agentrun.worker.event_writer import Aftermath, Writer
from agentrun.worker.patience import log
from agentrun.worker.run_log import Rest, RunLog

LONGEST_BACK_OFF_SECONDS = 60.0
LONGEST_WISH_SECONDS = 600.0
"""How long a provider that is too busy may ask us to wait."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How retryable errors are tried again: how often, and after how long. `jitter` gives numbers from 0 to 1."""

    most: int
    first_seconds: float
    jitter: Callable[[], float]

    def back_off(self, done: int) -> float:
        """Seconds to wait when `done` retries have been made: doubled each time, between half and all of that."""
        longest: float = min(self.first_seconds * 2.0**done, LONGEST_BACK_OFF_SECONDS)
        return longest * (0.5 + 0.5 * self.jitter())


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as clients see it."""

    type: str
    message: str

    @property
    def data(self) -> Mapping[str, str]:
        """As JSON members that can be stored."""
        return {"type": str(clean(self.type)), "message": str(clean(self.message))}


class Ending:
    """The end of one attempt; exactly one of its methods is called. `take_entry` gives the entry that is to be acknowledged then, once."""

    def __init__(
        self, writer: Writer, run_log: RunLog, claimed: Claimed, take_entry: Callable[[], str], retries: Retries
    ) -> None:
        self._writer = writer
        self._log = run_log
        self._claimed = claimed
        self._take_entry = take_entry
        self._retries = retries

    async def succeed(self, result: Result) -> None:
        """The run has its answer. One that is not JSON fails the run."""
        try:
            output: Any = clean(result.output)
            stored = encode_data({"output": output, "messages": clean(list(result.messages))}).decode()
            data = encode_data({"output": output})
        except (TypeError, ValueError, RecursionError) as error:
            await self.fail(Failure("invalid_result", f"the agent's result is not a JSON value: {error}"))
            return
        if len(stored) > STATE_BYTES:
            what = f"the agent's result takes {len(stored)} bytes; one has at most {STATE_BYTES}: store what is large elsewhere"
            await self.fail(Failure(TOO_LARGE, what))
            return
        await self._finish(RunStatus.SUCCEEDED, Kind.COMPLETED, data, result=stored)

    async def fail(self, failure: Failure) -> None:
        """The run failed for good."""
        data = encode_data({"error": failure.data})
        await self._finish(RunStatus.FAILED, Kind.FAILED, data, error=encode_data(failure.data).decode())
        if failure.type == EFFECT_UNKNOWN and not self._log.fenced:
            DEAD_LETTERS.inc()  # its finish has put it aside

    async def retry(self, failure: Failure, *, after: float = 0.0) -> None:
        """The run waits for its next attempt, at least `after` seconds, or fails if it had enough of them."""
        if self._claimed.retries >= self._retries.most:
            await self.fail(failure)
            return
        delay = max(self._retries.back_off(self._claimed.retries), min(after, LONGEST_WISH_SECONDS))
        log.info("run is tried again", run_id=str(self._claimed.run_id), error=failure.type, after_seconds=round(delay, 2))
        await self._give_back(Reason.RETRYING, retry_after=delay, error=encode_data(failure.data).decode())

    async def hand_back(self) -> None:
        """The worker stops; another one goes on."""
        await self._give_back(Reason.HANDED_BACK)

    async def let_go(self) -> None:
        """Somebody else has ended the attempt: only what was spent is stored.

        If nobody has after all (a cancel message that came without its transaction), the run is handed back.
        """
        claimed = self._claimed
        async with self._log.end() as rest:
            mine = await self._writer.flush(Flush(claimed.run_id, claimed.epoch, 0, ledger=rest.ledger))
            rest.ledger.clear()
        if mine:
            await self.hand_back()
        else:
            ATTEMPTS_ENDED.labels("fenced").inc()
            self._after()

    async def _finish(
        self, status: RunStatus, kind: Kind, data: bytes, *, result: str | None = None, error: str | None = None
    ) -> None:
        async with self._log.end() as rest:
            last = Event(rest.last_seq + 1, self._claimed.epoch, kind, data)
            await failpoints.hit("worker.finish.before")
            events, ledger = [*rest.events, last], rest.ledger
            wish = Finish(self._claimed.run_id, self._claimed.epoch, status, result, error, events, ledger)
            try:
                done = await self._writer.finish(wish)
            except Exception as refusal:  # Postgres answered, and cannot take these values
                status, last, done = await self._finish_without(rest, refusal)
        await self._finished(status, last, done)

    async def _finished(self, status: RunStatus, last: Event, done: Finished) -> None:
        if not done.ok:
            self._log.fence()
            ATTEMPTS_ENDED.labels("fenced").inc()
            self._after()
            return
        await failpoints.hit("worker.finish.committed")
        ATTEMPTS_ENDED.labels(Outcome.FINISHED.value).inc()
        RUNS_FINISHED.labels(status.value).inc()
        self._after(events=(last,), publish=done.next_head)

    async def _finish_without(self, rest: Rest, refusal: Exception) -> tuple[RunStatus, Event, Finished]:
        """Fails a run whose last events or result cannot be stored: the numbers stay, as voids, and readers drop them.

        The ledger rows have been stored by then (`Writer`).
        """
        claimed = self._claimed
        log.error("a run's end cannot be stored", run_id=str(claimed.run_id), error=str(refusal))
        failure = Failure("unstorable", f"the run's output cannot be stored: {refusal}").data
        keep = rest.events[0].seq - 1 if rest.events else rest.last_seq
        events = [Event(event.seq, claimed.epoch, Kind.VOID, b"{}") for event in rest.events]
        events.append(Event(rest.last_seq + 1, claimed.epoch, Kind.RESTART, encode_data({"keep": keep})))
        last = Event(rest.last_seq + 2, claimed.epoch, Kind.FAILED, encode_data({"error": failure}))
        wish = Finish(
            claimed.run_id,
            claimed.epoch,
            RunStatus.FAILED,
            error=encode_data(failure).decode(),
            events=[*events, last],
        )
        return RunStatus.FAILED, last, await self._writer.finish(wish)

    async def _give_back(self, reason: Reason, *, retry_after: float = 0.0, error: str | None = None) -> None:
        claimed = self._claimed
        async with self._log.end() as rest:
            wish = TakeOver(
                claimed.run_id,
                reason,
                epoch=claimed.epoch,
                last_seq=rest.last_seq,
                retry_after=retry_after,
                error=error,
                events=rest.events,
                ledger=rest.ledger,
            )
            try:
                taken = await self._writer.give_back(wish)
            except Exception as refusal:  # Postgres answered, and would refuse the same events again
                await self._finished(*await self._finish_without(rest, refusal))
                return
        if not taken.ok:
            self._log.fence()
            ATTEMPTS_ENDED.labels("fenced").inc()
            self._after()
            return
        await failpoints.hit("worker.retry.committed" if reason is Reason.RETRYING else "worker.handback.committed")
        ATTEMPTS_ENDED.labels(reason.value).inc()
        TAKEOVERS.labels(reason.value).inc()
        # A run that is not due yet is published by the sweep when it is.
        self._after(events=taken.events, again=retry_after == 0)

    def _after(self, *, events: Sequence[Event] = (), publish: UUID | None = None, again: bool = False) -> None:
        self._writer.after(Aftermath(self._claimed.run_id, self._take_entry(), events, publish, again))
