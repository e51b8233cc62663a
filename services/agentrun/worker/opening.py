"""What agents are given at the start, read from the store for a whole claim group: inputs, history, the last checkpoint."""

from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

import msgspec

from agentrun.agents.base import Turn, UserInput
from agentrun.store import budgets, runs
from agentrun.store.pool import Pool
from agentrun.store.runs import PastRun
from agentrun.store.transitions import Claimed
from agentrun.worker.context import Opening


async def read(pool: Pool, group: Sequence[Claimed]) -> dict[UUID, Opening]:
    """The opening of each claimed run. Raises StoreUnavailable."""
    past: dict[UUID, list[PastRun]] = {}
    for claimed in group:
        if claimed.session_position > 0:  # positions count from 0: the first run of a session has no history
            past[claimed.run_id] = await runs.history(pool, claimed.session_id, before_position=claimed.session_position)
    holders = {claimed.run_id for claimed in group} | {run.run_id for earlier in past.values() for run in earlier}
    purses = await budgets.purses(pool, [claimed.run_id for claimed in group])
    inputs: defaultdict[UUID, list[UserInput]] = defaultdict(list)
    for held in await runs.held_inputs(pool, list(holders)):
        inputs[held.run_id].append(UserInput(held.id, msgspec.json.decode(held.content)))
    return {
        claimed.run_id: Opening(
            inputs=inputs[claimed.run_id],
            history=[_turn(run, inputs[run.run_id]) for run in past.get(claimed.run_id, ())],
            state=None if claimed.checkpoint is None else msgspec.json.decode(claimed.checkpoint),
            purse=purses[claimed.run_id],
        )
        for claimed in group
    }


def _turn(run: PastRun, inputs: Sequence[UserInput]) -> Turn:
    result = msgspec.json.decode(run.result) if run.result is not None else {}
    return Turn(inputs, result.get("messages", ()), result.get("output"))
