"""Whether a process may work on the schema that it finds."""

import pytest

from agentrun.control.schema_gate import Verdict, decide


@pytest.mark.parametrize(
    ("required", "present", "oldest_accepted", "verdict", "told"),
    [
        (3, 0, 0, Verdict.MIGRATE, "has no schema; run: agentrun migrate"),
        (3, 2, 1, Verdict.MIGRATE, "has schema 2 and this version needs 3; run: agentrun migrate"),
        (3, 3, 1, Verdict.SERVE, "as needed"),
        (3, 3, 3, Verdict.SERVE, "as needed"),
        (3, 5, 2, Verdict.SERVE, "accepts code for schema 3"),
        (3, 5, 3, Verdict.SERVE, "accepts code for schema 3"),
        (3, 5, 4, Verdict.REFUSE, "accepts code for schema 4 or newer; this is for 3; run a newer version"),
    ],
)
def test_the_gate(required: int, present: int, oldest_accepted: int, verdict: Verdict, told: str) -> None:
    decision = decide(required=required, present=present, oldest_accepted=oldest_accepted)

    assert decision.verdict is verdict
    assert decision.serves == (verdict is Verdict.SERVE)
    assert told in decision.message
    assert "\n" not in decision.message


@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_mg_05_not_how_far_ahead_a_schema_is_decides_but_the_oldest_code_that_it_accepts(ahead: int) -> None:
    assert decide(required=3, present=3 + ahead, oldest_accepted=3).verdict is Verdict.SERVE
    assert decide(required=3, present=3 + ahead, oldest_accepted=4).verdict is Verdict.REFUSE
