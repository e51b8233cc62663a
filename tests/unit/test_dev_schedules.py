"""`agentrun dev -f … -f …`: which AgentRun is started, and which CronTasks are its own."""

from pathlib import Path

import pytest

from agentrun.dev.schedules import describe, load
from agentrun.domain.errors import ManifestError

RUN = """apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: support}
spec: {agent: {model: "demo:chat"}}
"""
TASK = """apiVersion: agentrun.dev/v1alpha1
kind: CronTask
metadata: {name: daily}
spec: {agentRunRef: {name: support}, schedule: "0 9 * * *", timeZone: Europe/Berlin, input: report}
"""


def files(folder: Path, *texts: str) -> list[Path]:
    made = []
    for number, text in enumerate(texts):
        made.append(folder / f"{number}.yaml")
        made[-1].write_text(text)
    return made


@pytest.mark.parametrize(
    "texts", [(RUN, TASK), (TASK, RUN), (RUN + "---\n" + TASK,)], ids=["two files", "other order", "one file"]
)
def test_an_agent_run_and_its_cron_tasks(tmp_path: Path, texts: tuple[str, ...]) -> None:
    given = load(files(tmp_path, *texts))

    assert given.agent_run.metadata.name == "support"
    assert "kind: AgentRun" in given.file.read_text()
    assert [task.metadata.name for task in given.cron_tasks] == ["daily"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((TASK,), "0.yaml: holds no AgentRun; name its file too"),
        ((RUN, RUN.replace("support", "sales")), "1.yaml: holds a second AgentRun, sales; give one"),
        ((RUN, TASK, TASK), "2.yaml: metadata.name: there are two CronTasks daily"),
        ((RUN, TASK.replace("name: support", "name: sales")), "1.yaml: spec.agentRunRef.name: dev/sales is not the AgentRun"),
        ((RUN, TASK.replace("daily", "daily, namespace: shop")), "spec.agentRunRef.name: shop/support is not the AgentRun"),
        ((RUN, TASK.replace("0 9 * * *", "0 0 30 2 *")), "1.yaml: spec.schedule: the day does not exist"),
        (
            (RUN, TASK.replace("Europe/Berlin", "Europe/Berlyn")),
            "1.yaml: spec.timeZone: the time zone Europe/Berlyn is not known",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, texts: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ManifestError) as refused:
        load(files(tmp_path, *texts))

    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_next_is_said_in_the_schedule_s_own_zone(tmp_path: Path) -> None:
    (task,) = load(files(tmp_path, RUN, TASK)).cron_tasks
    assert " 09:00 Europe/Berlin" in describe(task)
    (suspended,) = load(files(tmp_path, RUN, TASK.replace("input: report", "input: report, suspend: true"))).cron_tasks
    assert describe(suspended) == "daily: suspended"
