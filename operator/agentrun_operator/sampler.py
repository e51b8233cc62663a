"""One sampler for all AgentRuns: at each tick one pipelined look at each Redis, and at once where work was published.

AgentRuns with the same Redis URL share a lane: one connection for the looks and one that follows their wake channels. A lane is a task
of its own with time limits of its own, so a Redis that hangs delays nobody else. Must not know Kubernetes, or what a sample is for.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from agentrun.bus import connection
from agentrun.bus.connection import ReadOnly
from agentrun.bus.lag import Demand, ManySampler, Reading
from agentrun.bus.pubsub import Subscriptions
from agentrun.domain.errors import AgentrunError
from agentrun_operator.metrics import TICK_SECONDS
from agentrun_operator.resources import Key
from agentrun_operator.targets import Target

WAKE_GAP_SECONDS = 0.25
"""An AgentRun that is woken again sooner than this after its last sample waits until then: a busy one would be sampled without end."""
SAMPLES_PER_TURN = 100

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at `at` (monotonic seconds). No demand: it could not be measured, and `problem` says why.

    `held` maps the consumers that hold entries to how many. `age_seconds` is the age of the stream's group: in one that was made anew
    workers have to put back first what they are working on. None: it is old.
    """

    at: float
    demand: Demand | None
    held: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    age_seconds: float | None = None


