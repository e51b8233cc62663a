"""The product's own processes (`python -m agentrun gateway|worker|scheduler`) under test: start, signal, look into.

Nothing leaks: `ProductProcesses.close` kills what is left, and every process dies with the test process (Linux).
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from product_launch import FORKS, forked, spawned
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

PORTS = range(16_384, 32_768)
"""Linux gives no port below 32,768 to an outgoing connection, so that a server finds its own free when it is started again."""

_handed_out: set[int] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on; never the same twice, and by chance, since other processes ask, too."""
    while True:
        port = secrets.choice(PORTS)
        if port in _handed_out:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _handed_out.add(port)
            return port


class Metrics(dict[str, float]):
    """Samples by their text, labels in alphabetical order: `metrics['agentrun_runs_total{status="failed"}']`."""

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name that carry these labels; 0 if there is none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        named = (key for key in self if key.split("{", 1)[0] == name)
        return sum(self[key] for key in named if all(label in key for label in wanted))


def parse_metrics(text: str) -> Metrics:
    found = Metrics()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


@dataclass(frozen=True)
class Product:
    """What the processes of one AgentRun have in common."""

    manifest: Path
    database_url: str
    redis_url: str
    api_keys: Path
    namespace: str = "default"
    name: str = "agent"
    environment: Mapping[str, str] = field(default_factory=dict)


class ProductProcess:
    """One process. `port` answers HTTP: the gateway's own, or the health port of the others."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        """`command` is a program's command line; `agentrun ROLE` alone is forked from a process that has imported it already."""
        self.name = name
        self.port = port
        self.log = log
        self.base_url = f"http://127.0.0.1:{port}"
        log.touch()
        self._process = forked(command[1], environment, log) if command[0] == "agentrun" else spawned(command, environment, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -9 after a SIGKILL."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: it is there and does nothing, like a node that hangs."""
        self.signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, what: signal.Signals) -> None:
        self._process.send_signal(what)

    async def terminate(self, *, within: float = 20.0) -> int:
        """SIGTERM, and waits for the end; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.wait(within=within)

    async def wait(self, *, within: float = 20.0) -> int:
        """Waits for the end, however it comes; the exit code."""
        await eventually(lambda: self.returncode is not None, within=within, what=f"{self.name} ends ({self.log})")
        assert self.returncode is not None
        return self.returncode

    async def get(self, path: str, *, timeout: float = 5.0) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.base_url, timeout=timeout, trust_env=False) as client:
            return await client.get(path)

    async def ready(self, *, within: float = 60.0) -> None:
        """Waits until /readyz answers 200; fails at once, with the end of the log, if the process ends."""

        async def answers() -> bool:
            return self.returncode is not None or (await self.get("/readyz", timeout=2.0)).status_code == 200

        await eventually(answers, within=within, what=f"{self.name} is ready ({self.log})\n{self.log_tail()}")
        assert self.returncode is None, f"{self.name} ended with {self.returncode}:\n{self.log_tail()}"

    async def metrics(self) -> Metrics:
        response = await self.get("/metrics")
        response.raise_for_status()
        return parse_metrics(response.text)

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class ProductProcesses:
    """Starts processes and ends all of them at `close`. Logs are `<folder>/<role>-<n>.log`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[ProductProcess] = []

    async def gateway(
        self,
        product: Product,
        *,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
        ready: bool = True,
    ) -> ProductProcess:
        """ready=False returns at once; `await process.ready()` later."""
        port = free_port()
        own = {"AGENTRUN_HOST": "127.0.0.1", "AGENTRUN_PORT": str(port)}
        return await self._start("gateway", product, port, {**own, **(environment or {})}, failpoints, ready)

    async def worker(
        self,
        product: Product,
        *,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
        ready: bool = True,
    ) -> ProductProcess:
        port = free_port()
        own = {"AGENTRUN_HEALTH_HOST": "127.0.0.1", "AGENTRUN_HEALTH_PORT": str(port)}
        return await self._start("worker", product, port, {**own, **(environment or {})}, failpoints, ready)

    async def scheduler(
        self,
        product: Product,
        *,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
        ready: bool = True,
    ) -> ProductProcess:
        port = free_port()
        own = {"AGENTRUN_HEALTH_HOST": "127.0.0.1", "AGENTRUN_HEALTH_PORT": str(port)}
        return await self._start("scheduler", product, port, {**own, **(environment or {})}, failpoints, ready)

    def close(self) -> None:
        for process in self.started:
            if process.returncode is None:
                process.kill()

    async def _start(
        self, role: str, product: Product, port: int, own: Mapping[str, str], failpoints: str, ready: bool
    ) -> ProductProcess:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{role}-{sum(process.name.startswith(role) for process in self.started)}"
        environment = {
            **clean_environment(),
            "AGENTRUN_NAMESPACE": product.namespace,
            "AGENTRUN_NAME": product.name,
            "AGENTRUN_MANIFEST": str(product.manifest),
            "DATABASE_URL": product.database_url,
            "REDIS_URL": product.redis_url,
            "AGENTRUN_API_KEYS": str(product.api_keys),
            "AGENTRUN_POD_NAME": name,
            **({"AGENTRUN_FAILPOINTS": failpoints} if failpoints else {}),
            **product.environment,
            **own,
        }
        command = ["agentrun", role] if FORKS else [sys.executable, "-m", "agentrun", role]
        process = ProductProcess(name, command, environment, port, self._folder / f"{name}.log")
        self.started.append(process)
        if ready:
            await process.ready()
        return process


def clean_environment() -> dict[str, str]:
    """This process' environment without anything that would steer the product or a client library."""
    ours = ("AGENTRUN_", "PG", "DATABASE_URL", "REDIS_URL")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
