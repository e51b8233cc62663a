"""The clock of a plan waits for the system and for the machine, and never runs faster than time."""

import asyncio
import time

from chaos_clock import LONGEST_TURN_SECONDS, Clock


async def test_it_stands_while_the_system_does_not_stand() -> None:
    stands = False
    began = time.monotonic()
    clock = Clock(lambda: stands)
    await asyncio.sleep(0.05)
    clock.turn()
    assert clock.now == 0
    stands = True
    running = asyncio.create_task(clock.run())
    await clock.until(0.1)
    running.cancel()
    assert 0.1 <= clock.now <= time.monotonic() - began


def test_a_machine_that_had_no_time_gets_it_back() -> None:
    clock = Clock(lambda: True)
    time.sleep(2 * LONGEST_TURN_SECONDS)
    clock.turn()
    assert clock.now == LONGEST_TURN_SECONDS
