"""What an operator makes of objects whose CRD is newer than it."""

from typing import Any

import pytest
from operator_world import spec

from agentrun.domain.errors import ManifestError
from agentrun_operator.lenient import known_agent_run, known_cron_task, note_of
from agentrun_operator.render.config import pod_manifest


def agent_run(**changes: Any) -> dict[str, Any]:
    metadata = {"name": "support", "namespace": "team", "uid": "1"}
    return {"apiVersion": "agentrun.dev/v1alpha1", "kind": "AgentRun", "metadata": metadata, "spec": spec(**changes)}


def test_what_is_known_whole_has_no_note() -> None:
    found = known_agent_run(agent_run(workers={"retries": 1}))
    assert (found.unknown, note_of(found.unknown)) == ((), "")


def test_unknown_members_are_left_out_at_every_depth_and_named() -> None:
    raw = agent_run(
        hibernation={"days": 3},
        workers={"retries": 7, "warmSeconds": 5},
        podTemplate={"tolerations": [{"operator": "Exists"}, {"key": "a", "operator": "Exists", "why": "x"}]},
    )
    found = known_agent_run(raw)
    assert found.unknown == ("spec.hibernation", "spec.workers.warmSeconds", "spec.podTemplate.tolerations[1].why")
    assert (
        found.manifest
        == known_agent_run(
            agent_run(
                workers={"retries": 7},
                podTemplate={"tolerations": [{"operator": "Exists"}, {"key": "a", "operator": "Exists"}]},
            )
        ).manifest
    )
    assert pod_manifest(found.manifest)["spec"]["workers"] == {"retries": 7}
    assert "spec.hibernation" in note_of(found.unknown) and "upgrade the operator" in note_of(found.unknown)


def test_free_content_is_not_looked_into() -> None:
    found = known_agent_run(agent_run(agent={"model": "demo:chat", "modelSettings": {"anything": {"at": "all"}}}, more=1))
    assert found.unknown == ("spec.more",)
    assert found.manifest.spec.agent.model_settings == {"anything": {"at": "all"}}


def test_a_mistake_besides_is_the_one_that_is_told() -> None:
    with pytest.raises(ManifestError, match=r"spec\.workers\.retries: -1 is out of range"):
        known_agent_run(agent_run(retention=1, workers={"retries": -1}))


def test_half_a_rule_about_traffic_is_no_rule() -> None:
    with pytest.raises(ManifestError, match=r"toHosts: unknown field"):
        known_agent_run(agent_run(networkPolicy={"egress": [{"toHosts": ["api.example"], "ports": [{"port": 443}]}]}))


def test_a_cron_task_too() -> None:
    raw = {
        "apiVersion": "agentrun.dev/v1alpha1",
        "kind": "CronTask",
        "metadata": {"name": "nightly", "namespace": "team"},
        "spec": {"agentRunRef": {"name": "support"}, "schedule": "0 3 * * *", "input": "hello", "window": "1h"},
    }
    assert known_cron_task(raw).unknown == ("spec.window",)


def test_many_names_are_cut() -> None:
    assert "and more" in note_of(tuple(f"spec.x{number}" for number in range(9)))
