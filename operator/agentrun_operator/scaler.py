"""Follows demand: decides from each sample how many workers there should be, and writes that number where another one is.

It owns `replicas` of the worker Deployment and nothing else, as manager agentrun-scaler. Every write begins with a fresh look at the
Deployment, so that neither an old cache nor somebody else's autoscaler is written over, and names the uid, so that it makes nothing.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from agentrun import failpoints
from agentrun.control.scaling import Memory, desired_workers
from agentrun_operator import deletion_cost
from agentrun_operator.autoscalers import Autoscalers, managers_of_replicas
from agentrun_operator.cache import ObjectCache
from agentrun_operator.facts import ScalingFact
from agentrun_operator.kube import Conflict, Kube, KubeError
from agentrun_operator.metrics import SCALE_ERRORS, SCALED
from agentrun_operator.reasons import EventReason
from agentrun_operator.render.labels import SUSPENDED
from agentrun_operator.replicas import Body, aim, busy_workers, hand_over, has_arrived, is_settled, replicas_of, suspension
from agentrun_operator.resources import DEPLOYMENTS, Key
from agentrun_operator.sampler import Sample
from agentrun_operator.scaler_state import State, fact_of, is_complete, is_ours, version_of
from agentrun_operator.targets import Mode, Target

MANAGER = "agentrun-scaler"
COUNTERS_SECONDS = 15.0
"""Counters of one AgentRun go to its status at most this often."""
OLD_SAMPLE_SECONDS = 5.0
"""Who is busy is not taken from an older sample."""
RIVAL_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 30.0
_WRITES_AT_ONCE = 8

_log = structlog.get_logger(__name__)

OnChange = Callable[[Key], None]
OnEvent = Callable[[Key, EventReason, str], None]


class Scaler:
    """The scaler of all AgentRuns. `on_sample` is called for each sample and returns at once; writes are tasks of their own."""

    def __init__(
        self,
        kube: Kube,
        cache: ObjectCache,
        autoscalers: Autoscalers,
        *,
        on_change: OnChange,
        on_event: OnEvent = lambda _key, _reason, _message: None,
        dead_lettered: Callable[[Target], int | None] = lambda _target: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` is told when `fact` has changed. `clock` is the one of the samples."""
        self._kube = kube
        self._cache = cache
        self._autoscalers = autoscalers
        self._on_change = on_change
        self._on_event = on_event
        self._dead_lettered = dead_lettered
        self._clock = clock
        self._states: dict[Key, State] = {}
        self._places = asyncio.Semaphore(_WRITES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, target: Target) -> bool:
        """Scales this AgentRun from its next sample on. Whether anything about it is new."""
        state = self._states.get(target.key)
        if state is None or state.target.uid != target.uid:
            self.forget(target.key)
            self._states[target.key] = State(target)
            return True
        changed = state.target != target
        state.target = target
        return changed

    def forget(self, key: Key) -> None:
        """Leaves its workers as they are."""
        state = self._states.pop(key, None)
        if state is not None and state.acting is not None:
            state.acting.cancel()

    def fact(self, key: Key) -> ScalingFact | None:
        """For status: the state now, with counters that change at most every 15 seconds."""
        state = self._states.get(key)
        return state.fact if state is not None else None

    async def aclose(self) -> None:
        """Ends writes that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_sample(self, key: Key, sample: Sample) -> None:
        """Decides anew. Where the Deployment is not as it should be, a write begins."""
        state = self._states.get(key)
        if state is None:
            return
        state.sample = sample
        deployment = self._deployment(state.target)
        rival = self._rival(state)
        if state.target.mode is Mode.EXTERNAL or rival is not None:
            state.wanted, state.why, state.memory = None, None, Memory()
            look = rival is not None and not self._autoscalers.known and sample.at - state.rival_at > RIVAL_SECONDS
            if look or (deployment is not None and self._is_to_be_handed_over(state, deployment)):
                self._act(state)
        else:
            self._decide(state, deployment, sample)
            if deployment is not None and self._is_to_be_changed(state, deployment):
                self._act(state)
        self._publish(state)

    def _decide(self, state: State, deployment: Body | None, sample: Sample) -> None:
        target = state.target
        if target.suspended:
            state.wanted, state.why, state.memory = 0, None, Memory()
            return
        current = state.wanted
        if current is None:
            current = replicas_of(deployment) if deployment is not None else target.bounds.min_replicas
        state.complete = is_complete(state, sample, current=current)
        demand = sample.demand.total if sample.demand is not None else None
        decision = desired_workers(demand, current=current, bounds=target.bounds, now=sample.at, memory=state.memory)
        if decision.workers < current and not state.complete:
            decision = desired_workers(None, current=current, bounds=target.bounds, now=sample.at, memory=state.memory)
        state.wanted, state.why, state.memory = decision.workers, decision.why, decision.memory

    def _aim(self, state: State, deployment: Body) -> int:
        target, sample = state.target, state.sample
        if sample is None or state.wanted is None:
            return replicas_of(deployment)
        if target.suspended:
            return 0
        return aim(
            wanted=state.wanted,
            replicas=replicas_of(deployment),
            known=sample.demand is not None and state.complete and self._clock() - sample.at < OLD_SAMPLE_SECONDS,
            settled=is_settled(deployment),
            busy=busy_workers(sample.held, target.worker.name),
            most=target.bounds.max_replicas,
        )

    def _is_to_be_changed(self, state: State, deployment: Body) -> bool:
        if self._aim(state, deployment) != replicas_of(deployment) or state.left_at not in (None, replicas_of(deployment)):
            return True
        if state.costs_out and replicas_of(deployment) == 0:
            state.costs_out = False
        return state.costs_out and has_arrived(deployment)

    def _deployment(self, target: Target) -> Body | None:
        """The worker Deployment, if it is ours and complete."""
        found = self._cache.get(target.worker)
        return found if found is not None and is_ours(found, target) else None

    def _rival(self, state: State) -> str | None:
        if self._autoscalers.known:
            self._set_rival(state, self._autoscalers.of(state.target.worker))
        return state.rival

    def _set_rival(self, state: State, rival: str | None) -> None:
        before, target, state.rival = state.rival, state.target, rival
        if rival is None or before is not None or target.mode is Mode.EXTERNAL:
            return
        _log.warning("somebody else scales the workers", agentrun=str(target.key), who=rival)
        self._on_event(
            target.key,
            EventReason.SCALER_CONFLICT,
            f"{rival} scales the Deployment {target.worker.name} too, so this operator leaves its replicas alone",
        )

    def _act(self, state: State) -> None:
        if state.acting is not None or self._clock() < state.not_before:
            return
        task = state.acting = asyncio.create_task(self._bring_about(state), name="scale")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_about(self, state: State) -> None:
        try:
            async with self._places:
                await self._change(state)
        except* Exception as errors:
            state.failures += 1
            state.not_before = self._clock() + min(2.0 ** min(state.failures - 1, 10), LONGEST_PAUSE_SECONDS)
            SCALE_ERRORS.inc()
            expected, other = errors.split(KubeError)
            if expected is not None:
                _log.warning("workers could not be scaled", agentrun=str(state.target.key), error=str(_first(expected)))
            if other is not None:
                _log.error("workers could not be scaled", agentrun=str(state.target.key), exc_info=other)
        else:
            state.failures = 0
        finally:
            state.acting = None

    async def _change(self, state: State) -> None:
        """Looks at the Deployment, and does what is to be done now. Raises KubeError."""
        target = state.target
        live = await self._kube.get(target.worker)
        if live is None or not is_ours(live, target):
            return
        if target.mode is Mode.EXTERNAL or await self._is_rivalled(state, live):
            if (once := self._handed_over(state, live)) is not None:
                await self._write(state, live, once, mark={SUSPENDED: "true"} if target.suspended else {})
            else:
                state.left_to_others = version_of(live)
            return
        wanted, replicas = self._aim(state, live), replicas_of(live)
        state.left_at = replicas
        if wanted == replicas:
            self._cache.put(DEPLOYMENTS, live)
            if state.costs_out and has_arrived(live):
                await self._clear_costs(state, live)
            return
        if 0 < wanted < replicas:
            wanted = await self._protect_busy(state, live)
        if wanted != replicas:
            await self._write(state, live, wanted)

    async def _is_rivalled(self, state: State, live: Body) -> bool:
        self._set_rival(state, await self._autoscalers.check(state.target.worker, live))
        state.rival_at = self._clock()
        if state.rival is not None:
            state.wanted, state.why, state.memory = None, None, Memory()
            self._publish(state)
        return state.rival is not None

    async def _protect_busy(self, state: State, live: Body) -> int:
        """Makes the busy pods the last ones to go; the number of replicas with which no busy pod goes."""
        target, sample, replicas = state.target, state.sample, replicas_of(live)
        if sample is None:
            return replicas
        crew = deletion_cost.crew(await deletion_cost.list_pods(self._kube, live), sample.held)
        least = min(len(crew.busy), target.bounds.max_replicas)
        wanted = min(replicas, max(state.wanted or 0, least))
        if wanted == replicas or (crew.endangered and replicas <= target.bounds.max_replicas):
            return replicas
        state.costs_out = True
        await deletion_cost.assign(self._kube, target.key.namespace, crew.costs)
        await failpoints.hit("operator.scale.costs")
        return wanted

    async def _clear_costs(self, state: State, live: Body) -> None:
        pods = await deletion_cost.list_pods(self._kube, live)
        await deletion_cost.assign(self._kube, state.target.key.namespace, deletion_cost.ours(pods))
        state.costs_out = False

    def _is_to_be_handed_over(self, state: State, deployment: Body) -> bool:
        """By the cache, which does not have the managers."""
        return self._handed_over(state, deployment) is not None and state.left_to_others != version_of(deployment)

    @staticmethod
    def _handed_over(state: State, live: Body) -> int | None:
        """What to write to a Deployment that others scale, if anything."""
        suspended, least = state.target.suspended, state.target.bounds.min_replicas
        once = suspension(live, suspended=suspended, least=least)
        if once is not None:
            return once
        return hand_over(live, managers_of_replicas(live), ours=MANAGER, suspended=suspended, least=least)

    async def _write(self, state: State, live: Body, wanted: int, *, mark: Mapping[str, str] | None = None) -> None:
        target, replicas = state.target, replicas_of(live)
        metadata = {"uid": live["metadata"]["uid"], **({"annotations": mark} if mark else {})}
        body: dict[str, Any] = {"metadata": metadata, "spec": {"replicas": wanted}}
        try:
            answer = await self._kube.apply(target.worker, body, manager=MANAGER)
        except Conflict:
            return  # deleted in this moment: whoever makes it anew asks for the number
        await failpoints.hit("operator.scale.written")
        self._cache.put(DEPLOYMENTS, answer)
        state.left_at = wanted
        SCALED.labels("up" if wanted > replicas else "down").inc()
        _log.info("scaled", agentrun=str(target.key), workers=wanted, before=replicas, why=state.why)
        self._on_event(target.key, EventReason.SCALED, f"workers: {replicas} to {wanted}")

    def _publish(self, state: State) -> None:
        """Takes what is known now into the fact: a change of state or number at once, counters when it is their time."""
        sample = state.sample
        if sample is None:
            return
        now = fact_of(state, self._dead_lettered(state.target))
        if now == state.fact:
            return
        news = state.fact is None or (now.state, now.desired) != (state.fact.state, state.fact.desired)
        if news or sample.at - state.fact_at >= COUNTERS_SECONDS:
            state.fact, state.fact_at = now, sample.at
            self._on_change(state.target.key)


def _first(group: BaseExceptionGroup[KubeError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
