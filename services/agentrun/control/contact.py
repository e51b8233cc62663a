"""How long a reaper has been in touch with Postgres without a break, by Postgres' own clock.

While Postgres is away nobody can renew a lease, so right after an outage every lease looks expired. A reaper therefore takes nothing
over until it has itself reached Postgres, without a break, for one whole lease: time enough for every living worker to renew. The
count begins anew when the reaper starts, when Postgres starts, and when Postgres' clock jumps (a suspended machine, a corrected
clock), since leases are measured by that clock.

An answer is old when it arrives, and a request may be under way for long. So what a reaper does on the strength of its contact has an
end, by Postgres' clock too (`good_until`): Postgres refuses what reaches it later.
"""

from datetime import datetime, timedelta


class Contact:
    """The contact of one loop, which asks one question after the other: answers come in order.

    It is `steady` after one lease of successes that are at most `longest_gap` apart.
    """

    def __init__(self, *, lease: timedelta, longest_gap: timedelta) -> None:
        self._lease = lease
        self._longest_gap = longest_gap
        self._since: datetime | None = None
        self._last: datetime | None = None

    def reached(self, now: datetime, *, started: datetime) -> None:
        """Postgres answered: it says that it is `now` and that it runs since `started`."""
        if self._since is None or self._last is None or not self._last <= now <= self._last + self._longest_gap:
            self._since = now
        self._since = max(self._since, started)
        self._last = now

    def broken(self) -> None:
        """Postgres did not answer."""
        self._since = self._last = None

    @property
    def steady(self) -> bool:
        """Whether an expired lease now means a dead attempt."""
        return self._since is not None and self._last is not None and self._last - self._since >= self._lease

    @property
    def good_until(self) -> datetime | None:
        """Until when, by Postgres' clock, a steady contact counts; None if it is not steady."""
        return self._last + self._longest_gap if self.steady and self._last is not None else None
