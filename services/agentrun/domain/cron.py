"""Schedules: what may be written, and at which minutes they fire. Pure, except that zones are read from the zone database.

Calendar arithmetic on wall-clock time is cronsim's; what the changes of a zone's clocks do to it is decided here
(docs/schedules.md has the rules as a table):

- A time that the clocks skip fires at the first minute after the gap, several together once. A schedule of every hour has nothing
  to make up for: it goes on with its next time.
- A time that comes twice fires once, the first time. Where minute or hour is `*` or has a step it fires each time.

A field that begins with `*` in day or weekday: both must match. Else either does, as in Debian's cron (crontab(5)).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from agentrun.domain import zones
from agentrun.domain.zones import Stretch

NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
MINUTE = timedelta(minutes=1)
_SECOND = timedelta(seconds=1)
_START = datetime(2000, 1, 1)  # of the search for any time at all: cronsim gives up after 50 years
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_NO_ZONES = ("localtime", "posixrules", "Factory", "posix/", "right/")
"""Files beside the zones: the machine's own, and copies that count leap seconds."""


class CronError(ValueError):
    """A schedule that cannot be followed. The message says what is wrong and what to write."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    least: int
    most: int
    most_hashed: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> frozenset[int]:
        """The values that a field matches; H counts as all. Raises CronError."""
        return frozenset(value for item in text.split(",") for value in self._item(item))

    def is_all(self, text: str) -> bool:
        """Whether a field matches whatever the clock shows."""
        return len(self.values(text)) == self.most - self.least + 1

    def repeats(self, text: str) -> bool:
        """Whether a field stands for every so often rather than for given times."""
        return "/" in text or (text != "H" and self.is_all(text))

    def hashed(self, text: str, number: int) -> str:
        """The field with H replaced by what `number` chooses."""
        return ",".join(self._chosen(item, number) for item in text.split(","))

    def _chosen(self, item: str, number: int) -> str:
        base, _, step = item.partition("/")
        if base != "H":
            return item
        if step:
            return f"{self.least + number % int(step)}-{self.most}/{step}"
        return str(self.least + number % (self.most_hashed - self.least + 1))

    def _item(self, item: str) -> Iterator[int]:
        base, slash, step_text = item.partition("/")
        first, dash, last = base.partition("-")
        if base in ("*", "H"):
            low, high = self.least, self.most
        else:
            low = self._number(first)
            high = self._number(last) if dash else (self.most if slash else low)
        if low > high:
            raise CronError(f"the {self.name} {base} runs backwards; write the smaller number first")
        if not slash:
            return iter(range(low, high + 1))
        if not step_text.isascii() or not step_text.isdigit() or not 1 <= int(step_text) <= high - low:
            raise CronError(f"the step of the {self.name} {item} must be between 1 and {high - low}")
        return iter(range(low, high + 1, int(step_text)))

    def _number(self, text: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + self.least
        if not text.isascii() or not text.isdigit() or not self.least <= int(text) <= self.most:
            raise CronError(f"the {self.name} {text} must be between {self.least} and {self.most}")
        return int(text)


_FIELDS = (
    _Field("minute", 0, 59, 59),
    _Field("hour", 0, 23, 23),
    _Field("day", 1, 31, 28),  # H chooses a day that every month has
    _Field("month", 1, 12, 12, _MONTHS),
    _Field("weekday", 0, 7, 6, _WEEKDAYS),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule in its zone. Slots are whole minutes, as UTC.

    `once`: a time that comes twice fires once. `skips`: a time that does not exist is not made up for.
    """

    expression: str
    zone: ZoneInfo
    once: bool
    skips: bool

    def after(self, since: datetime) -> Iterator[datetime]:
        """The slots later than `since`, earliest first, without end."""
        newest, upcoming = since, datetime.min
        for stretch in zones.forward(self.zone, since):
            low, high = self._walls(stretch)
            if self._made_up(stretch) and stretch.begin > newest:
                newest = stretch.begin
                yield newest
            low = max(low, stretch.wall(since))
            if upcoming >= high and not stretch.after_change:
                continue  # a rare schedule: the calendar is not searched again for each stretch
            for wall in _ascending(self.expression, low):
                upcoming = wall
                if wall >= high:
                    break
                if (slot := stretch.instant(wall)) > newest:
                    newest = slot
                    yield slot
            else:
                return

    def before(self, until: datetime, *, since: datetime) -> Iterator[datetime]:
        """The slots later than `since` and not later than `until`, latest first."""
        oldest, upcoming, synthetic = until + MINUTE, datetime.max, False
        for stretch in zones.backward(self.zone, until, since=since):
            low, high = self._walls(stretch)
            if not (synthetic and upcoming < low):
                for wall in _descending(
                    self.expression, min(high, stretch.wall(until.replace(second=0, microsecond=0)) + MINUTE)
                ):
                    upcoming = wall
                    if wall < low:
                        break
                    if (slot := stretch.instant(wall)) <= since:
                        return
                    if slot < oldest:
                        oldest = slot
                        yield slot
            if self._made_up(stretch) and since < stretch.begin < oldest:
                oldest = stretch.begin
                yield oldest
            synthetic = not stretch.after_change

    def next(self, since: datetime) -> datetime | None:
        """The first slot later than `since`; None if there is none within 50 years."""
        return next(self.after(since), None)

    def _walls(self, stretch: Stretch) -> tuple[datetime, datetime]:
        """From which wall-clock time on, and before which one, times of a stretch fire."""
        return stretch.repeated_until if self.once else stretch.first_wall, stretch.end_wall

    def _made_up(self, stretch: Stretch) -> bool:
        """Whether the stretch begins with a slot for times that were skipped."""
        if self.skips or stretch.skipped_from >= stretch.first_wall:
            return False
        missing = next(_ascending(self.expression, stretch.skipped_from), None)
        return missing is not None and missing < stretch.first_wall


