"""A small, faithful OpenAI-compatible chat-completions server, scripted by the user's message.

    with FakeProvider() as provider: ...            in a thread: `provider.url` is the base URL
    python tests/support/fake_provider.py --port N  as a process: prints its base URL, ends on SIGTERM

Without a script it answers "You said: …" word by word. Directives in the last user message, each `[[name key=value …]]`:

    [[tool NAME {json}]]            call the tool; several directives are steps one after another, then it answers "done: results"
    [[tools NAME {json} | NAME {json}]]             several calls in one answer
    [[say text…]]                   answer exactly this
    [[deltas n=5000]]               n small pieces: "0 1 2 …"
    [[size n=200000]]               that many characters in pieces of `piece` (1000); piece=0: one piece
    [[languages]]                   several scripts and emoji; the bytes of characters are cut apart on the wire
    [[broken]]                      NUL, a pair of surrogates split over two pieces, lone ones, the six characters \\u0000
    [[reasoning text…]]             reasoning before the answer
    [[slow ms=50]]                  a pause before each piece
    [[fail status=429 times=1 after=2]]             refuse the first `times` calls with this text; `after` is Retry-After
    [[cut after=3 times=1]]         close the connection after that many pieces
    [[hang after=3 times=1]]        stop talking after that many pieces (0: before the head of the response)
    [[badjson after=3 times=1]]     a frame that is not JSON
    [[nousage]]                     no usage at the end

Usage: prompt tokens = characters of all messages / 4, half of them cached; completion tokens = characters answered / 4, a quarter of
them reasoning. GET /counts: calls, finished, cut by the client, tokens. GET /requests: every body. POST /reset. POST /marks/NAME
counts NAME: what a tool does is counted where no crash of its worker can lose it.
"""

import argparse
import asyncio
import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

LANGUAGES = "Grüße, señor! Привет, мир. 你好，世界。 こんにちは 안녕하세요 שלום مرحبا नमस्ते 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 𝒳 end"
BROKEN_PIECES = ["nul \x00 here, pair ", "\ud83d", "\ude00 joined, high \ud800", " low \udc00, ", "literal \\u0000 stays 🎉"]
BROKEN_TEXT = "nul \ufffd here, pair 😀 joined, high \ufffd low \ufffd, literal \\u0000 stays 🎉"
"""What BROKEN_PIECES are once they have been mended."""

_DIRECTIVE = re.compile(r"\[\[(\w+)\s*(.*?)\]\]", re.DOTALL)


@dataclass
class Directive:
    """One `[[name …]]`."""

    name: str
    rest: str

    def number(self, key: str, default: int) -> int:
        found = re.search(rf"\b{key}=(\d+)", self.rest)
        return int(found[1]) if found else default


@dataclass
class Plan:
    """What to answer."""

    pieces: list[str] = field(default_factory=list)
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # (id, name, arguments)


@dataclass
class Answer:
    """One call that was not refused: what was asked, what was to be answered at which price, and whether all of it went out."""

    body: dict[str, Any]
    plan: Plan
    usage: dict[str, Any]
    finished: bool = False


