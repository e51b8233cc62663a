"""What the operator is told by its environment, and what it answers to nonsense."""

from pathlib import Path

import pytest

from agentrun.domain.errors import ConfigurationError
from agentrun_operator.settings import OperatorSettings, read


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_are_those_of_a_pod_that_watches_everything() -> None:
    settings = read()

    assert (settings.namespaces, settings.kubeconfig_paths) == ((), ())
    assert (settings.lease_seconds, settings.renew_seconds, settings.retry_seconds) == (15, 10, 2)
    assert (settings.pod_namespace, settings.lease, settings.health_port) == ("default", "agentrun-operator", 8081)


def test_lists_may_have_blanks_and_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_OPERATOR_NAMESPACES", " b, a,,b ")
    monkeypatch.setenv("KUBECONFIG", "/one:/two")

    assert read().namespaces == ("a", "b")
    assert read().kubeconfig_paths == (Path("/one"), Path("/two"))


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AGENTRUN_OPERATOR_WORKERS", "0", "AGENTRUN_OPERATOR_WORKERS is '0'"),
        ("AGENTRUN_OPERATOR_TICK_SECONDS", "often", "AGENTRUN_OPERATOR_TICK_SECONDS is 'often'"),
        ("AGENTRUN_OPERATOR_RENEW_SECONDS", "20", "work has to end before another replica may take the Lease"),
        ("AGENTRUN_OPERATOR_HEALTH_PORT", "70000", "AGENTRUN_OPERATOR_HEALTH_PORT"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as error:
        read()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"IMAGE": "theirs", "WORKERS": "many", "LEASE": "mine", "LOG_LEVEL": "loud"}.items():
        monkeypatch.setenv(name, value)
    assert (read().image, read().workers, read().lease, read().log_level) == ("", 8, "agentrun-operator", "info")


def test_health_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_OPERATOR_HEALTH_PORT", "")
    assert read().health_port is None


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        OperatorSettings().workers = 3  # type: ignore[misc]


def test_two_operators_of_one_machine_are_not_the_same() -> None:
    assert OperatorSettings().pod_name != OperatorSettings().pod_name
