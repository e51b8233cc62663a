"""From CronTasks to rows of `cron_tasks` in their AgentRun's database, and back to their status. Firing them is the scheduler's work.

The rows of one database are made equal to the CronTasks of its AgentRun as a whole, so a deletion that nobody saw is found as well.
An in-memory note of what was written keeps it from being written again. What has come of the slots is read every few seconds.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from agentrun import failpoints
from agentrun.domain.errors import AgentrunError, StoreUnavailable
from agentrun.maintenance.supervise import Stamp, Supervisor
from agentrun.manifests import CronTask
from agentrun.store import cron_tasks, migrations
from agentrun.store.cron_tasks import TaskState
from agentrun.store.pool import connect
from agentrun_operator.cache import ObjectCache, uid_of
from agentrun_operator.conditions import Condition, Status, merge
from agentrun_operator.hanging_up import close
from agentrun_operator.kube import Kube, NotFound
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.resources import AGENTRUNS, CRONTASKS, Key, Ref
from agentrun_operator.schedules import MEMBERS, agent_of, generation_of, left_out, members, read, refused, valid
from agentrun_operator.status_write import write_status
from agentrun_operator.targets import Target

CONNECTIONS = 4
RETRY_CONNECTIONS = 4
"""Databases that did not answer last time have places of their own, so that those that hang do not keep others waiting."""
LOOK_SECONDS = 5.0
REPEAT_SECONDS = 600.0
"""The rows of an AgentRun that has CronTasks are compared so often, whatever was seen: somebody may have changed the table."""
STATUS_SECONDS = 15.0
"""What has come of the slots is read so often."""
WAIT_SECONDS = 10.0
UNKNOWN_SECONDS = 1.0
"""Until the next look at a CronTask, where not all of them are known."""
_DATABASE_SECONDS = 20.0
_PLACE_SECONDS = 30.0

_log = structlog.get_logger(__name__)

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Written:
    """What is known to be in a database. No generations: it was written and has to be compared."""

    database_url: str
    generations: frozenset[tuple[str, int]] | None
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
        known: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`stored` says how many schedules a database was seen to have, None if it was not looked at. Until `known` says that all
        CronTasks were seen, no database is looked at: what is missing in the cache is not deleted then."""
        self._kube = kube
        self._cache = cache
        self._target_of = target_of
        self._stored = stored
        self._known = known
        self._clock = clock
        self._now = now
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._retry_places = asyncio.Semaphore(RETRY_CONNECTIONS)
        self._failed: set[Key] = set()
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._written: dict[Key, _Written] = {}
        self._agent_of: dict[Key, Key] = {}
        self._first_seen: dict[str, tuple[int, datetime]] = {}
        self._states: dict[str, TaskState] = {}
        self._read_at: dict[Key, float] = {}

    def start(self, supervisor: Supervisor) -> None:
        """Starts the loop that finds what changed while nobody watched; the supervisor stops it."""
        supervisor.run("crontasks", self._watch, stale_after=120.0)

    async def reconcile(self, key: Key) -> float | None:
        """Brings one CronTask into its database and says so in its status. Seconds until the next look, None: when it changes.

        Raises StoreUnavailable, KubeError.
        """
        if not self._known():
            return UNKNOWN_SECONDS
        task = self._cache.get(Ref(CRONTASKS, key.namespace, key.name))
        before = self._agent_of.get(key)
        if task is None:
            if before is not None and (target := self._ready(before)) is not None:
                await self.write(target)  # where it cannot be written now, `look` finds the difference later
            self._agent_of.pop(key, None)
            return None
        agent = agent_of(task)
        if before not in (None, agent) and (target := self._ready(before)) is not None:
            with self._looked_at_again_soon(before):
                await self.write(target)
        self._agent_of[key] = agent
        condition = self._judge(task, agent)
        again = None
        if condition is None:
            condition, again = await self._accept(agent, note=left_out(task))
        elif condition.reason is Reason.AGENT_RUN_MISSING:
            again = WAIT_SECONDS
        await self._say(key, task, condition)
        return again

    async def write(self, target: Target) -> None:
        """Makes the rows of one AgentRun equal to its CronTasks, unless they are known to be. Raises StoreUnavailable."""
        async with self._locks[target.key]:
            if not self._is_written(target, self._tasks_of(target.key)):
                await self._visit(target)

    async def _visit(self, target: Target) -> None:
        """Writes what is to be written, and reads what has come of the slots. Raises StoreUnavailable."""
        key = target.key
        self._read_at[key] = self._clock()
        places = self._retry_places if key in self._failed else self._places
        self._failed.add(key)
        try:
            async with asyncio.timeout(_PLACE_SECONDS + _DATABASE_SECONDS), places, asyncio.timeout(_DATABASE_SECONDS):
                tasks = await self._exchange(target)
        except TimeoutError:
            raise StoreUnavailable(f"Postgres did not answer within {_DATABASE_SECONDS:g} s") from None
        except asyncpg.PostgresError as error:
            raise StoreUnavailable(f"Postgres refuses: {error}") from error
        self._failed.discard(key)
        await failpoints.hit("operator.crontask.stored")
        if not self._is_written(target, tasks):
            self._note(target, tasks)

    async def _exchange(self, target: Target) -> list[Body]:
        conn = await connect(target.database_url, name="agentrun-operator")
        try:
            owner = (await migrations.check(conn)).owner
            if owner not in (None, str(target.key)):
                raise StoreUnavailable(f"the database belongs to the AgentRun {owner} now")
            tasks = self._tasks_of(target.key)  # as they are now: the connection took its time
            if not self._is_written(target, tasks):
                good = [(task, manifest) for task in tasks if (manifest := valid(task)) is not None]
                rows = [self._schedule(task, manifest) for task, manifest in good]
                self._written[target.key] = _Written(target.database_url, None, self._clock())  # a lost reply is no refusal
                await cron_tasks.replace(conn, rows, keep=[UUID(uid_of(task)) for task in tasks])
            self._states.update({str(state.uid): state for state in await cron_tasks.states(conn)})
        finally:
            await close(conn)
        return tasks

    def _note(self, target: Target, tasks: Sequence[Body]) -> None:
        self._written[target.key] = _Written(target.database_url, _generations(tasks), self._clock())

    def _judge(self, task: Body, agent: Key) -> Condition | None:
        """What keeps a CronTask from being stored, if anything."""
        found = read(task)
        if isinstance(found, Condition):
            return found
        if self._cache.get(Ref(AGENTRUNS, agent.namespace, agent.name)) is None:
            return refused(
                Reason.AGENT_RUN_MISSING,
                f"the AgentRun {agent.name} is not in this namespace; create it, or delete this CronTask",
            )
        return None

    async def _accept(self, agent: Key, *, note: str) -> tuple[Condition, float | None]:
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
        stored = f"the schedule is stored, and the AgentRun's scheduler fires it{note}"
        return Condition(ConditionType.ACCEPTED, Status.TRUE, Reason.ACCEPTED, stored), None

    def _ready(self, agent: Key) -> Target | None:
        target = self._target_of(agent)
        return target if target is not None and target.schema_ready else None

    def _tasks_of(self, agent: Key) -> list[Body]:
        return [
            body
            for ref, body in self._cache.of(CRONTASKS).items()
            if ref.namespace == agent.namespace and agent_of(body) == agent and _stays(body)
        ]

    def _is_written(self, target: Target, tasks: Sequence[Body]) -> bool:
        known = self._written.get(target.key)
        return known is not None and known.database_url == target.database_url and known.generations == _generations(tasks)

    def _schedule(self, task: Body, manifest: CronTask) -> cron_tasks.Schedule:
        generation = generation_of(task)
        return cron_tasks.Schedule(UUID(uid_of(task)), generation, manifest.as_row(), self._slots_from(task, generation))

    def _slots_from(self, task: Body, generation: int) -> datetime:
        """When this generation was first seen: by the API server, for the first one; else by this process. But no slot is decided again
        that the status has as decided: it may have been in another database.
        """
        seen = self._first_seen.get(uid_of(task))
        since = seen[1] if seen is not None and seen[0] == generation else self._see(task)
        decided = (task.get("status") or {}).get("lastScheduleTime")
        return max(since, datetime.fromisoformat(decided)) if decided else since

    def _see(self, task: Body) -> datetime:
        generation, at = generation_of(task), self._now()
        if generation == 1 and (created := task["metadata"].get("creationTimestamp")):
            at = datetime.fromisoformat(created)
        seen = self._first_seen.get(uid_of(task))
        if seen is None or seen[0] != generation:
            self._first_seen[uid_of(task)] = (generation, at)
            return at
        return seen[1]

    async def _say(self, key: Key, task: Body, condition: Condition | None) -> None:
        """Writes the status, if it says something else. Without a condition those that are there stay."""
        generation, status = generation_of(task), task.get("status") or {}
        conditions = status.get("conditions") or []
        if condition is not None:
            conditions = [*merge(conditions, [condition], generation=generation, now=self._now())]
        elif not conditions or status.get("observedGeneration") != generation:
            return  # it is reconciled first
        slots = members(self._states.get(uid_of(task)), valid(task), old=status, now=self._now())
        wanted = {"observedGeneration": generation, "conditions": conditions, **slots}
        if wanted == {name: status[name] for name in ("observedGeneration", "conditions", *MEMBERS) if name in status}:
            return
        ref = Ref(CRONTASKS, key.namespace, key.name)
        try:
            answer = await write_status(self._kube, ref, uid_of(task), wanted)
        except NotFound:
            return  # deleted in this moment
        self._cache.put(CRONTASKS, answer)

    async def _watch(self, stamp: Stamp) -> None:
        while True:
            await self.look(stamp)
            stamp()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self, stamp: Stamp = lambda: None) -> None:
        """Notes new generations, writes where what is in a database is not known or was last compared long ago, and reads what has
        come of the slots.
        """
        if not self._known():
            return
        tasks_of: defaultdict[Key, list[Body]] = defaultdict(list)
        uids: set[str] = set()
        for task in self._cache.of(CRONTASKS).values():
            self._see(task)
            uids.add(uid_of(task))
            if _stays(task):
                tasks_of[agent_of(task)].append(task)
        for known in (self._first_seen, self._states):
            for uid in known.keys() - uids:
                del known[uid]
        agents = set(self._cache.agent_runs())
        for key in (self._written.keys() | self._failed | self._read_at.keys()) - agents:
            self._written.pop(key, None)
            self._failed.discard(key)
            self._locks.pop(key, None)
            self._read_at.pop(key, None)
        ready = [target for key in agents if (target := self._ready(key)) is not None]
        due = [target for target in ready if self._is_due(target, tasks_of.get(target.key, ()))]
        failed = sorted((target for target in due if target.key in self._failed), key=lambda target: self._read_at[target.key])
        others = (target for target in due if target.key not in self._failed)
        await asyncio.gather(*(self._try(target, stamp) for target in (*others, *failed[:RETRY_CONNECTIONS])))

    def _is_due(self, target: Target, tasks: Sequence[Body]) -> bool:
        """Whether the database has to be looked into. Once written it has to be equal, whether there are tasks or not."""
        known, now = self._written.get(target.key), self._clock()
        if known is not None and known.database_url == target.database_url:
            if tasks and now - known.at > REPEAT_SECONDS:
                self._written[target.key] = replace(known, generations=None)
        elif not tasks and self._stored(target) == 0:
            self._note(target, [])
        if not self._is_written(target, tasks):
            return True
        return bool(tasks) and now - self._read_at.get(target.key, -STATUS_SECONDS) >= STATUS_SECONDS

    async def _try(self, target: Target, stamp: Stamp) -> None:
        with self._looked_at_again_soon(target.key):
            async with self._locks[target.key]:
                await self._visit(target)
        for task in self._tasks_of(target.key):
            with self._looked_at_again_soon(target.key):
                await self._say(Key(target.key.namespace, str(task["metadata"]["name"])), task, None)
        stamp()

    @contextlib.contextmanager
    def _looked_at_again_soon(self, agent: Key) -> Iterator[None]:
        try:
            yield
        except AgentrunError as error:
            _log.debug("schedules could not be compared", agentrun=str(agent), error=str(error))


def _stays(task: Body) -> bool:
    return "deletionTimestamp" not in task["metadata"]


def _generations(tasks: Sequence[Body]) -> frozenset[tuple[str, int]]:
    return frozenset((uid_of(task), generation_of(task)) for task in tasks)
