"""What the operator makes of watch events, before anything is reconciled."""

from typing import Any

import pytest

from agentrun_operator import leading
from agentrun_operator.main import _Operator
from agentrun_operator.resources import AGENTRUNS, CRONTASKS
from agentrun_operator.settings import OperatorSettings


def body(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": name, "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
    return {"apiVersion": "agentrun.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("event", ["ADDED", "DELETED"])
def test_crontasks_are_looked_at_also_where_a_reconcile_knew_first_that_their_agentrun_came_or_went(event: str) -> None:
    operator = _Operator(OperatorSettings(), None, leading.build)  # type: ignore[arg-type]  # nothing is asked of the API server
    shared, agent = operator._shared, body("AgentRun", "support")
    shared.cron_tasks.open()
    shared.cache.put(CRONTASKS, body("CronTask", "nightly", agentRunRef={"name": "support"}))
    if event == "ADDED":
        shared.cache.put(AGENTRUNS, agent)

    operator._see(AGENTRUNS, event, agent)

    assert len(shared.cron_tasks) == 1
