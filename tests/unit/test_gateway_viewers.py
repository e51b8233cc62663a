"""What waits for clients, in bytes: for one, for all together, and in what a run's feed remembers."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from waiting import eventually

from agentrun.domain.events import Event, Kind, encode_data
from agentrun.gateway import feed as feed_module
from agentrun.gateway import log as log_module
from agentrun.gateway.feed import Backlog, Feed, Viewer
from agentrun.gateway.frames import Frame, frame
from agentrun.gateway.log import EventLog


def viewer(backlog: Backlog, *, most_bytes: int = 1000, live: bool = True) -> Viewer:
    made = Viewer(cursor=-1, most_bytes=most_bytes, backlog=backlog, abort=lambda: None)
    made.live = live
    backlog.clients += 1
    return made


def of(seq: int, size: int, *, terminal: bool = False) -> Frame:
    return Frame(seq, b"x" * size, terminal)


def event(seq: int, size: int = 10) -> Event:
    return Event(seq, 1, Kind.TEXT_DELTA, encode_data({"item": 0, "part": 0, "text": "x" * size}))


def test_all_clients_together_have_a_bound_and_who_hoards_is_cut() -> None:
    backlog = Backlog(most_bytes=3000)
    hoarder, *others = (viewer(backlog, most_bytes=10_000) for _ in range(4))
    for client in others:
        client.push(of(0, 300))
    for seq in range(3):
        hoarder.push(of(seq, 600))
    allowed = [hoarder.cut]  # alone it would be allowed more, and all together have less than the bound
    for client in others:
        client.push(of(1, 200))
    assert backlog.bytes > 3000
    assert [*allowed, *(client.cut for client in others)] == [False] * 4
    hoarder.push(of(3, 1))
    assert hoarder.cut
    assert backlog.bytes < 3000


def test_what_is_taken_or_left_behind_is_counted_off() -> None:
    backlog = Backlog(most_bytes=10_000)
    first, second, third = (viewer(backlog) for _ in range(3))
    for client in (first, second, third):
        client.push(of(0, 500))
    assert backlog.bytes >= 1500
    while first.take():
        pass
    second.stop()
    third.push(of(1, 600))
    assert third.cut
    assert backlog.bytes == 0


def test_one_write_is_bounded_so_that_the_rest_stays_counted() -> None:
    backlog = Backlog(most_bytes=10_000_000)
    client = viewer(backlog, most_bytes=10_000_000)
    for seq in range(100):
        client.push(of(seq, 10_000))
    client.push(of(100, 10, terminal=True))
    pieces = []
    while piece := client.take():
        pieces.append(piece)
        assert client.wake.is_set() == (client.waiting > 0)
    assert max(map(len, pieces)) <= feed_module.WRITE_BYTES + 10_000
    assert sum(map(len, pieces)) >= 1_000_010
    assert not client.wake.is_set()


class Stored(EventLog):
    """A log from memory; says how much it was asked for at once."""

    def __init__(self, events: Sequence[Event], *, streamed: Sequence[Event] = ()) -> None:
        self.largest = 0
        self._events = events

        async def read_stream(_run: Any, after: int, limit: int) -> Sequence[Event]:
            found = [one for one in streamed if one.seq > after][:limit]
            self.largest = max(self.largest, sum(len(one.data) for one in found))
            return found

        pool: Any = None
        super().__init__(pool, read_stream)

    async def _stored(self, run_id: UUID, *, after: int) -> list[Event]:
        return [one for one in self._events if one.seq > after][:2]


async def test_a_page_from_redis_is_counted_in_bytes() -> None:
    large = [event(seq, 100_000) for seq in range(300)]
    log = Stored([], streamed=large)
    found: list[Event] = []
    while page := await log.replay(uuid4(), after=len(found) - 1):
        assert sum(len(one.data) for one in page) <= log_module.PAGE_BYTES + 20 * 100_100
        found += page
    assert [one.seq for one in found] == list(range(300))
    assert log.largest <= 20 * 100_100


async def test_what_a_feed_remembers_is_counted_in_bytes() -> None:
    events = [event(seq, 100_000) for seq in range(60)]
    feed, backlog = Feed(uuid4(), Stored(events)), Backlog(most_bytes=100_000_000)
    early, late = (viewer(backlog, most_bytes=100_000_000) for _ in range(2))
    feed.attach(early)
    for one in events[:30]:
        feed.receive(one)
    assert feed.remembered <= feed_module.RECENT_BYTES + 200_000
    for one in events[31:60]:  # 30 is missing: what comes after it waits
        feed.receive(one)
        assert feed.remembered <= feed_module.RECENT_BYTES + feed_module.EARLY_BYTES + 400_000

    async def everything() -> bool:
        return early.cursor == 59

    await eventually(everything, within=5, what="the hole is filled")
    feed.attach(late)

    async def late_too() -> bool:
        return late.cursor == 59

    await eventually(late_too, within=5, what="who stands further back gets all")
    assert late.waiting == early.waiting
    feed.close()
    await asyncio.sleep(0)


def test_a_frame_counts_with_all_its_bytes() -> None:
    backlog = Backlog(most_bytes=1000)
    client = viewer(backlog)
    made = frame(event(0))
    client.push(made)
    assert backlog.bytes == client.waiting >= len(made.data)
