"""A time zone as stretches of time in which its clocks run evenly. Between two stretches they are set forward or back."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_PROBE = timedelta(days=1)
_LONGEST = timedelta(days=32)
_MARGIN = timedelta(days=2)
"""More than clocks were ever set forward or back (a day, in Samoa)."""
_HORIZON = timedelta(days=60 * 366)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `begin` until before `end` (UTC) the zone is `offset` ahead of UTC; just before `begin` it was `before`.

    Wall-clock times are datetimes without a zone.
    """

    begin: datetime
    end: datetime
    offset: timedelta
    before: timedelta

    def wall(self, instant: datetime) -> datetime:
        """What the clocks of this stretch show at an instant."""
        return instant.replace(tzinfo=None) + self.offset

    def instant(self, wall: datetime) -> datetime:
        """When the clocks of this stretch show that."""
        return (wall - self.offset).replace(tzinfo=UTC)

    @property
    def after_change(self) -> bool:
        """Whether the clocks were set at `begin`; else a long stretch was only cut there."""
        return self.before != self.offset

    @property
    def first_wall(self) -> datetime:
        return self.wall(self.begin)

    @property
    def end_wall(self) -> datetime:
        return self.wall(self.end)

    @property
    def skipped_from(self) -> datetime:
        """The first wall-clock time that was skipped; `first_wall` or later if none was."""
        return self.begin.replace(tzinfo=None) + self.before

    @property
    def repeated_until(self) -> datetime:
        """The first wall-clock time that comes for the first time."""
        return max(self.first_wall, self.skipped_from)


def forward(zone: ZoneInfo, since: datetime) -> Iterator[Stretch]:
    """Stretches in order. The first may begin up to two days before `since`; the last one ends 60 years after it."""
    begin = _minute(since) - _MARGIN
    before = _offset(zone, begin)
    while begin < since + _HORIZON:
        offset, end = _offset(zone, begin), begin
        while end < begin + _LONGEST:
            probe = end + _PROBE
            if _offset(zone, probe) != offset:
                end = _change(zone, end, probe)
                break
            end = probe
        yield Stretch(begin, end, offset, before)
        begin, before = end, offset


def backward(zone: ZoneInfo, until: datetime, *, since: datetime) -> Iterator[Stretch]:
    """Stretches in reverse order, from the one that holds `until` to the one that holds `since`."""
    end = _minute(until) + _MINUTE
    while end > since:
        offset = _offset(zone, end - _MINUTE)
        begin, before, probe = end - _LONGEST, offset, end - _MINUTE
        while probe > begin - _MARGIN:  # a cut must not be close behind a change
            earlier = probe - _PROBE
            if _offset(zone, earlier) != offset:
                begin = _change(zone, earlier, probe, backwards=True)
                before = _offset(zone, begin - _MINUTE)
                break
            probe = earlier
        yield Stretch(begin, end, offset, before)
        end = begin


def _change(zone: ZoneInfo, low: datetime, high: datetime, *, backwards: bool = False) -> datetime:
    """The first minute of the other offset, between two moments whose offsets differ: the first change after `low`, or the last
    one before `high`; these are the same unless the clocks are set twice within a day.
    """
    offset = _offset(zone, high if backwards else low)
    while high - low > _MINUTE:
        middle = _minute(low + (high - low) / 2)
        if (_offset(zone, middle) == offset) == backwards:
            high = middle
        else:
            low = middle
    return high


def _offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _minute(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(second=0, microsecond=0)