def seed(namespace: str, name: str) -> str:
    """What H is chosen from: the same CronTask, made anew, keeps its times."""
    return f"{namespace}/{name}"


@lru_cache(maxsize=4096)
def parse(schedule: str, time_zone: str, *, seed: str) -> Schedule:
    """The schedule; what H stands for is chosen from `seed`, the same for the same one. Raises CronError."""
    texts = _texts(schedule)
    expression = " ".join(field.hashed(text, _number(seed, field)) for field, text in zip(_FIELDS, texts, strict=True))
    minute, hour = _FIELDS[0], _FIELDS[1]
    once = not (minute.repeats(texts[0]) or hour.repeats(texts[1]))
    return Schedule(expression, _zone(time_zone), once=once, skips=hour.is_all(expression.split()[1]))


def schedule_problem(schedule: str) -> str | None:
    """What is wrong with a schedule, and what to do; None if it has a next time."""
    try:
        _texts(schedule)
    except CronError as error:
        return str(error)
    return None


def zone_problem(time_zone: str) -> str | None:
    """What is wrong with a time zone's name; None if it is known."""
    try:
        _zone(time_zone)
    except CronError as error:
        return str(error)
    return None


def _texts(schedule: str) -> list[str]:
    """The five fields as they were written, with names in capitals. Raises CronError."""
    texts = [text for text in NICKNAMES.get(schedule, schedule).upper().split(" ") if text]
    if len(texts) != len(_FIELDS) or schedule != schedule.strip():
        raise CronError(
            "the schedule must have the five fields minute, hour, day, month and weekday, or be one of "
            + " ".join(sorted(NICKNAMES))
        )
    for field, text in zip(_FIELDS, texts, strict=True):
        field.values(text)
    any_choice = " ".join(field.hashed(text, 0) for field, text in zip(_FIELDS, texts, strict=True))
    try:
        found = next(_ascending(any_choice, _START), None)
    except CronSimError:
        found = None
    if found is None:
        raise CronError("the day does not exist in any of these months; choose a day that does")
    return texts


def _zone(time_zone: str) -> ZoneInfo:
    try:
        if time_zone.startswith(_NO_ZONES):
            raise ZoneInfoNotFoundError(time_zone)
        return ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise CronError(
            f"the time zone {time_zone} is not known; use a name of the IANA database, such as Europe/Berlin"
        ) from None


def _number(seed: str, field: _Field) -> int:
    return int.from_bytes(hashlib.sha256(f"{field.name}:{seed}".encode()).digest()[:8], "big")


def _ascending(expression: str, low: datetime) -> Iterator[datetime]:
    """Wall-clock times that match, from `low` on."""
    return iter(CronSim(expression, low - _SECOND))


def _descending(expression: str, high: datetime) -> Iterator[datetime]:
    """Wall-clock times that match, before `high`."""
    return iter(CronSim(expression, high, reverse=True))
