"""A small client of the gateway: submit a message, follow its run to the end over any number of cuts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from agentrun.domain.errors import AgentrunError
from agentrun.domain.events import TERMINAL

PAUSE_SECONDS = 0.3


class RequestRefused(AgentrunError):
    """The gateway refused a request; the message is its problem's detail."""


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """One event as a client sees it; `seq` is None for a gap."""

    seq: int | None
    kind: str
    data: dict[str, Any]


class Client:
    """Talks to one gateway with one key."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=httpx2.Timeout(30.0, read=60.0), trust_env=False
        )

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def submit(self, session: str, text: str, *, key: str) -> str:
        """Submits a message under an idempotency key, so that it may be sent again; returns the run's id. Raises RequestRefused."""
        body = await self._ask("POST", f"/v1/sessions/{session}/messages", json={"input": text}, headers={"Idempotency-Key": key})
        return str(body["run_id"])

    async def run(self, run_id: str) -> dict[str, Any]:
        """The run's state. Raises RequestRefused."""
        return await self._ask("GET", f"/v1/runs/{run_id}")

    async def unfinished(self) -> list[str]:
        """The ids of runs that wait or run, oldest first. Raises RequestRefused."""
        found: list[str] = []
        for status in ("running", "pending"):
            page = await self._ask("GET", f"/v1/runs?status={status}&limit=200")
            found += [run["run_id"] for run in page["runs"]]
        return sorted(found)

    async def follow(self, run_id: str) -> AsyncIterator[SeenEvent]:
        """Every event of the run exactly once, to its end; a cut stream is taken up again."""
        cursor = -1
        while True:
            try:
                async for event in self._events(run_id, cursor):
                    if event.seq is not None:
                        cursor = event.seq
                    yield event
                    if event.kind in TERMINAL:
                        return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(PAUSE_SECONDS)

    async def _events(self, run_id: str, cursor: int) -> AsyncIterator[SeenEvent]:
        headers = {"Last-Event-ID": str(cursor)} if cursor >= 0 else {}
        async with self._http.stream("GET", f"/v1/runs/{run_id}/events", headers=headers) as response:
            if response.status_code >= 400:
                await response.aread()
                _refuse(response)
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    event = msgspec.json.decode(line[6:].encode())
                    yield SeenEvent(event.get("seq"), event["kind"], event["data"])

    async def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Tries again while the gateway says so (503) or cannot be reached."""
        while True:
            try:
                response = await self._http.request(method, path, **options)
            except httpx2.TransportError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if response.status_code == 503:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if response.status_code >= 400:
                _refuse(response)
            body: dict[str, Any] = response.json()
            return body


def _refuse(response: httpx2.Response) -> None:
    try:
        problem = response.json()
        message = f"{problem.get('title')}: {problem.get('detail')}"
    except ValueError:
        message = response.text[:200]
    raise RequestRefused(f"the gateway answered {response.status_code}: {message}")
