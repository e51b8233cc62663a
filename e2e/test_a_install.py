"""The chart on an empty cluster: with the resource definitions applied before it, and without them."""

import pytest
from waiting import eventually

from harness.commands import CommandError
from harness.invariants import API_STARTS_ANEW, Allowed
from harness.system import CRDS, ROOT, System


@pytest.fixture(autouse=True)
def operators_replaced(allowed: Allowed) -> None:
    allowed.operators_replaced = True
    allowed.error("operator", API_STARTS_ANEW)


def definitions(system: System) -> set[str]:
    found = system.kubectl("get", "crd", "-o", "name").split()
    return {name.partition("/")[2] for name in found} & set(CRDS)


def left(system: System) -> list[str]:
    return system.kubectl("get", "all", "-n", system.chart.namespace, "-o", "name").split()


async def test_the_chart_goes_on_top_of_definitions_that_are_there(system: System) -> None:
    system.chart.uninstall()
    system.delete_definitions()
    system.kubectl(
        "apply", "--server-side", "-f", str(ROOT / "crds" / "agentruns.yaml"), "-f", str(ROOT / "crds" / "crontasks.yaml")
    )

    system.chart.install()

    assert len(system.chart.operator_pods()) == 2
    system.chart.test()
    system.chart.uninstall()
    assert definitions(system) == set(CRDS), "an uninstall keeps the definitions, and with them everybody's objects"
    await eventually(lambda: not left(system), within=60, what="its namespace is empty")


def test_the_chart_brings_the_definitions_where_there_are_none(system: System) -> None:
    system.chart.uninstall()
    system.delete_definitions()

    system.chart.install()

    assert definitions(system) == set(CRDS)
    system.chart.test()


def test_a_wrong_value_is_named(system: System) -> None:
    try:
        system.chart.install({"replicaCuont": 3})
    except CommandError as error:
        assert "replicaCuont" in str(error)
    else:
        raise AssertionError("a value that nobody knows was taken")
