"""The effects of one attempt: on record in Postgres before the call goes out, settled after it; see `agents.effects`.

Every write is fenced. Nothing goes out while the lease is in doubt, nor after the attempt has ended.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import uuid5

import msgspec

from agentrun import failpoints
from agentrun.agents.base import RunInfo
from agentrun.agents.effects import (
    KEY_REUSED,
    EffectFailed,
    EffectPolicy,
    EffectUnknown,
    Happened,
    NotHappened,
    Reconcile,
    check_effect,
)
from agentrun.agents.failures import AgentFailure
from agentrun.domain.errors import Fenced
from agentrun.domain.events import encode_data
from agentrun.domain.text import clean
from agentrun.store.effects import Begin, Begun, EffectState, Settle
from agentrun.store.ids import new_id
from agentrun.worker.run_log import RunLog

T = TypeVar("T")

LAST_SECONDS = 1.0
"""How long the end of an attempt waits for a record that is being written; less than an agent that is cancelled may take to end."""
RESPONSE_BYTES = 1_000_000
"""What an effect's request or response may weigh."""


class Effects:
    """All effects of one attempt. `ready` waits while the lease is in doubt and raises Fenced after the end."""

    def __init__(self, run: RunInfo, run_log: RunLog, ready: Callable[[], Awaitable[None]]) -> None:
        self.run = run
        self.log = run_log
        self.ready = ready
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def one(self, name: str, key: str, policy: EffectPolicy, request: Any, reconcile: Reconcile | None) -> "AttemptEffect":
        """One call. A second one of the same name and key waits until the first is through."""
        check_effect(name, key, policy, reconcile)
        return AttemptEffect(self, name, key, policy, _encoded(name, request), reconcile, self._locks[name, key])


class AttemptEffect:
    """One call; see `agents.effects.Effect`."""

    def __init__(
        self,
        effects: Effects,
        name: str,
        key: str,
        policy: EffectPolicy,
        request: str | None,
        reconcile: Reconcile | None,
        lock: asyncio.Lock,
    ) -> None:
        self.name = name
        self.key = key
        self.id = ""
        self.due = False
        self.tries = 0
        self.response: Any = None
        self._on_record = False
        self._effects = effects
        self._policy = policy
        self._request = request
        self._reconcile = reconcile
        self._lock = lock

    async def __aenter__(self) -> "AttemptEffect":
        await self._lock.acquire()
        try:
            await self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if not self.due:
                return
            await failpoints.hit("worker.effect.called")
            if error is None:
                await self._settle(EffectState.DONE, self.response)
            elif isinstance(error, EffectFailed):
                await self._settle(EffectState.FAILED, {"type": error.type, "message": str(error)})
            # After any other error nobody knows: it stays initiated, and the policy decides the next time.
        finally:
            self._lock.release()

    async def _open(self) -> None:
        try:
            await failpoints.hit("worker.effect.before")
            if await self._may_go_out():
                await failpoints.hit("worker.effect.initiated")
                await self._effects.ready()  # the record may have taken longer than the lease
                self.due = True
        except asyncio.CancelledError:
            await self._not_made()
            raise

    async def _may_go_out(self) -> bool:
        """Whether the call is to be made now; else `response` is what came of it before. Raises EffectUnknown, Fenced."""
        begun = await self._begin(again=self._policy is EffectPolicy.RETRY)
        if begun.mine:
            return True
        self._compare(begun)
        if begun.state is EffectState.DONE:
            self.response = _decoded(begun.response)
            return False
        if begun.state is EffectState.INITIATED:
            return await self._asked()
        raise self._unknown()

    async def _begin(self, *, again: bool) -> Begun:
        """Puts the call on record, if that is allowed. Raises Fenced."""
        await self._effects.ready()
        run = self._effects.run
        wish = Begin(run.id, run.attempt, new_id(), self.name, self.key, self._request, again)
        writing = asyncio.create_task(self._effects.log.begin_effect(wish))
        begun = await _through(writing, self._note)
        assert begun.chain_id is not None
        self.id = str(uuid5(begun.chain_id, f"{self.name}\n{self.key}"))
        return begun

    def _note(self, begun: Begun) -> None:
        self.tries = begun.tries
        self._on_record = begun.mine

    async def _not_made(self) -> None:
        """The attempt is ended before the call went out: it has not happened, unless it was made before."""
        if self._on_record and (self.tries == 1 or self._policy is EffectPolicy.FAIL):
            why = {"type": "not_made", "message": "the attempt ended before the call went out"}
            with contextlib.suppress(Fenced, TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await self._settle(EffectState.FAILED, why)

    async def _asked(self) -> bool:
        """What is to be done about a call of which only the beginning is on record: whether it is to be made now."""
        found: Happened | NotHappened | None = None
        if self._reconcile is not None:
            await self._effects.ready()
            found = await self._reconcile(self)
        if isinstance(found, Happened):
            await self._settle(EffectState.DONE, found.response)
            return False
        if isinstance(found, NotHappened):
            return (await self._begin(again=True)).mine
        await self._settle(EffectState.UNKNOWN, None)
        raise self._unknown()

    async def _settle(self, state: EffectState, response: Any) -> None:
        run = self._effects.run
        stored = _encoded(self.name, response)
        wish = Settle(run.id, run.attempt, self.name, self.key, state, stored)
        done = await _through(asyncio.create_task(self._effects.log.settle_effect(wish)))
        if not done.ok:
            raise RuntimeError(f"effect {self.name} {self.key}: somebody settled it otherwise")
        self.response = _decoded(stored)  # as every later attempt gets it
        await failpoints.hit("worker.effect.settled")

    def _compare(self, begun: Begun) -> None:
        if _decoded(self._request) != _decoded(begun.request):
            what = f"effect {self.name}: the key {self.key!r} was used for another request; a key names one call and nothing else"
            raise AgentFailure(what, type=KEY_REUSED)

    def _unknown(self) -> EffectUnknown:
        return EffectUnknown(
            f"effect {self.name} with the key {self.key!r} was begun and nobody knows whether it went through: look, and settle it by hand"
        )


def _encoded(name: str, value: Any) -> str | None:
    """As JSON text that can be stored. Raises AgentFailure."""
    if value is None:
        return None
    try:
        encoded = encode_data(clean(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentFailure(f"effect {name}: requests and responses are JSON values: {error}", type="invalid_effect") from error
    if len(encoded) > RESPONSE_BYTES:
        raise AgentFailure(
            f"effect {name}: {len(encoded)} bytes; a request or response has at most {RESPONSE_BYTES}", type="too_large"
        )
    return encoded.decode()


def _decoded(stored: str | None) -> Any:
    return None if stored is None else msgspec.json.decode(stored)


async def _through(writing: "asyncio.Task[T]", note: Callable[[T], None] = lambda answer: None) -> T:
    """The write's answer. A cancellation waits for it a little: what is on record should be what has happened."""
    try:
        answer = await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=LAST_SECONDS)
        if writing.done() and not writing.cancelled() and writing.exception() is None:
            note(writing.result())
        else:
            writing.cancel()
        raise
    note(answer)
    return answer
