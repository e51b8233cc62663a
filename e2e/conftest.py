"""Scenarios on a real cluster: `make e2e LEVEL=smoke` or `LEVEL=full`.

system       cluster, image and stores, made when they are not there; they stay for the next run (`make down` takes them away)
operator     the chart, installed
allowed      what the scenario brings about; what else is logged as an error, or restarted, fails it (harness/invariants.py)
shop         a namespace with what AgentRuns of scenarios need: Secrets, code, a provider. It has to be empty again after them

The first phase of a scenario that fails leaves what a person would look at in a folder, whose name is printed.
"""

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import diagnostics
from harness.commands import CommandError
from harness.invariants import Allowed, Invariants
from harness.logs import Logs
from harness.shop import Shop
from harness.system import System

REPORTS = Path(__file__).parents[1] / ".pytest_cache" / "e2e"
NAMESPACE = pytest.StashKey[str]()
FAILED = pytest.StashKey[bool]()


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
    namespace = item.stash.get(NAMESPACE, "")
    if report.failed and not item.stash.get(FAILED, False):
        item.stash[FAILED] = True
        folder = REPORTS / re.sub(r"\W+", "-", item.name)
        diagnostics.collect(System(), namespace, folder)
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"  diagnostics: {folder}", flush=True)
    if report.when == "teardown" and namespace:
        try:
            System().kubectl.delete("namespace", namespace, wait=False)
        except CommandError as error:
            print(f"  {error}", flush=True)
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


@pytest.fixture(scope="session")
def invariants(system: System) -> Iterator[Invariants]:
    logs = Logs(system.cluster)
    logs.start()
    yield Invariants(system, logs)
    logs.stop()


@pytest.fixture
def operator(system: System) -> System:
    if not system.chart.installed():
        system.chart.install()
    return system


@pytest.fixture
def allowed(invariants: Invariants, request: pytest.FixtureRequest) -> Iterator[Allowed]:
    given = invariants.begin()
    yield given
    if request.node.stash.get(FAILED, False):
        invariants.settle()
    else:
        invariants.check(given, filter(None, [request.node.stash.get(NAMESPACE, "")]))


@pytest.fixture
def shop(operator: System, allowed: Allowed, request: pytest.FixtureRequest) -> Iterator[Shop]:
    made = Shop(operator, f"e2e-{uuid.uuid4().hex[:8]}", allowed)
    request.node.stash[NAMESPACE] = made.namespace
    made.open()
    yield made
    try:
        if not request.node.stash.get(FAILED, False):
            made.remove_agents()
    finally:
        made.close()
