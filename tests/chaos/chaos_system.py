"""The system under chaos: real processes, each with links of its own to a Postgres and a Redis of its own, and faults on demand."""

import asyncio
import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import httpx2
import redis.asyncio
from chaos_plan import GATEWAYS, LEASE_SECONDS, LINKS, WORKERS, Fault, Step, Store
from chaos_provider import World
from fault_proxy import Fault as Loss
from fault_proxy import FaultProxy, fault_proxy
from processes import Metrics, Product, ProductProcess, ProductProcesses, parse_metrics
from store_servers import PrivateServer, choose_programs, private_server
from waiting import eventually

from agentrun.bus.keys import Keys
from agentrun.dev.servers import Postgres, Redis
from agentrun.domain.keys import RANDOM_BYTES, generate, record_line
from agentrun.store.migrations import migrate

NAMESPACE, NAME = "default", "agent"
KEYS = Keys(NAMESPACE, NAME)
MAX_LOST_ATTEMPTS = 3
MANIFEST = f"""
apiVersion: agentrun.dev/v1alpha1
kind: AgentRun
metadata: {{name: {NAME}, namespace: {NAMESPACE}}}
spec:
  agent: {{entrypoint: "chaos_agent:run"}}
  workers: {{leaseSeconds: {LEASE_SECONDS}, concurrency: 8, drainSeconds: 0, maxRunSeconds: 60}}
  reaper: {{idleSeconds: {LEASE_SECONDS}, intervalSeconds: 1, maxLostAttempts: {MAX_LOST_ATTEMPTS}}}
  followUps: {{policy: Merge, windowSeconds: 5}}
  budget: {{usdPerRun: "10", usdPerDay: "310", usdPerUserDay: "305"}}
"""
BUSY_WITHIN = 1.5
"""Seconds that a fault waits for its victim to have something to lose."""
RESTART_SECONDS = 0.2
SLOW_SECONDS = 0.15
SCRAPE_SECONDS = 0.5


@dataclass
class Links:
    """What one process sees of the stores."""

    postgres: FaultProxy
    redis: FaultProxy

    def of(self, store: Store) -> FaultProxy:
        return self.postgres if store is Store.POSTGRES else self.redis


