"""From CronTasks to rows of `cron_tasks` in their AgentRun's database, and back to a condition. Firing them is the scheduler's work.

The rows of one database are made equal to the CronTasks of its AgentRun as a whole, so a deletion that nobody saw is found as well.
An in-memory note of what was written keeps an unchanged database from being opened.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from agentrun import failpoints
from agentrun.domain.errors import AgentrunError, ManifestError, StoreUnavailable
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun.manifests import CronTask, cron_task_of
from agentrun.store import cron_tasks, migrations
from agentrun.store.pool import connect
from agentrun_operator.cache import ObjectCache
from agentrun_operator.conditions import Condition, Status, merge
from agentrun_operator.kube import Kube, NotFound
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, Key, Ref
from agentrun_operator.schedules import schedule_problem, zone_problem
from agentrun_operator.targets import Target

MANAGER = "agentrun-status"
CONNECTIONS = 4
LOOK_SECONDS = 5.0
REPEAT_SECONDS = 600.0
"""The rows of an AgentRun that has CronTasks are compared so often, whatever was seen: somebody may have changed the table."""
WAIT_SECONDS = 10.0
_DATABASE_SECONDS = 20.0

_log = structlog.get_logger(__name__)

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Written:
    """What is known to be in a database."""

    database_url: str
    generations: frozenset[tuple[str, int]]
    at: float


class CronTasks:
    """The CronTasks of all AgentRuns. `target_of` gives an AgentRun's database, once it is ready."""

    def __init__(
        self,
        kube: Kube,
        cache: ObjectCache,
        *,
        target_of: Callable[[Key], Target | None],
        stored: Callable[[Target], int | None] = lambda _target: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`stored` says how many schedules a database was seen to have, None if it was not looked at."""
        self._kube = kube
        self._cache = cache
        self._target_of = target_of
        self._stored = stored
        self._clock = clock
        self._now = now
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._written: dict[Key, _Written] = {}
        self._agent_of: dict[Key, Key] = {}
        self._first_seen: dict[str, tuple[int, datetime]] = {}

    def start(self, supervisor: Supervisor) -> None:
        """Starts the loop that finds what changed while nobody watched; the supervisor stops it."""
        supervisor.run("crontasks", self._watch, stale_after=120.0)

    async def reconcile(self, key: Key) -> float | None:
        """Brings one CronTask into its database and says so in its status. Seconds until the next look, None: when it changes.

        Raises StoreUnavailable, KubeError.
        """
        task = self._cache.get(Ref(CRONTASKS, key.namespace, key.name))
        if task is None:
            agent = self._agent_of.pop(key, None)
            if agent is not None and (target := self._ready(agent)) is not None:
                await self.write(target)
            return None
        agent = self._agent_of[key] = _agent_of(task)
        condition = self._judge(task, agent)
        again = None
        if condition is None:
            condition, again = await self._accept(agent)
        elif condition.reason is Reason.AGENT_RUN_MISSING:
            again = WAIT_SECONDS
        await self._say(key, task, condition)
        return again

    async def write(self, target: Target) -> None:
        """Makes the rows of one AgentRun equal to its CronTasks, unless they are known to be. Raises StoreUnavailable."""
        async with self._locks[target.key]:
            if self._is_written(target, self._tasks_of(target.key)):
                return
            try:
                async with self._places, asyncio.timeout(_DATABASE_SECONDS):
                    tasks = await self._replace(target)
            except TimeoutError:
                raise StoreUnavailable(f"Postgres did not answer within {_DATABASE_SECONDS:g} s") from None
            except asyncpg.PostgresError as error:
                raise StoreUnavailable(f"Postgres refuses: {error}") from error
            await failpoints.hit("operator.crontask.stored")
            self._note(target, tasks)

    async def _replace(self, target: Target) -> list[Body]:
        conn = await connect(target.database_url, name="agentrun-operator")
        try:
            owner = (await migrations.check(conn)).owner
            if owner not in (None, str(target.key)):
                raise StoreUnavailable(f"the database belongs to the AgentRun {owner} now")
            tasks = self._tasks_of(target.key)  # as they are now: the connection took its time
            good = [(task, manifest) for task in tasks if (manifest := _valid(task)) is not None]
            schedules = [self._schedule(task, manifest) for task, manifest in good]
            await cron_tasks.replace(conn, schedules, keep=[UUID(_uid(task)) for task in tasks])
        finally:
            await conn.close()
        return tasks

    def _note(self, target: Target, tasks: list[Body]) -> None:
        self._written[target.key] = _Written(target.database_url, _generations(tasks), self._clock())

    def _judge(self, task: Body, agent: Key) -> Condition | None:
        """What keeps a CronTask from being stored, if anything."""
        try:
            manifest = cron_task_of(task)
        except ManifestError as error:
            return _refused(Reason.INVALID_SPEC, str(error))
        if problem := schedule_problem(manifest.spec.schedule):
            return _refused(Reason.SCHEDULE_INVALID, problem)
        if problem := zone_problem(manifest.spec.time_zone):
            return _refused(Reason.TIME_ZONE_UNKNOWN, problem)
        if self._cache.get(Ref(AGENTRUNS, agent.namespace, agent.name)) is None:
            return _refused(
                Reason.AGENT_RUN_MISSING,
                f"the AgentRun {agent.name} is not in this namespace; create it, or delete this CronTask",
            )
        return None

    async def _accept(self, agent: Key) -> tuple[Condition, float | None]:
        target = self._ready(agent)
        if target is None:
            message = f"the database of the AgentRun {agent.name} is not ready; see its conditions"
            return Condition(ConditionType.ACCEPTED, Status.UNKNOWN, Reason.PENDING, message), WAIT_SECONDS
        try:
            await self.write(target)
        except StoreUnavailable as error:
            _log.warning("schedules could not be stored", agentrun=str(agent), error=str(error))
            message = f"the database of the AgentRun {agent.name} does not answer"
            return Condition(ConditionType.ACCEPTED, Status.UNKNOWN, Reason.DATABASE_UNREACHABLE, message), WAIT_SECONDS
        stored = "the schedule is stored; this version does not fire it yet"
        return Condition(ConditionType.ACCEPTED, Status.TRUE, Reason.ACCEPTED, stored), None

    def _ready(self, agent: Key) -> Target | None:
        target = self._target_of(agent)
        return target if target is not None and target.schema_ready else None

    def _tasks_of(self, agent: Key) -> list[Body]:
        return [
            body
            for ref, body in self._cache.of(CRONTASKS).items()
            if ref.namespace == agent.namespace and _agent_of(body) == agent and "deletionTimestamp" not in body["metadata"]
        ]

    def _is_written(self, target: Target, tasks: list[Body]) -> bool:
        known = self._written.get(target.key)
        return known is not None and known.database_url == target.database_url and known.generations == _generations(tasks)

    def _schedule(self, task: Body, manifest: CronTask) -> cron_tasks.Schedule:
        generation = int(task["metadata"].get("generation", 1))
        document = manifest.as_document()
        spec = json.dumps({"name": manifest.metadata.name, **document["spec"]}, sort_keys=True)
        return cron_tasks.Schedule(UUID(_uid(task)), generation, spec, self._slots_from(task, generation))

    def _slots_from(self, task: Body, generation: int) -> datetime:
        """When this generation was first seen: by the API server, for the first one; else by this process."""
        seen = self._first_seen.get(_uid(task))
        return seen[1] if seen is not None and seen[0] == generation else self._see(task)

    def _see(self, task: Body) -> datetime:
        generation, at = int(task["metadata"].get("generation", 1)), self._now()
        if generation == 1 and (created := task["metadata"].get("creationTimestamp")):
            at = datetime.fromisoformat(created)
        seen = self._first_seen.get(_uid(task))
        if seen is None or seen[0] != generation:
            self._first_seen[_uid(task)] = (generation, at)
            return at
        return seen[1]

    async def _say(self, key: Key, task: Body, condition: Condition) -> None:
        """Writes the status, if it says something else."""
        generation, status = int(task["metadata"].get("generation", 1)), task.get("status") or {}
        conditions = [*merge(status.get("conditions") or (), [condition], generation=generation, now=self._now())]
        wanted = {"observedGeneration": generation, "conditions": conditions}
        if all(status.get(name) == value for name, value in wanted.items()):
            return
        ref = Ref(CRONTASKS, key.namespace, key.name)
        try:
            answer = await self._kube.apply(
                ref, {"metadata": {"uid": _uid(task)}, "status": wanted}, manager=MANAGER, subresource="status"
            )
        except NotFound:
            return  # deleted in this moment
        self._cache.put(CRONTASKS, answer)

    async def _watch(self, stamp: Stamp) -> None:
        while True:
            await self.look()
            stamp()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Notes new generations, and writes where what is in a database is not known or was last compared long ago."""
        busy: set[Key] = set()
        uids: set[str] = set()
        for task in self._cache.of(CRONTASKS).values():
            self._see(task)
            busy.add(_agent_of(task))
            uids.add(_uid(task))
        for uid in self._first_seen.keys() - uids:
            del self._first_seen[uid]
        agents = set(self._cache.agent_runs())
        for key in self._written.keys() - agents:
            del self._written[key]
            self._locks.pop(key, None)
        due = [target for key in agents if (target := self._ready(key)) is not None and self._is_due(target, key in busy)]
        for target in due:
            self._written.pop(target.key, None)
            if target.key not in busy and self._stored(target) == 0:
                self._note(target, [])
        await asyncio.gather(*(self._try(target) for target in due if target.key not in self._written))

    def _is_due(self, target: Target, busy: bool) -> bool:
        known = self._written.get(target.key)
        if known is None or known.database_url != target.database_url:
            return True
        return busy and self._clock() - known.at > REPEAT_SECONDS

    async def _try(self, target: Target) -> None:
        try:
            await self.write(target)
        except AgentrunError as error:  # looked at again soon
            _log.debug("schedules could not be compared", agentrun=str(target.key), error=str(error))


def _refused(reason: Reason, message: str) -> Condition:
    return Condition(ConditionType.ACCEPTED, Status.FALSE, reason, message)


def _valid(task: Body) -> CronTask | None:
    """The manifest, if it can be stored: of one that cannot, the last good generation stays."""
    try:
        manifest = cron_task_of(task)
    except ManifestError:
        return None
    return None if schedule_problem(manifest.spec.schedule) or zone_problem(manifest.spec.time_zone) else manifest


def _agent_of(task: Body) -> Key:
    ref = (task.get("spec") or {}).get("agentRunRef") or {}
    return Key(task["metadata"].get("namespace", ""), str(ref.get("name", "")))


def _uid(task: Body) -> str:
    return str(task["metadata"]["uid"])


def _generations(tasks: list[Body]) -> frozenset[tuple[str, int]]:
    return frozenset((_uid(task), int(task["metadata"].get("generation", 1))) for task in tasks)
