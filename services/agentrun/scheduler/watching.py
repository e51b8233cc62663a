"""Counts for each CronTask the slots that it has had since its newest success ended, for the alert AgentrunCronTaskWithoutSuccess."""

from itertools import islice

import msgspec

from agentrun.domain.cron import CronError
from agentrun.schedules import tasks
from agentrun.store import cron_tasks
from agentrun.store.cron_tasks import MOST_COUNTED, Lapse
from agentrun.store.pool import Pool
from agentrun.telemetry import SLOTS_WITHOUT_SUCCESS


class Watching:
    """The CronTasks of one AgentRun."""

    def __init__(self, pool: Pool, *, namespace: str, suspended: bool) -> None:
        """`suspended`: the AgentRun's own spec.suspend. What is suspended is not counted."""
        self._pool = pool
        self._namespace = namespace
        self._suspended = suspended

    async def tick(self) -> None:
        """Looks at all CronTasks. Raises StoreUnavailable."""
        found = [] if self._suspended else await cron_tasks.lapses(self._pool)
        counted = {one.name: min(one.decided + self._undecided(one), MOST_COUNTED) for one in found}
        SLOTS_WITHOUT_SUCCESS.clear()  # nothing stays of CronTasks that are gone
        for name, count in counted.items():
            SLOTS_WITHOUT_SUCCESS.labels(name).set(count)

    def _undecided(self, one: Lapse) -> int:
        """Slots that are due and that no scheduler has decided: also a CronTask that nobody can decide has no success. Of one that
        cannot be read nobody knows how many, so it has the most.
        """
        try:
            schedule = tasks.read(one.spec).when(namespace=self._namespace)
        except (msgspec.ValidationError, msgspec.DecodeError, CronError):
            return MOST_COUNTED
        return len(list(islice(schedule.before(one.now, since=one.counted_through), MOST_COUNTED)))