@dataclass
class ChaosSystem:
    """Started by `chaos_system`. `done` counts the faults, `losses` the replies, `ended` names processes that ended as they should not."""

    product: Product
    processes: ProductProcesses
    postgres: PrivateServer
    redis: PrivateServer
    links: dict[str, Links]
    pool: asyncpg.Pool
    world: World
    headers: dict[str, str]
    http: httpx2.AsyncClient
    at: dict[str, ProductProcess] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    scraped: dict[str, Metrics] = field(default_factory=dict)
    up: set[str] = field(default_factory=set)
    """The names of those that were ready once and answered when they were last asked."""
    _ready: set[str] = field(default_factory=set)
    _draining: set[str] = field(default_factory=set)
    _renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _at_server: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def gateways(self) -> list[ProductProcess]:
        return [process for place, process in self.at.items() if place.startswith("gateway")]

    async def start(self, place: str) -> ProductProcess:
        """A new process at this place; not waited for."""
        links = self.links[place]
        product = replace(self.product, database_url=links.postgres.url, redis_url=links.redis.url)
        role = place.partition("-")[0]
        process: ProductProcess = await getattr(self.processes, role)(product, ready=False)
        self.at[place] = process
        return process

    async def start_all(self) -> None:
        started = [await self.start(place) for place in LINKS]
        await asyncio.gather(*(process.ready() for process in started))

    async def do(self, step: Step) -> None:
        """One fault, from its beginning to its end."""
        match step.fault:
            case Fault.KILL_WORKER | Fault.KILL_GATEWAY | Fault.KILL_SCHEDULER:
                await self._kill(step.place)
            case Fault.STOP_WORKER | Fault.STOP_GATEWAY | Fault.STOP_SCHEDULER:
                await self._stop(step.place, step.seconds)
            case Fault.DRAIN_WORKER:
                await self._drain(step.place)
            case Fault.FLUSH_REDIS:
                async with self._at_server, redis.asyncio.Redis.from_url(self.redis.url) as client:
                    await client.flushall()
                self.done[step.fault] += 1
            case Fault.RESTART_REDIS | Fault.RESTART_POSTGRES:
                server = self.redis if step.fault is Fault.RESTART_REDIS else self.postgres
                async with self._at_server:
                    await server.kill()
                    await asyncio.sleep(RESTART_SECONDS)
                    await server.start()
                self.done[step.fault] += 1
            case Fault.CUT | Fault.SLOW | Fault.LOSE_REPLIES:
                await self._trouble(self.links[step.place].of(step.store), step)

    async def _kill(self, place: str) -> None:
        process = await self._victim(place)
        self.killed.add(process.name)
        process.kill()
        self.done[f"kill {place.partition('-')[0]}"] += 1
        await asyncio.sleep(RESTART_SECONDS)
        await self._renew(place, process)

    async def _stop(self, place: str, seconds: float) -> None:
        process = await self._victim(place)
        process.stop()
        self.done[f"stop {place.partition('-')[0]}"] += 1
        await asyncio.sleep(seconds)
        process.cont()

    async def _drain(self, place: str) -> None:
        process = await self._victim(place)
        self._draining.add(process.name)
        await self._scrape(process)
        ending = asyncio.create_task(process.terminate(within=40))
        await self._renew(place, process)
        code = await ending
        self.done["drain worker"] += 1
        if code != 0 and process.name not in self.killed:
            self.ended.append(f"{process.name} drained with exit code {code}")

    async def _trouble(self, proxy: FaultProxy, step: Step) -> None:
        if step.fault is Fault.CUT:
            async with proxy.outage():
                await asyncio.sleep(step.seconds)
            self.done[step.fault] += 1
        elif step.fault is Fault.SLOW:
            proxy.delay(SLOW_SECONDS)
            await asyncio.sleep(step.seconds)
            proxy.delay(0)
            self.done[step.fault] += 1
        else:
            chosen = proxy.lose_reply(step.text, times=2)
            await asyncio.sleep(step.seconds)
            await self._felt([chosen])
            if not chosen.count and not step.shields:  # some are rare, and a short plan might lose none
                await self._felt([proxy.lose_reply(text) for text in step.replies])
            self.done[step.fault] += 1

    async def _felt(self, losses: list[Loss]) -> None:
        """Ends these once one of them has happened, if that is soon; a request that was met before may lose its reply later still."""
        self.losses += losses
        with contextlib.suppress(AssertionError):
            await eventually(lambda: any(loss.count for loss in losses), within=BUSY_WITHIN, what="a reply is lost")
        for loss in losses:
            loss.cancel()

    async def _victim(self, place: str) -> ProductProcess:
        """The place's process; a worker as soon as it has a run to lose, if that is soon."""
        if place.startswith("worker"):
            with contextlib.suppress(AssertionError):
                await eventually(lambda: self._busy(self.at[place]), within=BUSY_WITHIN, what="busy")
        return self.at[place]

    async def _busy(self, process: ProductProcess) -> bool:
        owned = "SELECT EXISTS (SELECT 1 FROM attempts WHERE outcome = 'running' AND starts_with(owner, $1 || '-'))"
        return bool(await self.pool.fetchval(owned, process.name))

    async def _renew(self, place: str, old: ProductProcess) -> None:
        async with self._renewing:
            if self.at[place] is old:
                await self.start(place)

    async def watch(self) -> None:
        """Scrapes metrics, and starts anew whoever ended without being told to, as a Deployment does; until cancelled."""
        while True:
            asked = list(self.at.values())
            answered = await asyncio.gather(*(self._scrape(process) for process in asked))
            self.up = {process.name for process, well in zip(asked, answered, strict=True) if well}
            for place, process in list(self.at.items()):
                if process.returncode is not None and process.name not in self.killed | self._draining:
                    self.ended.append(f"{process.name} ended by itself with {process.returncode}: {process.log_tail(3)}")
                    self.killed.add(process.name)
                    await self._renew(place, process)
            await asyncio.sleep(SCRAPE_SECONDS)

    async def _scrape(self, process: ProductProcess) -> bool:
        """Whether it is up."""
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(1):
                if process.name not in self._ready:
                    if (await self.http.get(f"{process.base_url}/readyz")).status_code != 200:
                        return False
                    self._ready.add(process.name)
                answer = await self.http.get(f"{process.base_url}/metrics")
            if answer.status_code == 200:
                self.scraped[process.name] = parse_metrics(answer.text)
                return True
        return False

    @property
    def stands(self) -> bool:
        """Whether somebody takes messages and somebody works: only then there is something to break."""
        up = {place.partition("-")[0] for place, process in self.at.items() if process.name in self.up}
        return {"gateway", "worker"} <= up

    def counted(self, name: str, **labels: str) -> int:
        """A metric over all processes that ever were, as last seen of each."""
        return int(sum(metrics.total(name, **labels) for metrics in self.scraped.values()))

    async def unfinished(self) -> int:
        found: int = await self.pool.fetchval("SELECT count(*) FROM runs WHERE status IN ('pending', 'running')")
        return found

    async def left_in_redis(self) -> int:
        """Entries that are known or held, though nothing is to be done."""
        async with redis.asyncio.Redis.from_url(self.redis.url) as client:
            pending = await client.xpending(KEYS.runs, "workers")
            return int(pending["pending"]) + int(await client.hlen(KEYS.entries))

    async def stop_workers(self) -> None:
        """In order, so that everything that they hold is stored."""
        await asyncio.gather(*(self._scrape(process) for process in self.at.values()))
        for place in [place for place in self.at if place.startswith("worker")]:
            process = self.at.pop(place)
            self._draining.add(process.name)
            if (code := await process.terminate(within=30)) != 0:
                self.ended.append(f"{process.name} ended with {code}")


