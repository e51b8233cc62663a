"""Schedules against their definition: a table of known days, and an oracle that walks minute by minute."""

import time
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from cron_expressions import EXPRESSIONS
from cron_oracle import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrun.domain.cron import CronError, Schedule, parse, schedule_problem, zone_problem
from agentrun.domain.slots import fill, jitter, run_key, slot_session

MINUTE = timedelta(minutes=1)
NEW_YORK, BERLIN, LORD_HOWE = "America/New_York", "Europe/Berlin", "Australia/Lord_Howe"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def schedule(expression: str, zone: str = "Etc/UTC") -> Schedule:
    return parse(expression, zone, seed="shop/report")


def first(expression: str, zone: str, since: str, count: int) -> list[str]:
    return [slot.strftime("%m-%d %H:%M") for slot in islice(schedule(expression, zone).after(at(since)), count)]


def last(expression: str, zone: str, until: str, count: int) -> list[str]:
    found = islice(schedule(expression, zone).before(at(until), since=at("1990-01-01")), count)
    return [slot.strftime("%Y-%m-%d %H:%M") for slot in found]


# Known days


def test_cr_01_a_fixed_time_that_comes_twice_fires_once() -> None:
    assert first("30 1 * * *", NEW_YORK, "2025-11-01T12:00", 2) == ["11-02 05:30", "11-03 06:30"]


def test_a_fixed_time_is_not_fired_again_by_who_begins_between_its_two_times() -> None:
    assert first("30 1 * * *", NEW_YORK, "2025-11-02T05:45", 1) == ["11-03 06:30"]
    assert first("30 1 * * *", NEW_YORK, "2025-11-02T05:29:59", 1) == ["11-02 05:30"]


def test_what_is_fired_every_so_often_goes_on_while_the_hour_repeats() -> None:
    assert first("*/30 * * * *", NEW_YORK, "2025-11-02T05:00", 4) == ["11-02 05:30", "11-02 06:00", "11-02 06:30", "11-02 07:00"]
    assert first("*/30 1 * * *", NEW_YORK, "2025-11-02T00:00", 4) == ["11-02 05:00", "11-02 05:30", "11-02 06:00", "11-02 06:30"]
    assert first("@hourly", NEW_YORK, "2025-11-02T04:30", 3) == ["11-02 05:00", "11-02 06:00", "11-02 07:00"]


def test_cr_03_a_fixed_time_that_does_not_exist_fires_at_the_first_minute_after() -> None:
    assert first("30 2 * * *", NEW_YORK, "2025-03-08T12:00", 2) == ["03-09 07:00", "03-10 06:30"]
    assert last("30 2 * * *", NEW_YORK, "2025-03-10T00:00", 2) == ["2025-03-09 07:00", "2025-03-08 07:30"]
    assert first("*/30 * * * *", NEW_YORK, "2025-03-09T06:00", 3) == ["03-09 06:30", "03-09 07:00", "03-09 07:30"]


def test_times_that_the_clocks_skip_fire_together_and_an_hourly_schedule_has_nothing_to_make_up_for() -> None:
    assert first("*/15 2 * * *", NEW_YORK, "2025-03-09T00:00", 2) == ["03-09 07:00", "03-10 06:00"]
    assert first("0,30 2,3 * * *", NEW_YORK, "2025-03-09T00:00", 3) == ["03-09 07:00", "03-09 07:30", "03-10 06:00"]
    assert first("0 */2 * * *", BERLIN, "2025-03-30T00:00", 2) == ["03-30 01:00", "03-30 02:00"]
    assert first("15 * * * *", NEW_YORK, "2025-03-09T06:00", 2) == ["03-09 06:15", "03-09 07:15"]


def test_clocks_that_are_set_at_midnight_or_by_half_an_hour() -> None:
    assert first("0 0 * * *", "Africa/Cairo", "2025-04-24T00:00", 2) == ["04-24 22:00", "04-25 21:00"]
    assert first("10 2 * * *", LORD_HOWE, "2025-10-04T00:00", 2) == ["10-04 15:30", "10-05 15:10"]
    assert first("45 1 * * *", LORD_HOWE, "2025-04-05T00:00", 2) == ["04-05 14:45", "04-06 15:15"]


def test_a_day_that_was_left_out_is_made_up_for_once() -> None:
    assert first("0 9 * * *", "Pacific/Apia", "2011-12-29T00:00", 3) == ["12-29 19:00", "12-30 10:00", "12-30 19:00"]


