"""Whether a CronTask's schedule can be followed: what the CRD's pattern cannot say. Pure, except that it reads the zone database."""

from collections.abc import Iterator
from dataclasses import dataclass
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MACROS = frozenset({"@hourly", "@daily", "@weekly", "@monthly", "@yearly"})
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_LONGEST_MONTHS = dict(zip(range(1, 13), (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))


class _Wrong(ValueError):
    """The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    least: int
    most: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> frozenset[int]:
        """The values that a field matches; H, one that is chosen later, counts as all. Raises _Wrong."""
        return frozenset(value for item in text.split(",") for value in self._item(item))

    def _item(self, item: str) -> Iterator[int]:
        base, slash, step_text = item.partition("/")
        first, dash, last = base.partition("-")
        if base in ("*", "H"):
            low, high = self.least, self.most
        else:
            low = self._number(first)
            high = self._number(last) if dash else (self.most if slash else low)
        if low > high:
            raise _Wrong(f"the {self.name} {base} runs backwards; write the smaller number first")
        if not slash:
            return iter(range(low, high + 1))
        if not step_text.isascii() or not step_text.isdigit() or not 1 <= int(step_text) <= high - low:
            raise _Wrong(f"the step of the {self.name} {item} must be between 1 and {high - low}")
        return iter(range(low, high + 1, int(step_text)))

    def _number(self, text: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + self.least
        if not text.isascii() or not text.isdigit() or not self.least <= int(text) <= self.most:
            raise _Wrong(f"the {self.name} {text} must be between {self.least} and {self.most}")
        return int(text)


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("weekday", 0, 7, _WEEKDAYS),
)


def schedule_problem(schedule: str) -> str | None:
    """What is wrong with a schedule, and what to do; None if it has a next time."""
    if schedule in MACROS:
        return None
    texts = schedule.split(" ")
    texts = [text for text in texts if text]
    if len(texts) != len(_FIELDS) or schedule != schedule.strip():
        return "the schedule must have the five fields minute, hour, day, month and weekday, or be one of " + " ".join(
            sorted(MACROS)
        )
    try:
        _, _, days, months, _ = (field.values(text) for field, text in zip(_FIELDS, texts, strict=True))
    except _Wrong as wrong:
        return str(wrong)
    if texts[4] == "*" and not any(day <= _LONGEST_MONTHS[month] for day in days for month in months):
        return "the day does not exist in any of these months; choose a day that does"
    return None


def zone_problem(time_zone: str) -> str | None:
    """What is wrong with a time zone's name; None if it is known."""
    try:
        ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return f"the time zone {time_zone} is not known; use a name of the IANA database, such as Europe/Berlin"
    return None
