"""Schedules against croniter, another library that was written by others: the same slots, except for a list of differences."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from cron_expressions import EXPRESSIONS
from croniter import croniter
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrun.domain.cron import parse, schedule_problem

COUNT = 15
ZONES = ("Etc/UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu")


def ours(expression: str, zone: str, since: datetime, count: int = COUNT) -> list[datetime]:
    return list(islice(parse(expression, zone, seed="").after(since), count))


def theirs(expression: str, zone: str, since: datetime, count: int = COUNT, *, both: bool = True) -> list[datetime]:
    """`both`: as in Debian's cron, day and weekday must match where one of them begins with `*`."""
    slots = croniter(expression, since.astimezone(ZoneInfo(zone)), ret_type=datetime, implement_cron_bug=both)
    return [slots.get_next().astimezone(UTC) for _ in range(count)]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def star_inside(expression: str) -> bool:
    """Whether day or weekday has a `*` that is not its beginning: only there the two disagree about what begins with `*`."""
    texts = expression.split()
    return any("*" in text[1:] for text in (texts[2], texts[4]))


def offsets(zone: str, since: datetime, until: datetime) -> int:
    """How many offsets a zone has in a time, looked at every twelve hours."""
    info, found, moment = ZoneInfo(zone), set(), since - timedelta(days=2)
    while moment < until + timedelta(days=2):
        found.add(moment.astimezone(info).utcoffset())
        moment += timedelta(hours=12)
    return len(found)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)))
def test_in_utc_both_say_the_same(expression: str, moment: datetime) -> None:
    assume(schedule_problem(expression) is None and not star_inside(expression))
    since = moment.replace(tzinfo=UTC)
    assert ours(expression, "Etc/UTC", since) == theirs(expression, "Etc/UTC", since)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, st.sampled_from(ZONES), st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)))
def test_in_a_zone_whose_clocks_are_not_set_meanwhile_both_say_the_same(expression: str, zone: str, moment: datetime) -> None:
    assume(schedule_problem(expression) is None and not star_inside(expression))
    since = moment.replace(tzinfo=UTC)
    found = ours(expression, zone, since)
    while found and offsets(zone, since, found[-1]) > 1:
        found.pop()
    assert found == theirs(expression, zone, since, len(found))


@pytest.mark.parametrize(
    ("expression", "since"),
    [
        ("30 2 * * *", "2025-03-08T12:00"),
        ("*/15 2 * * *", "2025-03-09T00:00"),
        ("0,30 2,3 * * *", "2025-03-09T00:00"),
        ("15 * * * *", "2025-03-09T06:00"),
        ("0 */2 * * *", "2025-03-09T00:00"),
        ("*/30 1 * * *", "2025-11-02T00:00"),
        ("*/30 * * * *", "2025-11-02T04:30"),
    ],
)
def test_what_both_say_about_clocks_that_are_set(expression: str, since: str) -> None:
    found = ours(expression, "America/New_York", at(since))
    assert found == theirs(expression, "America/New_York", at(since))


# The differences, as docs/schedules.md lists them. If one goes away there, this says so.


def test_difference_a_fixed_time_that_comes_twice() -> None:
    once, since = [at("2025-11-02T05:30"), at("2025-11-03T06:30")], at("2025-11-01T12:00")
    assert ours("30 1 * * *", "America/New_York", since, 2) == once
    assert theirs("30 1 * * *", "America/New_York", since, 3) == [once[0], at("2025-11-02T06:30"), once[1]]


def test_difference_day_and_weekday_where_one_begins_with_a_star() -> None:
    since = at("2025-06-01T00:00")
    assert ours("0 0 */2 * 1", "Etc/UTC", since) == theirs("0 0 */2 * 1", "Etc/UTC", since)
    assert ours("0 0 */2 * 1", "Etc/UTC", since, 1) == [at("2025-06-09T00:00")]
    assert theirs("0 0 */2 * 1", "Etc/UTC", since, 1, both=False) == [at("2025-06-02T00:00")]
    assert ours("0 0 1,* * 1", "Etc/UTC", since, 2) == [at("2025-06-02T00:00"), at("2025-06-03T00:00")]
    assert theirs("0 0 1,* * 1", "Etc/UTC", since, 2) == [at("2025-06-02T00:00"), at("2025-06-09T00:00")]


def test_difference_a_range_of_one_value() -> None:
    since = at("2025-06-01T00:00")
    assert ours("7-7 * * * *", "Etc/UTC", since, 2) == [at("2025-06-01T00:07"), at("2025-06-01T01:07")]
    assert theirs("7-7 * * * *", "Etc/UTC", since, 2) == [at("2025-06-01T00:01"), at("2025-06-01T00:02")]


@pytest.mark.parametrize(
    "expression",
    ["*/60 * * * *", "*/90 * * * *", "* * * * * *", "0 0 30 2 *", "50-10 * * * *", "0 0 * * MON#2", "0 0 L * *", "* * * * *\n"],
)
def test_difference_what_only_they_take(expression: str) -> None:
    assert croniter.is_valid(expression)
    assert schedule_problem(expression) is not None


@pytest.mark.parametrize("expression", ["*/0 * * * *", "60 * * * *", "* * * *", "@reboot", "", "1,,2 * * * *", "0 0 * * 8"])
def test_what_neither_takes(expression: str) -> None:
    assert not croniter.is_valid(expression)
    assert schedule_problem(expression) is not None