class FakeProvider:
    """The server. `counts`, `requests` and `answers` are its memory; `url` is its address."""

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1") -> None:
        self.port = port
        self._host = host
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """The base URL for OPENAI_BASE_URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listens in the running loop."""
        self._server = await asyncio.start_server(self._connection, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes every connection and stops listening."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        def serve() -> None:
            assert self._loop is not None
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self.start())
            ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self.stop())
            self._loop.close()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert ready.wait(10), "the fake provider did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def reset(self) -> None:
        """Forgets requests, counts and which failures have happened."""
        self.requests.clear()
        self.answers.clear()
        self.counts.clear()
        self._tries.clear()

    # HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = (await reader.readline()).decode()
        if not line.strip():
            return False
        method, path, _ = line.split()
        length = 0
        while header := (await reader.readline()).decode().strip():
            name, _, value = header.partition(":")
            if name.lower() == "content-length":
                length = int(value)
        body = await reader.readexactly(length)
        path = path.partition("?")[0]
        if method == "GET" and path == "/counts":
            await _reply(writer, 200, dict(self.counts))
        elif method == "GET" and path == "/requests":
            await _reply(writer, 200, self.requests)
        elif method == "POST" and path.startswith("/marks/"):
            self.counts[path.removeprefix("/marks/")] += 1
            await _reply(writer, 200, {})
        elif method == "POST" and path == "/reset":
            self.reset()
            await _reply(writer, 200, {})
        elif method == "POST" and path.endswith("/chat/completions"):
            return await self._completion(json.loads(body), reader, writer)
        else:
            await _reply(writer, *await self.other(method, path, body))
        return True

    async def other(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Status and JSON of a request that is no part of the provider: for subclasses."""
        return 404, _problem("no such route", "not_found")

    async def _completion(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.counts["calls"] += 1
        self.requests.append(body)
        directives = _directives(body["messages"])
        if (fail := self._due(directives, "fail")) is not None:
            status, after = fail.number("status", 500), fail.number("after", -1)
            headers = {"Retry-After": str(after)} if after >= 0 else {}
            self.counts[f"status_{status}"] += 1
            await _reply(writer, status, _problem(f"scripted {status}", f"scripted_{status}"), headers)
            return True
        plan = _plan(body["messages"], directives)
        answer = Answer(body, plan, _usage(body["messages"], plan))
        self.answers.append(answer)
        if not body.get("stream"):
            await _reply(writer, 200, _whole(body, plan, answer.usage))
            self._finished(answer)
            return True
        gone = asyncio.ensure_future(reader.read(1))  # a client sends nothing more until it leaves or asks again
        talk = asyncio.ensure_future(self._stream(answer, directives, writer))
        try:
            await asyncio.wait({gone, talk}, return_when=asyncio.FIRST_COMPLETED)
            if not talk.done() or isinstance(talk.exception(), ConnectionError):  # seen by the read, or first by a write
                if not answer.finished:
                    self.counts["cut_by_client"] += 1
                return False
            talk.result()
            return False  # one stream per connection, as `connection: close` said
        finally:
            for task in (gone, talk):
                task.cancel()
            await asyncio.gather(gone, talk, return_exceptions=True)

    async def _stream(self, answer: Answer, directives: list[Directive], writer: asyncio.StreamWriter) -> None:
        body, plan = answer.body, answer.plan
        trouble = {name: self._due(directives, name) for name in ("hang", "cut", "badjson")}
        limits = {name: found.number("after", 3) for name, found in trouble.items() if found is not None}
        if limits.get("hang") == 0:
            await asyncio.Event().wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        pause = next((found.number("ms", 50) for found in directives if found.name == "slow"), 0)
        cut_bytes = any(found.name == "languages" for found in directives)
        head = {"id": f"chatcmpl-{self.counts['calls']}", "object": "chat.completion.chunk", "created": 1700000000}
        head["model"] = body["model"]
        count = 0
        async for delta, finish in _deltas(plan):
            for name, limit in limits.items():
                if count == limit:
                    await self._trouble(name, writer)
                    return
            count += 1
            if pause:
                await asyncio.sleep(pause / 1000)
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await _frame(writer, {**head, "choices": [choice]}, cut_bytes=cut_bytes)
        asked = (body.get("stream_options") or {}).get("include_usage")
        if asked and not any(found.name == "nousage" for found in directives):
            await _frame(writer, {**head, "choices": [], "usage": answer.usage})
        _chunk(writer, b"data: [DONE]\n\n")
        self._finished(answer)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _trouble(self, name: str, writer: asyncio.StreamWriter) -> None:
        await writer.drain()
        if name == "hang":
            await asyncio.Event().wait()
        if name == "badjson":
            _chunk(writer, b'data: {"id": "x", "choices": [{"index": 0, "del\n\n')
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        self.counts[name] += 1

    def _due(self, directives: list[Directive], name: str) -> Directive | None:
        """The directive, if it has not yet happened as often as it should."""
        for found in directives:
            if found.name == name:
                key = f"{found.name} {found.rest}"
                self._tries[key] += 1
                return found if self._tries[key] <= found.number("times", 1) else None
        return None

    def _finished(self, answer: Answer) -> None:
        answer.finished, usage = True, answer.usage
        self.counts["finished"] += 1
        self.counts["prompt_tokens"] += usage["prompt_tokens"]
        self.counts["completion_tokens"] += usage["completion_tokens"]
        self.counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        self.counts["reasoning_tokens"] += usage["completion_tokens_details"]["reasoning_tokens"]


# What to say


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def _directives(messages: list[dict[str, Any]]) -> list[Directive]:
    """Those of the user messages since the last answer in words."""
    turn = [message for message in messages[_turn_start(messages) :] if message["role"] == "user"]
    return [Directive(name, rest) for message in turn for name, rest in _DIRECTIVE.findall(_text(message))]


def _turn_start(messages: list[dict[str, Any]]) -> int:
    """Behind the last answer in words."""
    answers = (n for n, it in enumerate(messages, 1) if it["role"] == "assistant" and not it.get("tool_calls"))
    return max(answers, default=0)


def _plan(messages: list[dict[str, Any]], directives: list[Directive]) -> Plan:
    plan = Plan()
    steps = [found for found in directives if found.name in ("tool", "tools")]
    start = _turn_start(messages)
    done = sum(1 for message in messages[start:] if message.get("tool_calls"))
    if done < len(steps):
        number = sum(len(message.get("tool_calls") or ()) for message in messages)
        for call in steps[done].rest.split("|"):
            name, _, arguments = call.strip().partition(" ")
            number += 1
            plan.calls.append((f"call_{number}", name, arguments or "{}"))
        return plan
    for found in directives:
        if found.name == "reasoning":
            plan.reasoning = found.rest
        elif found.name == "say":
            plan.pieces = _words(found.rest)
        elif found.name == "deltas":
            plan.pieces = [f"{number} " for number in range(found.number("n", 5000))]
        elif found.name == "size":
            text = ("0123456789" * (found.number("n", 200_000) // 10 + 1))[: found.number("n", 200_000)]
            size = found.number("piece", 1000) or len(text)
            plan.pieces = [text[at : at + size] for at in range(0, len(text), size)]
        elif found.name == "languages":
            plan.pieces = [LANGUAGES[at : at + 3] for at in range(0, len(LANGUAGES), 3)]
        elif found.name == "broken":
            plan.pieces = list(BROKEN_PIECES)
    if not plan.pieces and steps:
        results = [_text(message) for message in messages[start:] if message["role"] == "tool"]
        plan.pieces = _words("done: " + ", ".join(results))
    if not plan.pieces:
        said = [_DIRECTIVE.sub("", _text(message)).strip() for message in messages if message["role"] == "user"]
        plan.pieces = _words(f"You said: {said[-1] if said else ''} (message {len(said)})")
    return plan


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*", text)


async def _deltas(plan: Plan) -> AsyncIterator[tuple[dict[str, Any], str | None]]:
    yield {"role": "assistant", "content": "" if plan.pieces else None}, None
    for word in _words(plan.reasoning):
        yield {"reasoning_content": word}, None
    for index, (call_id, name, arguments) in enumerate(plan.calls):
        function = {"name": name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}, None
        for at in range(0, len(arguments), 5):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 5]}}]}, None
    for piece in plan.pieces:
        yield {"content": piece}, None
    yield {}, "tool_calls" if plan.calls else "stop"


def _usage(messages: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    prompt = sum(len(json.dumps(message, ensure_ascii=False)) for message in messages) // 4
    answered = "".join(plan.pieces) + plan.reasoning + "".join(arguments for _, _, arguments in plan.calls)
    completion = max(1, len(answered) // 4)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": completion // 4},
    }


def _whole(body: dict[str, Any], plan: Plan, usage: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(plan.pieces) or None}
    if plan.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in plan.calls
        ]
    choice = {"index": 0, "finish_reason": "tool_calls" if plan.calls else "stop", "message": message}
    head = {"id": "chatcmpl", "object": "chat.completion", "created": 1700000000, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}


def _problem(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "code": code, "param": None}}


async def _reply(writer: asyncio.StreamWriter, status: int, value: object, headers: dict[str, str] | None = None) -> None:
    raw = json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(raw)}"]
    lines += [f"{name}: {text}" for name, text in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    await writer.drain()


async def _frame(writer: asyncio.StreamWriter, value: object, *, cut_bytes: bool = False) -> None:
    raw = b"data: " + json.dumps(value, ensure_ascii=not cut_bytes).encode() + b"\n\n"
    if cut_bytes:  # every third byte ends a chunk, also within a character
        for at in range(0, len(raw), 3):
            _chunk(writer, raw[at : at + 3])
    else:
        _chunk(writer, raw)
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    given = parser.parse_args()
    with FakeProvider(given.port, host=given.host) as provider:
        print(provider.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
