"""Which slots a schedule has, from the definition in docs/schedules.md alone: sets of numbers, minute by minute over what the clocks show.

Knows nothing of the product. Numbers, lists, ranges, `*` and steps only: no names, no nicknames, no H.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def _values(text: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for item in text.split(","):
        base, _, step = item.partition("/")
        if base == "*":
            a, b = low, high
        elif "-" in base:
            a, b = (int(number) for number in base.split("-"))
        else:
            a, b = int(base), high if step else int(base)
        found.update(number for number in range(a, b + 1) if (number - a) % int(step or 1) == 0)
    return found


@dataclass(frozen=True, slots=True)
class _Minute:
    """One minute: what the clocks show, whether they have shown it before, and what they have skipped just now."""

    moment: datetime
    wall: datetime
    seen: bool
    missing: tuple[datetime, ...]


@lru_cache(maxsize=64)
def _minutes(zone: str, since: datetime, until: datetime) -> tuple[_Minute, ...]:
    """The minutes from `since` to `until`. Clocks are followed for two days before, to know what they have shown."""
    info = ZoneInfo(zone)
    found = []
    newest: datetime | None = None
    moment = since - timedelta(days=2)
    while moment <= until:
        wall = moment.astimezone(info).replace(tzinfo=None)
        missing = []
        while newest is not None and newest + MINUTE < wall:
            newest += MINUTE
            missing.append(newest)
        seen = newest is not None and wall <= newest
        if moment >= since:
            found.append(_Minute(moment, wall, seen, tuple(missing)))
        newest = wall if newest is None else max(newest, wall)
        moment += MINUTE
    return tuple(found)


class Oracle:
    """The slots of one schedule in its zone."""

    def __init__(self, expression: str, zone: str) -> None:
        texts = expression.split()
        minutes, hours, days, months, weekdays = (_values(t, a, b) for t, (a, b) in zip(texts, RANGES, strict=True))
        self._minutes, self._hours, self._days, self._months = minutes, hours, days, months
        self._weekdays = {day % 7 for day in weekdays}
        self._both = texts[2].startswith("*") or texts[4].startswith("*")
        self._every_hour = len(hours) == 24
        self._often = any("/" in text for text in texts[:2]) or len(minutes) == 60 or self._every_hour
        self._zone = zone

    def _matches(self, wall: datetime) -> bool:
        if wall.minute not in self._minutes or wall.hour not in self._hours or wall.month not in self._months:
            return False
        day, weekday = wall.day in self._days, wall.isoweekday() % 7 in self._weekdays
        return (day and weekday) if self._both else (day or weekday)

    def slots(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Later than `since`, up to `until`; both are whole minutes."""
        for one in _minutes(self._zone, since, until):
            fires = self._matches(one.wall) and (self._often or not one.seen)
            if one.missing and not self._every_hour:
                fires = fires or any(self._matches(wall) for wall in one.missing)
            if fires and one.moment > since:
                yield one.moment
