"""An attempt's right to work, as far as its worker knows. Nothing here decides what a lost lease means."""

import asyncio
import threading
import time
from collections.abc import Callable

from agentrun.domain.errors import Fenced
from agentrun.store.transitions import AttemptRef


class Lease:
    """An attempt's right to work, as far as this worker knows: good until `deadline`, by the monotonic clock.

    Past the deadline it is in doubt, not lost: a late renewal makes it good again as long as nobody took the run.
    """

    def __init__(self, ref: AttemptRef, entry_id: str, *, deadline: float, stops_at: float) -> None:
        self.ref = ref
        self._entry_id: str | None = entry_id
        self._entry_lock = threading.Lock()
        self.deadline = deadline
        self.stops_at = stops_at
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    @property
    def entry_id(self) -> str | None:
        """The entry on the work stream that the keeper keeps; None once it was taken."""
        return self._entry_id

    def take_entry(self) -> str:
        """The entry, for the end of the attempt: it is kept no more. To be called once."""
        with self._entry_lock:
            entry, self._entry_id = self._entry_id, None
        if entry is None:
            raise ValueError(f"the entry of run {self.ref.run_id} was taken before")
        return entry

    def entry_put_back(self, entry_id: str) -> bool:
        """Called by the keeper's thread: the run has another entry now. False: too late, the former one was taken."""
        with self._entry_lock:
            if self._entry_id is None:
                return False
            self._entry_id = entry_id
            return True

    @property
    def in_doubt(self) -> bool:
        """Whether the attempt has to pause."""
        return time.monotonic() >= self.deadline

    async def sure(self) -> None:
        """Waits while the lease is in doubt. Raises Fenced when it is lost."""
        while self.in_doubt and not self.lost:
            self._news.clear()
            await self._news.wait()
        if self.lost:
            raise Fenced(f"attempt {self.ref.epoch} of run {self.ref.run_id} has been ended by somebody else")

    def renewed(self, deadline: float) -> None:
        """Called by the keeper's thread: good until `deadline`."""
        self.deadline = deadline
        self._tell(self._news.set)

    def ended(self) -> None:
        """Called by the keeper's thread: the attempt's row has been ended."""
        self.lost = True
        self._tell(self._news.set)
        self._tell(self.on_lost)

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass  # the worker's loop is closed: nobody is left to be told
