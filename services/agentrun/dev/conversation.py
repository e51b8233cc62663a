"""What a person sees of `agentrun dev`: progress lines, an answer as it streams, what it cost, and a prompt on a terminal."""

import asyncio
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, TextIO

from agentrun.dev.client import Client, RequestRefused
from agentrun.domain.reducer import Transcript
from agentrun.domain.states import FINAL, Outcome
from agentrun.store.ids import new_id

_ENDED: dict[str, str] = {
    Outcome.RETRYING: "failed in a way that may pass",
    Outcome.LOST: "was lost with its worker",
    Outcome.HANDED_BACK: "was handed back by a worker that stopped",
    Outcome.INTERRUPTED: "was ended because the run was",
}


class Screen:
    """Writes lines with the time since the start."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._start = time.monotonic()

    def step(self, what: str, detail: str) -> None:
        """One progress line."""
        print(f"{time.monotonic() - self._start:6.1f}s  {what:<10} {detail}", file=self._out, flush=True)

    def write(self, text: str) -> None:
        """Text as it comes."""
        self._out.write(text)
        self._out.flush()

    def line(self, text: str = "") -> None:
        """A line of its own."""
        print(text, file=self._out, flush=True)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session with the gateway at `url`. `server` is where its model is asked, if that is known."""

    client: Client
    screen: Screen
    session: str
    url: str
    server: str | None = None

    async def ask(self, text: str) -> bool:
        """Submits a message and prints the answer as it streams, then tokens, cost, run id and URLs. Whether the run succeeded."""
        screen = self.screen
        screen.line(f"\nyou    {text}")
        run_id = await self.client.submit(self.session, text, key=str(new_id()))
        screen.write("agent  ")
        transcript = await self._print_answer(run_id)
        while transcript.end == "superseded":  # somebody else wrote to the session: one run answers both
            run_id = str((transcript.end_data or {})["by"])
            screen.write(f"\n       [another message came; run {run_id} answers both]\n       ")
            transcript = await self._print_answer(run_id)
        run = await self.client.run(run_id)
        screen.line()
        if transcript.end != "completed":
            screen.line(f"       {transcript.end}: {self._reason((transcript.end_data or {}).get('error') or {})}".rstrip(": "))
        screen.line()
        for name, value in [
            *summary(run, transcript),
            ("run", run_id),
            ("events", f"{self.url}{run['events_url']}"),
            ("state", f"{self.url}/v1/runs/{run_id}"),
        ]:
            screen.line(f"{name:<9}{value}")
        return transcript.end == "completed"

    async def prompt(self) -> None:
        """Asks for messages until the end of input."""
        self.screen.line("\nType a message, or Ctrl-D to stop.")
        while (text := await _read_line("\n> ")) is not None:
            if text.strip():
                await self.ask(text.strip())

    async def _print_answer(self, run_id: str) -> Transcript:
        transcript, shown = Transcript(), ""
        async for event in self.client.follow(run_id):
            transcript.feed(event.seq, event.kind, event.data)
            if event.kind == "restart":
                self.screen.write(f"\n       [{await self._why_again(run_id, transcript.restarts)}]\n       ")
                shown = ""
            elif event.kind == "tool_arguments_done":
                item = transcript.items[event.data["item"]]
                self.screen.write(f"[{item.name} {item.text}] ")
            text = transcript.text
            self.screen.write(text[len(shown) :] if text.startswith(shown) else text)
            shown = text
        return transcript

    async def _why_again(self, run_id: str, number: int) -> str:
        """What became of the run's n-th attempt, and whether there will be another."""
        try:
            run = await self.client.run(run_id)
        except RequestRefused:
            return f"attempt {number} has ended"
        outcome = next((one["outcome"] for one in run["attempts"] if one["attempt"] == number), "")
        more = "" if run["status"] in FINAL else "; going on from the last checkpoint"
        return f"attempt {number} {_ENDED.get(outcome, 'has ended')}{more}"

    def _reason(self, error: dict[str, Any]) -> str:
        text = f"{error.get('type', '')} {error.get('message', '')}".strip()
        unreachable = error.get("type") in ("provider_unavailable", "timeout")
        return f"{text} (asked: {self.server})" if unreachable and self.server else text


def summary(run: dict[str, Any], transcript: Transcript) -> list[tuple[str, str]]:
    """What a run used, as names and values."""
    usage = run["usage"]
    calls = f"{usage['calls']} model call{'' if usage['calls'] == 1 else 's'}"
    if usage["calls"] == 0:
        cost = "nothing: no model was asked"
    elif usage["cost_usd"] is None:
        cost = "unknown (no price for this model)"
    else:
        cost = f"${usage['cost_usd']}"
    if "demo" in usage["price_ids"]:
        cost += " (a pretend price: this is a demo model)"
    rows = [("tokens", f"{usage['input_tokens']} in, {usage['output_tokens']} out, {calls}"), ("cost", cost)]
    return [*rows, ("attempts", str(len(run["attempts"])))] if transcript.restarts else rows


async def finish_earlier(client: Client, screen: Screen, run_ids: list[str]) -> None:
    """Follows runs that an earlier start left unfinished, to their ends."""
    for run_id in run_ids:
        transcript = Transcript()
        async for event in client.follow(run_id):
            transcript.feed(event.seq, event.kind, event.data)
        screen.step("recovered", f"run {run_id} of an earlier start: {transcript.end}, {len(transcript.text)} characters")


async def _read_line(label: str) -> str | None:
    """A line from the terminal, None at its end. Reads in a daemon thread, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def deliver(text: str | None) -> None:
        if not answer.done():
            answer.set_result(text)

    def read() -> None:
        try:
            text: str | None = input(label)
        except (EOFError, OSError, ValueError):
            text = None
        try:
            loop.call_soon_threadsafe(deliver, text)
        except RuntimeError:
            pass  # the loop has ended meanwhile

    threading.Thread(target=read, name="prompt", daemon=True).start()
    return await answer