def test_cr_04_the_day_of_the_change_has_its_run() -> None:
    assert first("0 10 * * *", "America/Chicago", "2025-03-08T00:00", 3) == ["03-08 16:00", "03-09 15:00", "03-10 15:00"]


def test_cr_05_the_time_is_the_zone_s_in_every_season() -> None:
    assert first("0 9 * * *", BERLIN, "2025-03-28T08:00", 2) == ["03-29 08:00", "03-30 07:00"]
    assert first("0 9 * * *", BERLIN, "2025-10-25T07:00", 1) == ["10-26 08:00"]
    assert first("0 9 * * *", "Asia/Kathmandu", "2025-06-01T00:00", 1) == ["06-01 03:15"]


def test_cr_15_day_and_weekday() -> None:
    assert first("0 0 1-31 * 4", "Etc/UTC", "2025-06-01T00:00", 2) == ["06-02 00:00", "06-03 00:00"]
    assert first("0 0 13 * FRI", "Etc/UTC", "2025-06-01T00:00", 3) == ["06-06 00:00", "06-13 00:00", "06-20 00:00"]
    assert first("0 0 */2 * 1", "Etc/UTC", "2025-06-01T00:00", 3) == ["06-09 00:00", "06-23 00:00", "07-07 00:00"]


def test_cr_17_leap_days() -> None:
    assert last("0 9 29 2 *", "Etc/UTC", "2027-06-01T00:00", 1) == ["2024-02-29 09:00"]
    assert last("0 9 29 2 *", "Etc/UTC", "2028-02-29T12:00", 1) == ["2028-02-29 09:00"]
    for since, found in (("2027-06-01", [2028, 2032]), ("2028-02-29T12:00", [2032, 2036])):
        assert [slot.year for slot in islice(schedule("0 9 29 2 *").after(at(since)), 2)] == found
    assert first("0 9 * * *", BERLIN, "2028-02-29T12:00", 1) == ["03-01 08:00"]
    assert last("0 9 * * *", BERLIN, "2028-03-01T00:00", 1) == ["2028-02-29 08:00"]
    assert [slot.year for slot in islice(schedule("0 9 29 2 *", BERLIN).after(at("2096-03-01")), 1)] == [2104]


def test_cr_06_a_long_gap_is_bounded_and_quick() -> None:
    begun = time.process_time()
    found = list(islice(schedule("* * * * *", BERLIN).before(at("2026-11-29"), since=at("1999-01-01")), 10_000))
    assert len(found) == 10_000
    assert found[0] - found[-1] == 9_999 * MINUTE
    assert time.process_time() - begun < 1


# What may be written


@pytest.mark.parametrize(
    "text",
    [
        "* * * * *",
        "0 9 * * MON-FRI",
        "*/15 0-6/2 1,15 JAN,JUL *",
        "H H * * *",
        "H/15 * * * *",
        "H H H H H",
        "H H/5 H/20 H/7 H/3",
        "5/20 * * * *",
        "0 9 29 2 *",
        "0 0 30 2 MON",
        "0 0 31 4,5 *",
        "0 0 * * 7",
        "0 0 29 2 */7",
        "0  9 * * *",
        "@hourly",
        "@yearly",
    ],
)
def test_a_schedule_that_has_a_next_time(text: str) -> None:
    assert schedule_problem(text) is None
    assert schedule(text, BERLIN).next(at("2026-11-29")) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "* * * *",
        "* * * * * *",
        "* * * * * * *",
        "* * * * *\n",
        "*\t* * * *",
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
        "0 0 L * *",
        "0 0 * * MON#2",
        "0 0 * * 5L",
        "h * * * * *",
    ],
)
def test_cr_18_what_is_not_a_schedule_is_refused(text: str) -> None:
    assert schedule_problem(text) is not None
    with pytest.raises(CronError):
        schedule(text)


@pytest.mark.parametrize("text", ["*/60 * * * *", "*/90 * * * *", "* */24 * * *", "0-10/20 * * * *", "H/60 * * * *"])
def test_cr_18_a_step_larger_than_its_field_is_refused(text: str) -> None:
    assert "step" in (schedule_problem(text) or "")


@pytest.mark.parametrize("text", ["0 0 30 2 *", "0 0 31 2 *", "0 0 31 4,6 *", "0 0 30-31 FEB *", "0 0 31 2 */2"])
def test_cr_16_a_date_that_never_exists_is_refused(text: str) -> None:
    assert "does not exist" in (schedule_problem(text) or "")


@pytest.mark.parametrize("zone", ["Etc/UTC", "UTC", BERLIN, NEW_YORK, "America/Argentina/Buenos_Aires"])
def test_a_known_zone(zone: str) -> None:
    assert zone_problem(zone) is None


