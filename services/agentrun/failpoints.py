"""Named crash points. Off in production: `hit` returns at once unless AGENTRUN_FAILPOINTS names the point.

    AGENTRUN_FAILPOINTS="worker.claimed=kill;worker.finish.sent=kill@2;gateway.submit.committed=sleep:0.5;reaper.taken=raise"

Actions: kill (SIGKILL to this process), stop (SIGSTOP to this process), raise (FailpointError), sleep:SECONDS (only in `hit`).
`@N` acts at the Nth time the point is reached (default 1) and at no other; `@*` acts every time.
"""

import asyncio
import os
import signal
from dataclasses import dataclass

VARIABLE = "AGENTRUN_FAILPOINTS"


class FailpointError(RuntimeError):
    """Raised by a point whose action is `raise`."""


@dataclass
class _Point:
    action: str
    seconds: float
    turn: int | None
    reached: int = 0


def _parse(text: str) -> dict[str, _Point]:
    points = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = entry.partition("=")
        action, _, turn = rest.partition("@")
        action, _, seconds = action.partition(":")
        if action not in ("kill", "stop", "raise", "sleep"):
            raise ValueError(f"{VARIABLE}: {entry!r}: the action must be kill, stop, raise or sleep:SECONDS")
        points[name] = _Point(action, float(seconds or 0), None if turn == "*" else int(turn or 1))
    return points


_points = _parse(os.environ.get(VARIABLE, ""))


def configure(text: str) -> None:
    """Replaces all points by those of `text`, for a process whose environment was set after its start."""
    _points.clear()
    _points.update(_parse(text))


def _due(name: str) -> _Point | None:
    point = _points.get(name)
    if point is None:
        return None
    point.reached += 1
    return point if point.turn is None or point.turn == point.reached else None


def _act(point: _Point, name: str) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "raise":
        raise FailpointError(f"failpoint {name}")


async def hit(name: str) -> None:
    """Marks a place where tests may crash, stop or delay this process."""
    if not _points:
        return
    point = _due(name)
    if point is None:
        return
    if point.action == "sleep":
        await asyncio.sleep(point.seconds)
    else:
        _act(point, name)
