"""docs/operator.md names every reason, Event, setting and kind: none is left for the reader to guess."""

import re
from pathlib import Path

import pytest

from agentrun_operator.reasons import ConditionType, EventReason, Reason
from agentrun_operator.resources import WATCHED
from agentrun_operator.settings import OperatorSettings

PAGE = (Path(__file__).parents[2] / "docs" / "operator.md").read_text()
TABLE = PAGE.partition("| reason | of |")[2].partition("\n\n")[0]
REASONS = {name for names in re.findall(r"^\| ([A-Z][A-Za-z, ]+) \|", TABLE, re.MULTILINE) for name in names.split(", ")}


def test_each_reason_has_a_row_and_no_row_is_of_a_reason_that_is_gone() -> None:
    assert {str(reason) for reason in Reason} == REASONS


@pytest.mark.parametrize("name", [*ConditionType, *EventReason, *(resource.plural for resource in WATCHED)])
def test_it_is_named(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)


def test_each_setting_has_its_default() -> None:
    listed = dict(re.findall(r"^\| ((?:AGENTRUN_|KUBECONFIG|POD_)[A-Z_, ]*) \| ([^|]*)\|", PAGE, re.MULTILINE))
    known: dict[str, str] = {}
    for names, defaults in listed.items():
        first, *others = names.split(", ")
        for name, default in zip([first, *others], defaults.strip().split(", "), strict=False):
            known["AGENTRUN_OPERATOR" + name if name.startswith("_") else name] = default
    for field in OperatorSettings.model_fields.values():
        variable = str(field.validation_alias)
        assert variable in known, f"{variable} is not in docs/operator.md"
        default = field.default
        if isinstance(default, int | float):
            assert float(known[variable]) == default
        elif default and default != "default" and field.default_factory is None:
            assert known[variable] == default
