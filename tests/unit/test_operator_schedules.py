"""Which schedules can be followed."""

import pytest

from agentrun_operator.schedules import schedule_problem, zone_problem


@pytest.mark.parametrize(
    "schedule",
    [
        "* * * * *",
        "0 9 * * MON-FRI",
        "*/15 0-6/2 1,15 JAN,JUL *",
        "H H * * *",
        "H/15 * * * *",
        "5/20 * * * *",
        "0 9 29 2 *",
        "0 0 30 2 MON",
        "0 0 31 4,5 *",
        "0 0 * * 7",
        "0  9 * * *",
        "@hourly",
        "@yearly",
    ],
)
def test_a_schedule_that_has_a_next_time(schedule: str) -> None:
    assert schedule_problem(schedule) is None


@pytest.mark.parametrize(
    "schedule",
    [
        "",
        "* * * *",
        "* * * * * *",
        "* * * * * * *",
        "* * * * *\n",
        "@reboot",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "10-5 * * * *",
        "*/0 * * * *",
        "a * * * *",
        "1,,2 * * * *",
        "- * * * *",
        "٣ * * * *",
    ],
)
def test_cr_18_what_is_not_a_schedule_is_refused(schedule: str) -> None:
    assert schedule_problem(schedule) is not None


@pytest.mark.parametrize("schedule", ["*/60 * * * *", "*/90 * * * *", "* */24 * * *", "0-10/20 * * * *"])
def test_cr_18_a_step_larger_than_its_field_is_refused(schedule: str) -> None:
    assert "step" in (schedule_problem(schedule) or "")


@pytest.mark.parametrize("schedule", ["0 0 30 2 *", "0 0 31 4,6 *", "0 0 30-31 FEB *"])
def test_cr_16_a_date_that_never_exists_is_refused(schedule: str) -> None:
    assert "does not exist" in (schedule_problem(schedule) or "")


@pytest.mark.parametrize("zone", ["Etc/UTC", "Europe/Berlin", "America/New_York"])
def test_a_known_zone(zone: str) -> None:
    assert zone_problem(zone) is None


@pytest.mark.parametrize("zone", ["Mars/Olympus", "Europe", "../etc/passwd", ""])
def test_an_unknown_zone(zone: str) -> None:
    assert "IANA" in (zone_problem(zone) or "")
