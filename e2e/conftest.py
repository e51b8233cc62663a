"""Scenarios on a real cluster: `make e2e LEVEL=smoke` or `LEVEL=full`.

system       cluster, image and stores, made when they are not there; they stay for the next run (`make down` takes them away)
operator     the chart, installed
shop         a namespace with what AgentRuns of scenarios need: Secrets, code, a provider. It has to be empty again after them

After each scenario: no operator pod has restarted, and no process has logged an error, unless the scenario said so.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import diagnostics
from harness.shop import Shop
from harness.system import System

REPORTS = Path(__file__).parents[1] / ".pytest_cache" / "e2e"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--level", choices=("smoke", "full"), default="smoke", help="how much: smoke (minutes) or full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: only with --level=full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--level") == "smoke":
        chosen = [item for item in items if item.get_closest_marker("full") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    setattr(item, f"report_{report.when}", report)
    return report


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A line on the terminal, also while output is captured."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"  {text}", flush=True)

    return line


@pytest.fixture(scope="session")
def system(say: Callable[[str], None]) -> System:
    whole = System()
    whole.up(say)
    return whole


@pytest.fixture
def operator(system: System) -> System:
    if not system.chart.installed():
        system.chart.install()
    return system


@pytest.fixture
def shop(operator: System, request: pytest.FixtureRequest, say: Callable[[str], None]) -> Iterator[Shop]:
    made = Shop(operator, f"e2e-{uuid.uuid4().hex[:8]}")
    made.open()
    before = operator.chart.restarts()
    yield made
    report = getattr(request.node, "report_call", None)
    if report is None or report.failed:
        folder = REPORTS / re.sub(r"\W+", "-", request.node.name)
        diagnostics.collect(operator, made.namespace, folder)
        say(f"diagnostics: {folder}")
    try:
        if report is not None and report.passed:
            made.remove_agents()
            check_silence(operator, made, before)
    finally:
        made.close()


def check_silence(system: System, shop: Shop, before: dict[str, int]) -> None:
    """The invariants of every scenario."""
    after = system.chart.restarts()
    if not shop.operator_was_disturbed:
        assert after == before, "operator pods have restarted or been replaced"
    errors = [
        line
        for name in after
        for line in system.kubectl("logs", "-n", system.chart.namespace, name, f"--since-time={shop.since}").splitlines()
        if _is_error(line) and not any(re.search(pattern, line) for pattern in shop.expected_errors)
    ]
    assert not errors, "\n".join(errors[:20])


def _is_error(line: str) -> bool:
    try:
        return json.loads(line).get("level") in ("error", "critical")
    except (ValueError, AttributeError):
        return True  # a traceback, or whatever else is no log line of ours
