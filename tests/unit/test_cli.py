"""The command line: what it prints, how it fails, and what it does not load."""

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import eventually

from agentrun import __version__, cli, telemetry
from agentrun.domain.keys import Scope, parse_records, verify

CRDS = Path(__file__).parents[2] / "crds"
MANIFEST = """apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {name: NAME}
spec: {agent: {model: "demo:chat"}}
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AGENTRUN_") or name in ("DATABASE_URL", "REDIS_URL"):
            monkeypatch.delenv(name)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["agentrun", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("scheduler",), "DATABASE_URL is not set"),
        (("worker",), "DATABASE_URL is not set"),
        (("gateway",), "DATABASE_URL is not set"),
        (("migrate",), "DATABASE_URL is not set"),
        (("dev", "-f", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("keys", "create", "--user", " "), "--user: a key belongs to a user"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    command: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("agentrun: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("gateway",), ("worker",), ("scheduler",), ("migrate",), ("dev", "-f", "agentrun.yaml")])
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("DATABASE_URL", "foo", "DATABASE_URL: no URL of Postgres; write postgresql://user@host/database"),
        ("DATABASE_URL", "postgresql://h:abc/d", "DATABASE_URL: the port is no number from 1 to 65535; correct it"),
        ("REDIS_URL", "foo", "REDIS_URL: no URL of Redis; write redis://"),
        ("AGENTRUN_LOG_LEVEL", "loud", "AGENTRUN_LOG_LEVEL is 'loud': input should be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_malformed_setting_is_one_line_for_every_command(
    command: tuple[str, ...],
    variable: str,
    value: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agentrun.yaml").write_text(MANIFEST.replace("NAME", "a"))
    given = {"DATABASE_URL": "postgresql://h/d", "REDIS_URL": "redis://h", "AGENTRUN_MANIFEST": "agentrun.yaml"}
    for name, good in given.items():
        monkeypatch.setenv(name, good)
    monkeypatch.setenv(variable, value)

    assert call(monkeypatch, *command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"agentrun: {told}")
    assert not Path(".agentrun").exists()


def test_a_file_of_keys_that_is_no_text_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")

    assert call(monkeypatch, "keys", "create", "--user", "ann", "--file", str(file)) == 2
    assert capsys.readouterr() == ("", f"agentrun: {file}: not UTF-8 at byte 0, so no file of keys; name another\n")
    assert file.read_bytes() == b"\xff\xfe"


def test_a_key_is_shown_once_and_stored_as_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    shown = []
    for user in ("ann", "bob"):
        command = ("keys", "create", "--user", user, "--scope", "act-as", "--scope", "admin", "--file", str(file))
        assert call(monkeypatch, *command) == 0
        shown.append(capsys.readouterr().out.strip())
    records = parse_records(file.read_text())

    assert [verify(key, records).user for key in shown if verify(key, records)] == ["ann", "bob"]  # type: ignore[union-attr]
    assert all(record.scopes == set(Scope) for record in records.values())
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_key_without_a_file_comes_with_its_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "keys", "create", "--user", "ann") == 0
    out, err = capsys.readouterr()

    assert verify(out.strip(), parse_records(err.partition(": ")[2])) is not None


def test_a_process_takes_its_own_agent_run_out_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text("---\n".join(MANIFEST.replace("NAME", name) for name in ("sales", "support")))
    for name, value in (("DATABASE_URL", "postgresql://h/d"), ("REDIS_URL", "redis://h"), ("AGENTRUN_MANIFEST", str(file))):
        monkeypatch.setenv(name, value)

    monkeypatch.setenv("AGENTRUN_NAME", "support")
    monkeypatch.setattr(telemetry, "set_up_logs", lambda **_: None)
    assert cli._read("worker")[1].metadata.name == "support"

    monkeypatch.setenv("AGENTRUN_NAME", "other")
    with pytest.raises(cli.ManifestError, match="holds no AgentRun named other"):
        cli._read("worker")


MODEL_PACKAGES = ("pydantic_ai", "openai")
PROCESS_PACKAGES = (
    "asyncpg",
    "redis",
    "fastapi",
    "uvicorn",
    "structlog",
    "prometheus_client",
    "agentrun.manifests",
    "genai_prices",
    "httpx2",
)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("agentrun.cli", (*MODEL_PACKAGES, *PROCESS_PACKAGES)),
        ("agentrun.cli, agentrun.worker.process, agentrun.agents.loading", MODEL_PACKAGES),
        ("agentrun.cli, agentrun.gateway.process", MODEL_PACKAGES),
        ("agentrun.cli, agentrun.scheduler.process", (*MODEL_PACKAGES, "fastapi")),
        ("agentrun.cli, agentrun_operator.main", (*MODEL_PACKAGES, "fastapi")),
    ],
)
def test_a_start_loads_only_what_it_needs(modules: str, heavy: tuple[str, ...]) -> None:
    """Loading takes most of a start, and with it of scaling from zero: `agentrun --version` loads no process, and a worker no
    pydantic-ai unless its agent uses it."""
    code = f"import sys, {modules}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"


def test_the_crds_are_printed_as_they_are_in_the_source_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "crds") == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert printed == [yaml.safe_load((CRDS / f"{name}.yaml").read_text()) for name in ("agentruns", "crontasks")]


CRON_TASK = """apiVersion: agentrun.dev/v1alpha1
kind: CronTask
metadata: {name: NAME}
spec: {agentRunRef: {name: support}, schedule: "SCHEDULE", timeZone: ZONE, input: go on}
"""


def cron_task(name: str, schedule: str, zone: str = "Etc/UTC") -> str:
    return CRON_TASK.replace("NAME", name).replace("SCHEDULE", schedule).replace("ZONE", zone)


def test_next_slots_of_a_file_are_told_without_a_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text("---\n".join([cron_task("nightly", "30 2 * * *", "America/New_York"), cron_task("hourly", "@hourly")]))

    assert call(monkeypatch, "cron", "next", "nightly", "-f", str(file), "--count", "2", "--from", "2025-03-09T00:00Z") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "SLOT", "America/New_York"],
        ["nightly", "2025-03-09T07:00Z", "Sun", "2025-03-09", "03:00", "EDT"],
        ["nightly", "2025-03-10T06:30Z", "Mon", "2025-03-10", "02:30", "EDT"],
    ]
    assert call(monkeypatch, "cron", "next", "-f", str(file), "--json") == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["nightly"] * 5 + ["hourly"] * 5


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (cron_task("task", "0 0 31 2 *"), "spec.schedule: the day does not exist"),
        (cron_task("task", "0 9 * * * *"), "spec.schedule"),
        (cron_task("task", "*/0 * * * *"), "spec.schedule"),
        (cron_task("task", "60 * * * *"), "spec.schedule"),
        (cron_task("task", "@daily", "Mars/Olympus"), "spec.timeZone: the time zone Mars/Olympus is not known"),
        (MANIFEST.replace("NAME", "support"), "holds no CronTask"),
    ],
)
def test_next_slots_of_a_file_that_cannot_be_followed_are_refused(
    document: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(document)
    assert call(monkeypatch, "cron", "next", "-f", str(file)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "AGENTRUN_API_KEY is not set"),
        ({"AGENTRUN_API_KEY": "ar_ü"}, "AGENTRUN_API_KEY: no API key"),
        ({"AGENTRUN_API_KEY": "ar_x", "AGENTRUN_URL": "gateway:8080"}, "AGENTRUN_URL: no address of a gateway"),
    ],
)
def test_what_asks_a_gateway_says_what_is_not_set(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert call(monkeypatch, "cron", "list") == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert "ar_x" not in err


def test_dev_refuses_a_suspended_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agentrun.yaml"
    file.write_text(MANIFEST.replace("NAME", "support").replace('"}}', '"}, suspend: true}'))

    assert call(monkeypatch, "dev", "-f", str(file), "--state", str(tmp_path / "state")) == 2
    assert "spec.suspend: is true" in capsys.readouterr().err


def test_a_name_that_is_not_found_after_its_connect_was_given_up_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[dict[str, object]] = []

    async def give_up_a_connect() -> None:
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        assert handler is not None

        def reporting(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
            reported.append(context)
            handler(loop, context)

        loop.set_exception_handler(reporting)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await loop.create_connection(asyncio.Protocol, "nowhere.invalid", 80)
        await eventually(lambda: gc.collect() >= 0 and reported, within=30, what="the loop has reported the name")
        loop.call_soon(int, "no number")
        await eventually(lambda: len(reported) == 2, within=10, what="the loop has reported another error")

    pytest.importorskip("uvloop")
    with caplog.at_level(logging.DEBUG), asyncio.Runner(loop_factory=cli._loop_factory()) as runner:
        runner.run(give_up_a_connect())

    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info and record.exc_info[0] is ValueError, record