async def within(condition: Callable[[], Awaitable[object]], seconds: float) -> bool:
    """Whether it came true in time."""
    try:
        await eventually(condition, within=seconds, what="")
    except AssertionError:
        return False
    return True


@contextlib.asynccontextmanager
async def chaos_system(folder: Path) -> AsyncIterator[ChaosSystem]:
    """Everything, running; logs and files in `folder`."""
    choose_programs()
    folder.mkdir(parents=True, exist_ok=True)
    key, record = generate(
        secrets.token_bytes(RANDOM_BYTES), user="ann", scopes=(), created=datetime.now(UTC).replace(microsecond=0)
    )
    (folder / "agentrun.yaml").write_text(MANIFEST)
    (folder / "keys").write_text(record_line(record) + "\n")
    shutil.copy(Path(__file__).with_name("chaos_agent.py"), folder)
    async with contextlib.AsyncExitStack() as stack:
        postgres = await stack.enter_async_context(private_server(Postgres))
        bus = await stack.enter_async_context(private_server(Redis))
        await migrate(postgres.url, say=lambda _: None)
        links = {}
        for place in LINKS:
            to_postgres = await stack.enter_async_context(fault_proxy(postgres.url))
            links[place] = Links(to_postgres, await stack.enter_async_context(fault_proxy(bus.url)))
        world = stack.enter_context(World())
        environment = {"OPENAI_BASE_URL": world.url, "OPENAI_API_KEY": "none"}
        product = Product(
            folder / "agentrun.yaml",
            postgres.url,
            bus.url,
            folder / "keys",
            namespace=NAMESPACE,
            name=NAME,
            environment=environment,
        )
        http = await stack.enter_async_context(httpx2.AsyncClient(trust_env=False, limits=httpx2.Limits(max_connections=None)))
        pool = await asyncpg.create_pool(postgres.url, min_size=0, max_size=5, command_timeout=10)
        stack.callback(pool.terminate)
        processes = ProductProcesses(folder / "processes")
        stack.callback(processes.close)
        system = ChaosSystem(product, processes, postgres, bus, links, pool, world, {"Authorization": f"Bearer {key}"}, http)
        await system.start_all()
        yield system


assert len(LINKS) == GATEWAYS + WORKERS + 1
