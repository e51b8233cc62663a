"""The CronTasks that `agentrun dev` was given: which AgentRun they are for, and their rows, which in a cluster the operator writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5
from zoneinfo import ZoneInfo

from agentrun.domain import cron
from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRun, CronTask, load_all
from agentrun.store import cron_tasks
from agentrun.store.cron_tasks import Schedule, Stored
from agentrun.store.pool import connect


@dataclass(frozen=True, slots=True)
class Given:
    """One AgentRun with the file that it is in, and its CronTasks."""

    agent_run: AgentRun
    file: Path
    cron_tasks: tuple[CronTask, ...]


def load(files: Sequence[Path]) -> Given:
    """What the files hold together. Raises ManifestError, also for a CronTask of another AgentRun."""
    found = [(file, load_all(file)) for file in files]
    runs = [(file, run) for file, manifests in found for run in manifests.agent_runs]
    if not runs:
        raise ManifestError(f"{files[0]}: holds no AgentRun; name its file too, with another -f")
    if len(runs) > 1:
        raise ManifestError(f"{runs[1][0]}: holds a second AgentRun, {runs[1][1].metadata.name}; give one")
    file, run = runs[0]
    tasks: dict[str, CronTask] = {}
    for source, manifests in found:
        for task in manifests.cron_tasks:
            _check(task, run, source)
            if task.metadata.name in tasks:
                raise ManifestError(f"{source}: metadata.name: there are two CronTasks {task.metadata.name}; rename one of them")
            tasks[task.metadata.name] = task
    return Given(run, file, tuple(tasks.values()))


def _check(task: CronTask, run: AgentRun, source: Path) -> None:
    spec, metadata = task.spec, task.metadata
    wanted = f"{metadata.namespace}/{spec.agent_run_ref.name}"
    there = f"{run.metadata.namespace}/{run.metadata.name}"
    if wanted != there:
        raise ManifestError(f"{source}: spec.agentRunRef.name: {wanted} is not the AgentRun that is started, {there}; correct it")
    if problem := cron.schedule_problem(spec.schedule):
        raise ManifestError(f"{source}: spec.schedule: {problem}")
    if problem := cron.zone_problem(spec.time_zone):
        raise ManifestError(f"{source}: spec.timeZone: {problem}")


async def write(database_url: str, tasks: Sequence[CronTask]) -> None:
    """Makes these the schedules of the database. Raises StoreUnavailable."""
    conn = await connect(database_url, name="agentrun-dev")
    try:
        known = {row.schedule.uid: row for row in await cron_tasks.all_of(conn)}
        now = datetime.now(UTC)
        await cron_tasks.replace(conn, [_row(task, known.get(_uid(task)), now) for task in tasks])
    finally:
        await conn.close()


def describe(task: CronTask) -> str:
    """One line: when it fires next, in its own zone."""
    metadata, spec = task.metadata, task.spec
    if spec.suspend:
        return f"{metadata.name}: suspended"
    schedule = cron.parse(spec.schedule, spec.time_zone, seed=cron.seed(metadata.namespace, metadata.name))
    following = schedule.next(datetime.now(UTC))
    when = f"{following.astimezone(ZoneInfo(spec.time_zone)):%Y-%m-%d %H:%M}" if following else "never"
    return f"{metadata.name}: next {when} {spec.time_zone}"


def _row(task: CronTask, known: Stored | None, now: datetime) -> Schedule:
    """The generation goes up when the spec is another one, as the API server does it, and when the task is there again."""
    row = task.as_row()
    if known is None:
        return Schedule(_uid(task), 1, row, now)
    same = known.deleted_at is None and json.loads(known.schedule.spec) == json.loads(row)
    return Schedule(_uid(task), known.schedule.generation + (not same), row, now)


def _uid(task: CronTask) -> UUID:
    return uuid5(NAMESPACE_URL, f"agentrun:dev/{task.metadata.namespace}/{task.metadata.name}")
