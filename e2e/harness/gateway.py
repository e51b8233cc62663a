"""A client of one AgentRun's gateway, from outside the cluster, which survives the pods behind it."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
from sse_client import EventStream, open_stream

from agentrun.domain.reducer import Transcript
from harness.commands import CommandError
from harness.kubectl import Kubectl

GATEWAY_PORT = 80


class Gateway:
    """Each call goes through a port-forward that is opened anew when its pod has gone."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str, api_key: str) -> None:
        self._kubectl = kubectl
        self._namespace = namespace
        self._target = f"service/{name}-gateway"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._forward = contextlib.ExitStack()
        self._url = ""

    def open(self) -> None:
        """Opens the port-forward now: before several threads would, or before a clock starts."""
        self._base()

    def close(self) -> None:
        """Ends the port-forward."""
        self._forward.close()
        self._url = ""

    def submit(self, text: str, *, session: str | None = None, key: str | None = None) -> dict[str, Any]:
        """The answer to a message; sent again, under the same key, until it is accepted."""
        session, key = session or uuid.uuid4().hex, key or uuid.uuid4().hex
        answer = self.request("POST", f"/v1/sessions/{session}/messages", {"input": text}, {"Idempotency-Key": key})
        assert answer.status_code == 202, f"{answer.status_code}: {answer.text}"
        return dict(answer.json())

    def run(self, run_id: str) -> dict[str, Any]:
        """A run as the gateway tells it."""
        answer = self.request("GET", f"/v1/runs/{run_id}")
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
        return dict(answer.json())

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, tries: int = 5
    ) -> httpx2.Response:
        """Any request. One that got no answer is sent again, through a new port-forward."""
        for left in reversed(range(tries)):
            try:
                return httpx2.request(
                    method, self._base() + path, json=body, headers={**self._headers, **(headers or {})}, timeout=15
                )
            except (httpx2.TransportError, CommandError):
                self.close()
                if not left:
                    raise
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def stream(self, run_id: str, *, after: int | None = None) -> AsyncIterator[EventStream]:
        """The events of a run, from the start or after a number."""
        url = f"{self._base()}/v1/runs/{run_id}/events"
        async with open_stream(url, headers=self._headers, last_event_id=None if after is None else str(after)) as stream:
            yield stream

    async def events(self, run_id: str, *, within: float = 60.0) -> list[dict[str, Any]]:
        """All events of a run until its end."""
        async with self.stream(run_id) as stream:
            return [frame.json() for frame in await stream.rest(within=within)]

    def _base(self) -> str:
        if not self._url:
            port = self._forward.enter_context(self._kubectl.forward(self._target, GATEWAY_PORT, self._namespace))
            self._url = f"http://127.0.0.1:{port}"
        return self._url


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """What a reader of these events sees at the end."""
    transcript = Transcript()
    for event in events:
        transcript.feed(event.get("seq"), event["kind"], event["data"])
    return transcript.text


def shown(events: Sequence[dict[str, Any]]) -> str:
    """For messages of asserts."""
    return "\n".join(json.dumps(event)[:160] for event in events[-20:])
