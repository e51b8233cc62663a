"""The way to Redis: in order, in groups, never in anybody's way."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from waiting import eventually

from agentrun.domain.errors import BusUnavailable
from agentrun.domain.events import Event, Kind
from agentrun.store.ids import new_id
from agentrun.worker.event_writer import LiveStage

RUN = new_id()


class Stream:
    """Takes events; may be away, or held up."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.calls = 0
        self.away = False
        self.open = asyncio.Event()
        self.open.set()

    async def append(self, events: Sequence[tuple[UUID, Event]]) -> list[bool]:
        self.calls += 1
        await self.open.wait()
        if self.away:
            raise BusUnavailable("away")
        self.taken += [event.seq for _, event in events]
        return [True] * len(events)


def events(*seqs: int) -> list[Event]:
    return [Event(seq, 1, Kind.TEXT_DELTA, b"{}") for seq in seqs]


async def test_events_go_out_in_order_and_together() -> None:
    stream = Stream()
    live = LiveStage(stream)
    for seq in range(100):
        live.put(RUN, events(seq))
    await live.sent()
    assert stream.taken == list(range(100))
    assert stream.calls == 1


async def test_sent_waits_for_what_was_put_in_before_it_only() -> None:
    stream = Stream()
    live = LiveStage(stream)
    await live.sent()
    stream.open.clear()
    live.put(RUN, events(0))
    waiting = asyncio.create_task(live.sent())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.open.set()
    await waiting


async def test_a_redis_that_is_away_costs_events_and_nothing_else() -> None:
    stream = Stream()
    live = LiveStage(stream)
    stream.away = True
    live.put(RUN, events(0))
    await live.sent()
    stream.away = False
    live.put(RUN, events(1))
    await eventually(lambda: stream.taken == [1], within=3, what="later events go out")


async def test_a_redis_that_hangs_holds_back_a_bounded_number() -> None:
    stream = Stream()
    live = LiveStage(stream, most_waiting=10)
    stream.open.clear()
    live.put(RUN, events(0))
    await asyncio.sleep(0)
    live.put(RUN, events(*range(1, 100)))
    stream.open.set()
    await live.sent()
    assert stream.taken == list(range(11))


async def test_a_redis_that_hangs_holds_back_a_bounded_number_of_bytes_and_gets_them_in_bounded_groups() -> None:
    stream = Stream()
    live = LiveStage(stream, most_bytes=500, group_bytes=250)
    stream.open.clear()
    live.put(RUN, [Event(0, 1, Kind.TEXT_DELTA, b"x" * 100)])
    await asyncio.sleep(0)
    live.put(RUN, [Event(seq, 1, Kind.TEXT_DELTA, b"x" * 100) for seq in range(1, 50)])
    stream.open.set()
    await live.sent()
    assert stream.taken == list(range(6)) and stream.calls == 3
    live.put(RUN, [Event(seq, 1, Kind.TEXT_DELTA, b"x" * 100) for seq in (50, 51)])
    await live.sent()
    assert stream.taken[-2:] == [50, 51]
