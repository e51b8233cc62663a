"""The short form of `make chaos`: real processes under faults, judged by what was left."""

import os
from pathlib import Path

from chaos_run import chaos, shown_failure

RUNS = 200
SEED = int(os.environ.get("CHAOS_SEED", "1"))


async def test_whatever_breaks_what_was_accepted_is_done_once_and_seen_whole(tmp_path: Path) -> None:
    outcome = await chaos(SEED, RUNS, tmp_path)
    print(outcome)
    assert outcome.verdict.good, f"{outcome}\n{shown_failure(outcome, tmp_path)}"
    assert outcome.toothless() == [], f"{outcome}\n{shown_failure(outcome, tmp_path)}"
