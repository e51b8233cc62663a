"""An HTTP front before an API server that misbehaves on demand: refuses, hangs, answers what a test wants.

async with kube_front(api_server, tmp_path) as front:
    settings = OperatorSettings(kubeconfig=str(front.kubeconfig))
    front.answer(lambda request: request.method == "PATCH", 429, headers={"Retry-After": "1"}, times=2)
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from kube_servers import KubeServer
from processes import free_port

Match = Callable[[web.BaseRequest], bool]


@dataclass
class Misbehaviour:
    """One kind of answer that the front makes itself. `count` says how often it did."""

    match: Match
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    left: float
    count: int = 0


def is_watch(request: web.BaseRequest) -> bool:
    return request.query.get("watch") == "true"


@dataclass
class KubeFront:
    """`requests` are method and path of all that came, watches as WATCH."""

    server: KubeServer
    kubeconfig: Path
    requests: list[str] = field(default_factory=list)
    _rules: list[Misbehaviour] = field(default_factory=list)
    _held: asyncio.Event | None = None
    _frozen: set[asyncio.Task[Any]] = field(default_factory=set)
    _streams: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """The watches that are open, and their paths."""
    _cut: bool = False

    def answer(
        self,
        match: Match,
        status: int,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        times: float = 1,
    ) -> Misbehaviour:
        """Answers matching requests itself, `times` often."""
        default = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "message": "made by the front"}
        rule = Misbehaviour(match, status, body or default, headers or {}, times)
        self._rules.append(rule)
        return rule

    def freeze_watches(self, ending: str = "") -> None:
        """The watches of now, whose path has this ending, stay open and say nothing more; what is opened later works."""
        self._frozen |= {task for task, path in self._streams.items() if path.endswith(ending)}

    def hold_watches(self) -> None:
        """Watches say nothing until `release_watches`: then all that they would have said."""
        self._held = self._held or asyncio.Event()

    def release_watches(self) -> None:
        if self._held is not None:
            self._held.set()
            self._held = None

    def cut(self) -> None:
        """Nothing gets through, and what is open is closed."""
        self._cut = True
        for stream in [*self._streams]:
            stream.cancel()

    def mend(self) -> None:
        self._cut = False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=503)
        self.requests.append(f"{'WATCH' if is_watch(request) else request.method} {request.path}")
        for rule in self._rules:
            if rule.left > 0 and rule.match(request):
                rule.left -= 1
                rule.count += 1
                text = json.dumps(rule.body) + "\n"  # a watch is lines
                return web.Response(text=text, status=rule.status, content_type="application/json", headers=dict(rule.headers))
        return await self._forward(request)

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        context = ssl.create_default_context(cafile=str(self.server.certificate))
        headers = {name: value for name, value in request.headers.items() if name in ("Accept", "Content-Type", "Authorization")}
        task = asyncio.current_task()
        assert task is not None
        limits = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), timeout=limits) as session,
            session.request(
                request.method, f"{self.server.url}{request.path_qs}", data=await request.read() or None, headers=headers
            ) as upstream,
        ):
            kind = upstream.headers.get("Content-Type", "application/json")
            if not is_watch(request):
                return web.Response(status=upstream.status, body=await upstream.read(), headers={"Content-Type": kind})
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": kind})
            await response.prepare(request)
            self._streams[task] = request.path
            try:
                async for piece in upstream.content.iter_any():
                    if task in self._frozen:
                        await asyncio.Event().wait()
                    if self._held is not None:
                        await self._held.wait()
                    await response.write(piece)
            finally:
                self._streams.pop(task, None)
                self._frozen.discard(task)
            return response


@contextlib.asynccontextmanager
async def kube_front(server: KubeServer, folder: Path) -> AsyncIterator[KubeFront]:
    """A front of `server`, and a kubeconfig in `folder` that leads to it as the administrator."""
    port = free_port()
    document = json.loads(server.kubeconfig.read_text())
    document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
    front = KubeFront(server, folder / f"kubeconfig-front-{port}")
    front.kubeconfig.write_text(json.dumps(document))
    runner = web.ServerRunner(web.Server(front.handle), shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield front
    finally:
        for stream in [*front._streams]:
            stream.cancel()
        await runner.cleanup()
