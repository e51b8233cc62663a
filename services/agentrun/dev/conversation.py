"""What a person sees of `agentrun dev`: progress lines, an answer as it streams, what it cost, and a prompt on a terminal."""

import asyncio
import sys
import time
from typing import Any, TextIO

from agentrun.dev.client import Client
from agentrun.domain.reducer import Transcript
from agentrun.store.ids import new_id


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


async def ask(client: Client, screen: Screen, *, session: str, text: str, url: str) -> bool:
    """Submits a message and prints the answer as it streams, then tokens, cost, run id and URLs. Whether the run succeeded."""
    screen.line(f"\nyou    {text}")
    run_id = await client.submit(session, text, key=str(new_id()))
    screen.write("agent  ")
    transcript = await _print_answer(client, screen, run_id)
    run = await client.run(run_id)
    screen.line()
    if transcript.end != "completed":
        error = (transcript.end_data or {}).get("error") or {}
        screen.line(f"       {transcript.end}: {error.get('type', '')} {error.get('message', '')}".rstrip())
    screen.line(f"\n{_summary(run, transcript)}")
    screen.line(f"run     {run_id}")
    screen.line(f"events  {url}{run['events_url']}")
    screen.line(f"state   {url}/v1/runs/{run_id}")
    return transcript.end == "completed"


async def _print_answer(client: Client, screen: Screen, run_id: str) -> Transcript:
    transcript, shown = Transcript(), ""
    async for event in client.follow(run_id):
        transcript.feed(event.seq, event.kind, event.data)
        if event.kind == "restart":
            screen.write("\n       [a worker was lost; going on from the last checkpoint]\n       ")
            shown = ""
        elif event.kind == "tool_arguments_done":
            item = transcript.items[event.data["item"]]
            screen.write(f"[{item.name} {item.text}] ")
        text = transcript.text
        screen.write(text[len(shown) :] if text.startswith(shown) else text)
        shown = text
    return transcript


def _summary(run: dict[str, Any], transcript: Transcript) -> str:
    usage = run["usage"]
    cost = "unknown (no price for this model)" if usage["cost_usd"] is None else f"${usage['cost_usd']}"
    if "demo" in usage["price_ids"]:
        cost += " (a pretend price: this is a demo model)"
    tokens = f"tokens  {usage['input_tokens']} in, {usage['output_tokens']} out, {usage['calls']} model call(s)"
    return f"{tokens}\ncost    {cost}" + (f"\nattempts {len(run['attempts'])}" if transcript.restarts else "")


async def finish_earlier(client: Client, screen: Screen, run_ids: list[str]) -> None:
    """Follows runs that an earlier start left unfinished, to their ends."""
    for run_id in run_ids:
        transcript = Transcript()
        async for event in client.follow(run_id):
            transcript.feed(event.seq, event.kind, event.data)
        screen.step("recovered", f"run {run_id} of an earlier start: {transcript.end}, {len(transcript.text)} characters")


async def prompt(client: Client, screen: Screen, *, session: str, url: str) -> None:
    """Asks for messages until the end of input."""
    screen.line("\nType a message, or Ctrl-D to stop.")
    while True:
        text = await _read_line("\n> ")
        if text is None:
            return
        if text.strip():
            await ask(client, screen, session=session, text=text.strip(), url=url)


async def _read_line(label: str) -> str | None:
    """A line from the terminal, None at its end. Reads in a daemon thread, which does not keep the process from ending."""
    import threading

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
