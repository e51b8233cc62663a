"""The agent's view of its attempt: what it says, books and saves becomes numbered events, ledger rows and checkpoints."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrun import failpoints
from agentrun.agents.base import RunInfo, Turn, Usage, UserInput
from agentrun.agents.effects import Effect, EffectPolicy, Reconcile
from agentrun.agents.failures import AgentFailure
from agentrun.costs.amounts import usd
from agentrun.domain.events import TERMINAL, Kind, encode_data, flaw
from agentrun.domain.text import clean
from agentrun.store.budgets import Purse as Spent
from agentrun.store.transitions import LedgerRow
from agentrun.telemetry import MODEL_CALLS, UNKNOWN_PRICES
from agentrun.worker.effects import Effects
from agentrun.worker.lease import Lease
from agentrun.worker.purse import Purse
from agentrun.worker.run_log import RunLog

OURS = TERMINAL | {Kind.CREATED, Kind.STARTED, Kind.RESTART, Kind.VOID, Kind.USAGE}
EVENT_BYTES = 1_000_000
"""What one event's data may weigh. Each reader's connection, the log and Redis hold it whole."""
STATE_BYTES = 32_000_000
"""What a checkpoint or a result may weigh: it is stored, and read again, in one piece."""
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Opening:
    """What an agent is given at the start; `purse` is what its run may spend and has spent."""

    inputs: Sequence[UserInput]
    history: Sequence[Turn]
    state: Any
    purse: Spent


class AttemptContext:
    """The agent's view of its attempt; see `agents.base.Context`."""

    def __init__(
        self, run: RunInfo, opening: Opening, run_log: RunLog, lease: Lease, asked: asyncio.Future[Any], purse: Purse
    ) -> None:
        self.run = run
        self.inputs = opening.inputs
        self.history = opening.history
        self.state = opening.state
        self._log = run_log
        self._lease = lease
        self._asked = asked
        self._purse = purse
        self._calls = 0
        self._effects = Effects(run, run_log, self.ready)

    @property
    def deadline(self) -> float:
        """`time.monotonic()` at which this attempt is stopped."""
        return self._lease.stops_at

    @property
    def cancelled(self) -> bool:
        """Whether the attempt has been asked to end."""
        return self._asked.done()

    async def emit(self, kind: Kind, data: Mapping[str, Any]) -> int:
        """Sends one event of the agent. Raises ValueError for kinds that only the worker writes, AgentFailure for data that no reader could
        use, Fenced after the end.
        """
        if kind in OURS:
            raise ValueError(f"an agent cannot emit {kind.value!r}; the worker does")
        if (wrong := flaw(kind, data)) is not None:
            raise AgentFailure(f"an event {kind.value} cannot be sent: {wrong}; see docs/streaming.md", type="invalid_event")
        return await self.write(kind, data)

    async def write(self, kind: Kind, data: Mapping[str, Any]) -> int:
        """Sends one event of any kind: waits for a sure lease and a reserved number, and takes both in one step."""
        encoded = encode_data(clean(dict(data)))
        if len(encoded) > EVENT_BYTES:
            what = f"an event {kind.value} of {len(encoded)} bytes; an event has at most {EVENT_BYTES}: send it in pieces"
            raise AgentFailure(what, type=TOO_LARGE)
        while True:
            await self._sure()
            if self._log.room:
                break
            await self._log.flush()
        event = self._log.append(kind, encoded)
        await failpoints.hit("worker.emitted")
        return event.seq

    async def ready(self) -> None:
        """Waits while the lease is in doubt. Raises Fenced, and AgentFailure if the run may not spend any more."""
        await self._sure()
        self._purse.check()

    async def _sure(self) -> None:
        self._log.check()
        if self._lease.in_doubt:
            await self._lease.sure()
            self._log.check()

    async def book(self, usage: Usage) -> None:
        """Books one finished model call: a ledger row and a `usage` event. Raises Fenced; the row is stored all the same."""
        row = self._row(usage)
        await self.write(
            Kind.USAGE,
            {
                "call": row.call,
                "model": row.model,
                "input_tokens": row.input_tokens,
                "cached_tokens": row.cached_tokens,
                "cache_write_tokens": row.cache_write_tokens,
                "output_tokens": row.output_tokens,
                "reasoning_tokens": row.reasoning_tokens,
                "audio_input_tokens": row.audio_input_tokens,
                "audio_output_tokens": row.audio_output_tokens,
                "cost_usd": None if row.cost_usd is None else usd(row.cost_usd),
                "unmeasured": row.unmeasured,
            },
        )

    def book_cut(self, usage: Usage) -> None:
        """Books a model call that was cut: a ledger row only."""
        self._row(usage)

    async def checkpoint(self, state: Any) -> None:
        """Stores everything so far with `state`. Raises Fenced."""
        encoded = encode_data(clean(state))
        if len(encoded) > STATE_BYTES:
            what = f"a checkpoint of {len(encoded)} bytes; one has at most {STATE_BYTES}: keep what is large elsewhere"
            raise AgentFailure(what, type=TOO_LARGE)
        await self._log.flush(encoded.decode())

    def effect(
        self,
        name: str,
        *,
        key: str,
        policy: EffectPolicy | str = EffectPolicy.FAIL,
        request: Any = None,
        reconcile: Reconcile | None = None,
    ) -> Effect:
        """A call that changes the world; see `agents.effects`. Raises ValueError for a name, key or policy that cannot be used."""
        return self._effects.one(name, key, EffectPolicy(policy), request, reconcile)

    def _row(self, usage: Usage) -> LedgerRow:
        usage = usage.counted()
        cost = self._purse.pay(usage)
        row = LedgerRow(
            call=self._calls,
            model=usage.model,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            audio_input_tokens=usage.audio_input_tokens,
            audio_output_tokens=usage.audio_output_tokens,
            cost_usd=cost.cost_usd,
            price_id=cost.price_id,
            unmeasured=not usage.measured,
            provider=usage.provider,
        )
        self._calls += 1
        MODEL_CALLS.labels(str(row.unmeasured).lower()).inc()
        if row.cost_usd is None:
            UNKNOWN_PRICES.inc()
        self._log.book(row)
        return row