class Sampler:
    """Keeps a lane for each Redis. `on_sample` gets each sample and must not block."""

    def __init__(
        self,
        on_sample: Callable[[Key, Sample], None],
        *,
        tick_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_sample = on_sample
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[Key, _Lane] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def watch(self, target: Target) -> None:
        """Samples this AgentRun from now on, the first time at once; a changed target replaces the old one."""
        lane = self._lane_of.get(target.key)
        if lane is not None and lane.url != target.redis_url:
            self.forget(target.key)
            lane = None
        if lane is None:
            lane = self._lanes.get(target.redis_url)
            if lane is None:
                lane = self._lanes[target.redis_url] = _Lane(
                    target.redis_url, self._on_sample, tick_seconds=self._tick_seconds, clock=self._clock
                )
            self._lane_of[target.key] = lane
        lane.add(target)

    def forget(self, key: Key) -> None:
        """Samples it no more; the last AgentRun of a Redis takes its connections along."""
        lane = self._lane_of.pop(key, None)
        if lane is None:
            return
        lane.remove(key)
        if not lane.targets and self._lanes.pop(lane.url, None) is lane:
            closing = asyncio.create_task(lane.aclose(), name="close-lane")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def wake(self, key: Key) -> None:
        """Samples one AgentRun soon, as if work had been published."""
        lane = self._lane_of.get(key)
        if lane is not None:
            lane.wake(key)

    @property
    def lanes(self) -> int:
        """How many Redis servers are sampled."""
        return len(self._lanes)

    def stalled(self) -> str | None:
        """What is wrong if a lane gets nowhere although all that it does is limited in time; None if all is well."""
        limit = self._tick_seconds + 60.0
        late = sum(self._clock() - lane.stamped > limit for lane in self._lanes.values())
        return f"no progress: {late} of {len(self._lanes)} samplers" if late else None

    async def aclose(self) -> None:
        """Ends everything."""
        lanes = [*self._lanes.values()]
        self._lanes.clear()
        self._lane_of.clear()
        await asyncio.gather(*(lane.aclose() for lane in lanes), *self._closing, return_exceptions=True)


class _Lane:
    """All AgentRuns of one Redis URL."""

    def __init__(
        self, url: str, on_sample: Callable[[Key, Sample], None], *, tick_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.url = url
        self.targets: dict[Key, Target] = {}
        self.stamped = clock()
        self._on_sample = on_sample
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._woken: set[Key] = set()
        self._wake = asyncio.Event()
        self._sampled_at: dict[Key, float] = {}
        self._callbacks: dict[Key, tuple[str, Callable[[int], None]]] = {}
        self._joining: set[asyncio.Task[bool]] = set()
        self._problem = ""
        self._pool = None if not url else _pool(url)
        self._subscriptions: Subscriptions[int] | None = None
        self._many: ManySampler | None = None
        if self._pool is not None:
            self._subscriptions = Subscriptions(self._pool, decode=int, on_reconnect=self._wake_all)
            self._many = ManySampler(self._pool)
        self._task = asyncio.create_task(self._keep_running(), name="sampler-lane")

    def add(self, target: Target) -> None:
        known = self.targets.get(target.key)
        self.targets[target.key] = target
        if known is None:
            self._follow(target)
            self._sampled_at[target.key] = float("-inf")
            self.wake(target.key)
        elif known.question != target.question and self._many is not None:
            self._many.forget(known.question)

    def remove(self, key: Key) -> None:
        target = self.targets.pop(key)
        self._woken.discard(key)
        self._sampled_at.pop(key, None)
        channel, callback = self._callbacks.pop(key, ("", lambda _: None))
        if self._subscriptions is not None and self._many is not None:
            self._subscriptions.unsubscribe(channel, callback)
            self._many.forget(target.question)

    def wake(self, key: Key) -> None:
        if key in self.targets:
            self._woken.add(key)
            self._wake.set()

    async def aclose(self) -> None:
        tasks = [self._task, *self._joining]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._subscriptions is not None and self._many is not None and self._pool is not None:
            await self._subscriptions.aclose()
            await self._many.aclose()
            await self._pool.disconnect()

    def _follow(self, target: Target) -> None:
        if self._subscriptions is None:
            return
        channel, key = target.question.keys.wake, target.key

        def woken(_added: int) -> None:
            self.wake(key)

        self._callbacks[key] = (channel, woken)
        joining = asyncio.create_task(self._subscriptions.subscribe(channel, woken), name="follow-wake-channel")
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    def _wake_all(self) -> None:
        """What was published while the channels were cut is found now."""
        for key in self.targets:
            self.wake(key)

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._run()
            except Exception:
                _log.exception("sampling failed")
                await asyncio.sleep(self._tick_seconds)

    async def _run(self) -> None:
        due = self._clock() + self._tick_seconds
        while True:
            now = self._clock()
            if now >= due:
                due = now + self._tick_seconds
                await self._look([*self.targets.values()], full=True)
            else:
                ready, later = self._ready(now)
                if ready:
                    await self._look(ready, full=False)
                else:
                    await self._rest(min(due, later) - now)
            self.stamped = self._clock()

    def _ready(self, now: float) -> tuple[list[Target], float]:
        """The woken AgentRuns whose turn has come, and when that of the next one comes."""
        later = float("inf")
        ready = []
        for key in self._woken:
            at = self._sampled_at[key] + WAKE_GAP_SECONDS
            if at <= now:
                ready.append(self.targets[key])
            else:
                later = min(later, at)
        return ready, later

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._wake.wait()
                await asyncio.sleep(0)  # what arrives together is looked at together

    async def _look(self, targets: Sequence[Target], *, full: bool) -> None:
        if not targets:
            return
        for target in targets:
            self._woken.discard(target.key)
        began = time.perf_counter()
        readings = await self._read(targets)
        if full:
            self._leave_replica(readings[0])
            TICK_SECONDS.observe(time.perf_counter() - began)
        at = self._clock()
        for number, (target, reading) in enumerate(zip(targets, readings, strict=True), 1):
            current = self.targets.get(target.key)
            if current is None:
                continue
            self._sampled_at[target.key] = at
            if current.question != target.question:
                self.wake(target.key)
            elif isinstance(reading, Reading):
                self._deliver(target.key, Sample(at, reading.demand, reading.held, age_seconds=reading.age_seconds))
            else:
                self._deliver(target.key, Sample(at, None, problem=str(reading)))
            if number % SAMPLES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _leave_replica(self, reading: Reading | AgentrunError) -> None:
        """After a failover the old primary keeps its subscribers: they find the new one by connecting anew."""
        if isinstance(reading, ReadOnly) and self._subscriptions is not None:
            self._subscriptions.reconnect()

    def _deliver(self, key: Key, sample: Sample) -> None:
        """One AgentRun's fault is not the others'."""
        try:
            self._on_sample(key, sample)
        except Exception:
            _log.exception("a sample could not be used", agentrun=str(key))

    async def _read(self, targets: Sequence[Target]) -> Sequence[Reading | AgentrunError]:
        if self._many is None:
            return [AgentrunError("the secret holds no Redis URL")] * len(targets)
        try:
            readings = await self._many.sample([target.question for target in targets])
            problem = ""
        except AgentrunError as error:
            readings, problem = [error] * len(targets), str(error)
        if bool(problem) != bool(self._problem):
            if problem:
                _log.warning("demand is unknown", agentruns=len(self.targets), why=problem)
            else:
                _log.info("demand is known again", agentruns=len(self.targets))
        self._problem = problem
        return readings


def _pool(url: str) -> connection.Pool | None:
    """A pool for this URL; None if it is not one. It hands out connections of their own only, so it stays empty."""
    try:
        return connection.pool(url, size=1)
    except AgentrunError as error:
        _log.warning("not a Redis URL", why=str(error))
        return None
