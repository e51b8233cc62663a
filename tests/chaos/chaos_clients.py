"""Clients under chaos: they know only HTTP, try again until they have an answer, and write down what they saw."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import httpx2
from chaos_history import Accepted, Reader, Seen
from chaos_plan import Submission
from chaos_system import ChaosSystem
from sse_client import EventStream, StreamCutError, StreamRefusedError, open_stream

from agentrun.domain.reducer import Transcript

PATIENCE_SECONDS, CALM_SECONDS = 4.0, 20.0
"""Without an answer, or a word of a stream, for so long, a client asks anew: its gateway may be stopped. The second once all is calm."""
PAUSE_SECONDS = 0.2
REFUSALS = (429, 503)
"""Answers after which a client tries again."""
MOST_UNANSWERED = 100
"""So many messages without an answer are a crowd: on a machine that is too slow for the plan there would be more and more, until the
test itself, with its proxies, has no time to carry any of them."""
MOST_REFUSALS = 3
"""Others that a reader takes before it gives up."""


@dataclass
class Clients:
    """All of them. `seen` is what they saw."""

    system: ChaosSystem
    http: httpx2.AsyncClient
    seen: Seen = field(default_factory=Seen)
    calm: bool = False
    """The faults are over: no client breaks off by itself any more."""
    _rng: random.Random = field(default_factory=random.Random)
    _stored: set[str] = field(default_factory=set)
    """Keys that have been answered 202."""
    _unanswered: int = 0
    """Messages that are being sent."""

    @property
    def crowded(self) -> bool:
        """Whether the plan has to wait until some have their answers."""
        return self._unanswered >= MOST_UNANSWERED

    async def play(self, one: Submission) -> None:
        """One message with everything that its client does about it, until all of it is over."""
        self.seen.sent[one.key] = one.text
        self._unanswered += 1
        answers = await asyncio.gather(*(self._submit(one) for _ in range(one.copies)))
        self._unanswered -= 1
        others = []
        if one.key in self.seen.refused:
            return
        if one.again is not None:
            others.append(self._later(one.again, self._submit(one)))
        if one.cancel is not None:
            others.append(self._later(one.cancel, self._cancel(answers[0])))
        others += [self._follow(answers[0], random.Random(seed)) for seed in one.followers]
        await asyncio.gather(*others)

    async def _later(self, seconds: float, act: "asyncio.Future[object] | object") -> None:
        await asyncio.sleep(seconds)
        await act  # type: ignore[misc]

    @property
    def _patience(self) -> float:
        return CALM_SECONDS if self.calm else PATIENCE_SECONDS

    def _gateway(self) -> str:
        return self._rng.choice(self.system.gateways).base_url

    async def _submit(self, one: Submission) -> str:
        """The id of its run; none if it has given up."""
        headers = self.system.headers | {"Idempotency-Key": one.key}
        unanswered = False
        while True:
            url = f"{self._gateway()}/v1/sessions/{one.session}/messages"
            stored = one.key in self._stored
            response = await self._post(url, headers, {"input": one.text})
            unanswered |= response is None
            if response is not None and response.status_code == 429:
                self._refused(one, response, stored)
                if one.gives_up and not unanswered:
                    self.seen.refused.add(one.key)
                    return ""
                await asyncio.sleep(min(int(response.headers["Retry-After"]), self._patience))
            if response is not None and response.status_code == 202:
                replayed = response.headers.get("Idempotency-Replayed") == "true"
                self._stored.add(one.key)
                self.seen.accepted.append(Accepted(one.key, response.json()["run_id"], replayed))
                return self.seen.accepted[-1].run_id
            if response is not None and response.status_code not in REFUSALS:
                self.seen.wrong.append(f"{one.key}: {response.status_code} {response.text[:300]}")
                await asyncio.sleep(self._patience)
            await asyncio.sleep(PAUSE_SECONDS)

    def _refused(self, one: Submission, response: httpx2.Response, stored: bool) -> None:
        self.seen.counts["429"] += 1
        if stored or response.json()["code"] != "budget_exhausted" or int(response.headers["Retry-After"]) < 1:
            self.seen.wrong.append(f"{one.key}: refused {'after it was accepted' if stored else response.text[:300]}")

    async def _cancel(self, run_id: str) -> None:
        while True:
            response = await self._post(f"{self._gateway()}/v1/runs/{run_id}/cancel", self.system.headers, None)
            if response is not None and response.status_code in (202, 409):
                self.seen.counts["cancelled in time" if response.status_code == 202 else "cancelled too late"] += 1
                return
            if response is not None and response.status_code not in REFUSALS:
                self.seen.wrong.append(f"cancelling {run_id}: {response.status_code} {response.text[:300]}")
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _post(self, url: str, headers: dict[str, str], body: object) -> httpx2.Response | None:
        """None: no answer came, and nobody knows whether the request was done."""
        try:
            response = await self.http.post(url, json=body, headers=headers, timeout=self._patience)
        except httpx2.HTTPError:
            self.seen.counts["requests without an answer"] += 1
            return None
        if response.status_code == 503:
            self.seen.counts["503"] += 1
        return response

    async def _follow(self, run_id: str, rng: random.Random) -> None:
        """Follows the run to its end, and the one that took its place. Breaks off now and then."""
        while True:
            reader, transcript = Reader(run_id), Transcript()
            self.seen.readers.append(reader)
            while not transcript.ended and reader.refusals < MOST_REFUSALS:
                most = None if self.calm else rng.choice([5, 20, 60, None])
                with contextlib.suppress(OSError, StreamCutError, TimeoutError):
                    await self._connect(reader, transcript, most)
                reader.text, reader.restarts = transcript.text, transcript.restarts
                await asyncio.sleep(PAUSE_SECONDS * rng.random())
            if transcript.end is None:
                return
            reader.end = transcript.end.value
            if reader.end != "superseded":
                return
            run_id = str((transcript.end_data or {})["by"])

    async def _connect(self, reader: Reader, transcript: Transcript, most: int | None) -> None:
        cursor = str(transcript.cursor) if transcript.cursor >= 0 else None
        url = f"{self._gateway()}/v1/runs/{reader.run_id}/events"
        try:
            async with open_stream(url, headers=self.system.headers, last_event_id=cursor, within=self._patience) as stream:
                reader.connections += 1
                if stream.status == 204:
                    reader.refusals += 1
                    self.seen.wrong.append(f"{reader.run_id}: 204 at {cursor}, before the end was seen")
                await self._read(stream, reader, transcript, most)
        except StreamRefusedError as refused:
            if refused.status not in REFUSALS:
                reader.refusals += 1
                self.seen.wrong.append(f"{reader.run_id}: {refused.status} at {cursor}: {refused.body[:200]!r}")
            await asyncio.sleep(PAUSE_SECONDS)

    async def _read(self, stream: EventStream, reader: Reader, transcript: Transcript, most: int | None) -> None:
        async with asyncio.timeout(self._patience) as patience:
            async for frame in stream:
                patience.reschedule(asyncio.get_running_loop().time() + self._patience)
                event = frame.json()
                if event.get("seq") is not None:
                    reader.seqs.append(event["seq"])
                transcript.feed(event.get("seq"), event["kind"], event["data"])
                if most is not None and (most := most - 1) <= 0:
                    return
