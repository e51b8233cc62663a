"""What Ctrl-C and SIGTERM ask for: the end in order, and, asked for once more, the end at once."""

import asyncio
import signal


class Stopping:
    """Two events. `listen` takes the signals of this process over."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """From now on a signal sets the next event."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """The first time for the end in order, then for the end at once."""
        (self.at_once if self.asked.is_set() else self.asked).set()