@pytest.mark.parametrize(
    "zone", ["Mars/Olympus", "Europe", "../etc/passwd", "/etc/passwd", "", "localtime", "right/Europe/Berlin", "posix/UTC"]
)
def test_an_unknown_zone(zone: str) -> None:
    assert "IANA" in (zone_problem(zone) or "")


# H


def test_h_is_the_same_for_a_seed_and_spreads_over_others() -> None:
    assert parse("H H * * *", "UTC", seed="a") == parse("H H * * *", "UTC", seed="a")
    minutes = {parse("H * * * *", "UTC", seed=f"shop/task-{n}").expression.split()[0] for n in range(300)}
    assert len(minutes) > 50
    assert all(parse("H H H * H", "UTC", seed=str(n)).next(at("2027-02-01")) for n in range(200))


@given(seed=st.text(max_size=20))
def test_h_with_a_step_keeps_the_step(seed: str) -> None:
    slots = list(islice(parse("H/15 * * * *", "UTC", seed=seed).after(at("2026-11-29")), 9))
    assert {b - a for a, b in pairwise(slots)} == {timedelta(minutes=15)}


@given(seed=st.text(max_size=20))
def test_a_hashed_day_is_in_every_month(seed: str) -> None:
    slots = list(islice(parse("0 0 H * *", "UTC", seed=seed).after(at("2026-12-31")), 12))
    assert [slot.month for slot in slots] == list(range(1, 13))


# Against an oracle that is written from the definition alone, with sets of numbers, minute by minute


CHANGES = {
    "Etc/UTC": ["2026-03-29T01:00", "2028-02-29T00:00"],
    BERLIN: ["2026-03-29T01:00", "2026-10-25T01:00"],
    NEW_YORK: ["2026-03-08T07:00", "2026-11-01T06:00"],
    LORD_HOWE: ["2026-10-03T15:30", "2026-04-04T15:00"],
}
WINDOWS = st.sampled_from([(zone, change) for zone, changes in CHANGES.items() for change in changes])


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, WINDOWS, st.integers(-36 * 60, 10), st.integers(1, 48 * 60), st.integers(0, 59))
def test_slots_are_those_of_the_definition(
    expression: str, window: tuple[str, str], start: int, length: int, seconds: int
) -> None:
    zone, change = window
    since = at(change) + start * MINUTE + timedelta(seconds=seconds)
    until = since + length * MINUTE
    if schedule_problem(expression) is not None:
        return
    whole = since.replace(second=0)
    expected = [slot for slot in Oracle(expression, zone).slots(whole, until) if since < slot <= until]

    made = schedule(expression, zone)
    forward = []
    for slot in made.after(since):
        if slot > until:
            break
        forward.append(slot)
    assert forward == expected
    assert list(made.before(until, since=since)) == expected[::-1]


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS, st.sampled_from(sorted(CHANGES)), st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)))
def test_going_back_meets_what_going_forward_passed(expression: str, zone: str, moment: datetime) -> None:
    if schedule_problem(expression) is not None:
        return
    made, since = schedule(expression, zone), moment.replace(tzinfo=UTC)
    ahead = list(islice(made.after(since), 20))
    assert ahead == sorted(set(ahead))
    assert list(made.before(ahead[-1], since=since)) == ahead[::-1]
    assert all(slot.second == slot.microsecond == 0 for slot in ahead)


# Names


def test_cr_09_a_run_s_key_is_its_scheduled_minute() -> None:
    uid = UUID(int=7)
    assert run_key(uid, at("2026-11-29T10:06")) == f"cron:{uid}:2026-11-29T10:06Z"
    assert run_key(uid, at("2026-11-29T10:06").astimezone(ZoneInfo(BERLIN))) == run_key(uid, at("2026-11-29T10:06"))
    assert slot_session("report", at("2026-11-29T10:06")) == "cron:report:2026-11-29T10:06Z"


def test_jitter_is_spread_and_the_same_for_all() -> None:
    found = [jitter(UUID(int=n), at("2026-11-29T10:06"), most=30).total_seconds() for n in range(500)]
    assert set(found) == set(range(31))
    assert jitter(UUID(int=1), at("2026-11-29T10:06"), most=0) == timedelta()


def test_an_input_may_name_slot_and_task() -> None:
    text = fill("Report for {{slot}} by {{task}}, not {{other}}", task="daily", slot=at("2026-11-29T10:06"))
    assert text == "Report for 2026-11-29T10:06Z by daily, not {{other}}"
