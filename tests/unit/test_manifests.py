"""Manifests: what is accepted, with which defaults, and what a mistake is told."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from crd_schema import nested
from pydantic import BaseModel, ValidationError

from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRun, AgentRunSpec, AgentSpec, CronTask, WorkersSpec, load, load_all, load_one, parse
from agentrun.manifests.base import Spec
from agentrun.manifests.pods import PeerPort
from agentrun.manifests.quantities import amount

HEAD = "apiVersion: agentrun.dev/v1alpha1\nkind: AgentRun\nmetadata: {name: support}\n"
AGENT = "agent: {model: 'demo:chat'}"
TASK = """apiVersion: agentrun.dev/v1alpha1
kind: CronTask
metadata: {name: daily}
spec: {agentRunRef: {name: support}, schedule: "0 9 * * *", input: report}
"""


def spec(text: str) -> str:
    return HEAD + "spec: {" + text + "}"


def message(text: str) -> str:
    with pytest.raises(ManifestError) as refused:
        parse(text, source="run.yaml")
    found = str(refused.value)
    assert "\n" not in found
    return found


def parts(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if below := nested(field.annotation):
            yield from parts(below)


def test_the_shortest_manifest_has_the_documented_defaults() -> None:
    (run,) = parse(spec(AGENT), source="run.yaml")

    assert (run.metadata.name, run.metadata.namespace, run.spec.agent.model) == ("support", "dev", "demo:chat")
    assert (run.spec.workers.lease_seconds, run.spec.workers.retries) == (30, 3)
    assert run.spec.reaper.max_lost_attempts == 3
    assert run.spec.submission.dedupe_seconds == 10
    assert (run.spec.streaming.flush_events, run.spec.streaming.flush_milliseconds) == (50, 200)


def test_what_is_written_out_reads_back_equal() -> None:
    (run,) = parse(spec(AGENT + ", workers: {concurrency: 3}"), source="run.yaml")

    assert AgentRun.model_validate(run.as_document(), by_alias=True, by_name=False) == run


def test_a_file_may_hold_several_agent_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text(spec(AGENT) + "\n---\n" + spec(AGENT).replace("support", "sales") + "\n---\n")

    assert [run.metadata.name for run in load(file)] == ["support", "sales"]
    with pytest.raises(ManifestError, match="holds 2 AgentRuns"):
        load_one(file)


def test_cron_tasks_beside_an_agent_run_are_checked_and_left_to_who_asks_for_them(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(TASK + "---\n" + spec(AGENT) + "\n---\n" + TASK.replace("daily", "weekly"))

    assert load_one(file).metadata.name == "support"
    assert [task.metadata.name for task in load_all(file).cron_tasks] == ["daily", "weekly"]


def test_an_input_that_cannot_be_stored_is_refused() -> None:
    text = TASK.replace("input: report", 'input: "a\\0b"')

    assert "spec.input: holds a character that cannot be stored" in message(text)


def test_json_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        '{"apiVersion": "agentrun.dev/v1alpha1", "kind": "AgentRun", "metadata": {"name": "a"},'
        ' "spec": {"agent": {"entrypoint": "shop.agents:support"}}}'
    )

    assert load_one(file).spec.agent.entrypoint == "shop.agents:support"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: the file is empty"),
        ("# nothing\n---\n", "run.yaml: the file is empty"),
        ("a: [", "run.yaml, line 1, column 5: expected the node content"),
        ("a: \x00", "run.yaml: not YAML"),
        ("- 1", "run.yaml: holds a list; write an AgentRun"),
        ("kind: Deployment", "run.yaml: kind: 'Deployment' is not known; write kind: AgentRun"),
        ("kind: CronTask", "run.yaml: apiVersion: nothing is not known; write apiVersion: agentrun.dev/v1alpha1"),
        (TASK, "run.yaml: holds CronTasks only; name the file with the AgentRun too"),
        ("kind: AgentRun\napiVersion: v1", "run.yaml: apiVersion: 'v1' is not known; write apiVersion: agentrun.dev/v1alpha1"),
        (HEAD, "run.yaml: spec: is missing; add it"),
        (spec(""), "run.yaml: spec.agent: is missing"),
        (spec("agent: {}"), "run.yaml: spec.agent.model: neither model nor entrypoint is given; set one of them"),
        (spec("agent: {model: 'demo:chat', entrypoint: 'a:b'}"), "run.yaml: spec.agent.entrypoint: model and entrypoint"),
        (spec("agent: {model: gpt}"), "run.yaml: spec.agent.model: 'gpt' is not valid; expected: the model as provider:name"),
        (spec("agent: {entrypoint: 'a b:c'}"), "run.yaml: spec.agent.entrypoint: 'a b:c' is not valid"),
        (spec("agent: {entrypoint: 'a:b', tools: ['a:c']}"), "run.yaml: spec.agent.tools: an entrypoint brings its own"),
        (spec("agent: {model: 'demo:chat', tools: [x]}"), "run.yaml: spec.agent.tools[0]: 'x' is not valid"),
        (spec(AGENT + ", worker: {}"), "run.yaml: spec.worker: unknown field; did you mean workers?"),
        (spec(AGENT + ", workers: {min_replicas: 1}"), "spec.workers.min_replicas: unknown field; did you mean minReplicas?"),
        (spec(AGENT + ", workers: {colour: red}"), "spec.workers.colour: unknown field; remove it; known here: minReplicas,"),
        (spec(AGENT + ", redis: {url: x}"), "spec.redis.url: unknown field; remove it; known here: secretRef"),
        (spec(AGENT + ", workers: {minReplicas: '1'}"), "spec.workers.minReplicas: must be a whole number, not '1'"),
        (spec(AGENT + ", workers: {minReplicas: true}"), "spec.workers.minReplicas: must be a whole number, not true"),
        (spec(AGENT + ", workers: {minReplicas: 1.5}"), "spec.workers.minReplicas: must be a whole number, not 1.5"),
        (spec(AGENT + ", workers: "), "spec.workers: must be a mapping, not nothing"),
        (spec(AGENT + ", workers: {leaseSeconds: 1}"), "spec.workers.leaseSeconds: 1 is out of range; set it to at least 2"),
        (spec(AGENT + ", workers: {leaseSeconds: 601}"), "leaseSeconds: 601 is out of range; set it to at most 600"),
        (spec(AGENT + ", workers: {retries: 1, retries: 2}"), "run.yaml, line 4, column 59: the member 'retries' is there twice"),
        (
            spec(AGENT + ", followUps: {policy: Queue}"),
            "spec.followUps.policy: 'Queue' is not allowed; use 'Merge', 'Enqueue' or 'Reject'",
        ),
        (spec(AGENT + ", followUps: {windowSeconds: 0}"), "spec.followUps.windowSeconds"),
        (
            spec(AGENT + ", workers: {leaseSeconds: 60}"),
            "run.yaml: spec.reaper.idleSeconds: 30 is below workers.leaseSeconds (60); set it to 60 or more",
        ),
        (spec(AGENT + ", redis: {secretRef: {}}"), "spec.redis.secretRef.name: is missing; add it: name of the Secret"),
        (
            spec(AGENT + ", podTemplate: {env: [{name: A, valu: x}]}"),
            "run.yaml: spec.podTemplate.env[0].valu: unknown field; did you mean value?",
        ),
        (
            spec(AGENT + ", podTemplate: {env: [{name: A}, {name: A}]}"),
            "spec.podTemplate.env: A is there twice; items differ in name",
        ),
        (
            spec(AGENT + ", workers: {resources: {requests: {memory: 2Gi}, limits: {memory: 2000M}}}"),
            "spec.workers.resources.requests.memory: the request exceeds the limit; lower the request or raise the limit",
        ),
        (
            spec(AGENT + ", workers: {resources: {requests: {memory: 1GB}}}"),
            "spec.workers.resources.requests.memory: '1GB' is no quantity; write it as 2, 500m or 1Gi",
        ),
        (spec(AGENT).replace("support", "Support_1"), "run.yaml: metadata.name: 'Support_1' is not valid"),
        (
            spec(AGENT) + "\n---\n" + TASK.replace("0 9", "0 99"),
            "run.yaml (document 2): spec.schedule: '0 99 * * *' is not valid",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line_with_field_and_remedy(text: str, expected: str) -> None:
    assert expected in message(text)


def test_sc_06_minimum_above_maximum_is_refused() -> None:
    found = message(spec(AGENT + ", workers: {minReplicas: 5, maxReplicas: 4}"))

    assert "spec.workers.minReplicas: 5 is above workers.maxReplicas (4); lower it or raise workers.maxReplicas" in found


def test_a_misspelt_field_is_told_before_the_one_that_is_missing_for_it() -> None:
    found = message(HEAD + "spec: {agnet: {model: 'demo:chat'}}")

    assert "spec.agnet: unknown field; did you mean agent?" in found
    assert "(1 more after this one)" in found


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match=name if name != "." else "name a file that can be read"):
        load(tmp_path / name)


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"kind: \xff")

    with pytest.raises(ManifestError, match="not UTF-8 at byte 6"):
        load(file)


def test_code_may_use_python_names_and_gets_the_same_checks() -> None:
    made = AgentRunSpec(agent=AgentSpec(model="demo:chat"), workers=WorkersSpec(min_replicas=1))

    assert made.workers.min_replicas == 1
    with pytest.raises(ValidationError):
        AgentRunSpec(agent=AgentSpec(model="demo:chat"), workers=WorkersSpec(min_replicas=11))


@pytest.mark.parametrize("part", sorted({*parts(AgentRun), *parts(CronTask)}, key=lambda part: part.__name__))
def test_every_field_is_described_and_closed_and_bounded(part: type[BaseModel]) -> None:
    assert issubclass(part, Spec)
    assert part.model_config["extra"] == "forbid"
    assert all(field.description for field in part.model_fields.values())
    for name, schema in part.model_json_schema(by_alias=True).get("properties", {}).items():
        assert schema.get("description") or "$ref" in schema, name
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= schema.keys(), name
            assert "default" in schema or (part, name) == (PeerPort, "port"), name
        if schema.get("type") == "array":
            assert "maxItems" in schema, name


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        (2, 2),
        ("0.5", Fraction(1, 2)),
        ("500m", Fraction(1, 2)),
        ("1k", 1000),
        ("1.5Ki", 1536),
        ("2Ei", 2 * 2**60),
        ("3E", 3 * 10**18),
    ],
)
def test_a_quantity_is_an_exact_number(quantity: int | str, number: Fraction) -> None:
    assert amount(quantity) == number


def test_what_a_cluster_needs_is_found_missing_there() -> None:
    (run,) = parse(spec(AGENT + ", database: {secretRef: {name: pg}}"), source="run.yaml")

    with pytest.raises(ManifestError, match=r"^spec\.redis\.secretRef: is missing; name the Secret"):
        run.spec.store_secrets()


def test_migrations_use_the_database_s_secret_unless_they_have_their_own() -> None:
    text = spec(
        AGENT
        + ", database: {secretRef: {name: pg}OWN}, redis: {secretRef: {name: r}}, gateway: {auth: {keysSecretRef: {name: k}}}"
    )
    (run,) = parse(text.replace("OWN", ""), source="run.yaml")
    (own,) = parse(text.replace("OWN", ", migrationSecretRef: {name: pg, key: owner}"), source="run.yaml")

    found = run.spec.store_secrets()
    assert (found.migration, found.database.key, found.redis.key, found.api_keys.key) == (
        found.database,
        "url",
        "url",
        "api-keys",
    )
    assert own.spec.store_secrets().migration.key == "owner"
