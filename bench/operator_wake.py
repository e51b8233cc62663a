"""How soon workers are asked for: from the publication of a run, with no worker there, to the new replicas of the worker Deployment.

    make bench-wake               20 runs, and 20 whose wake message is lost
    make bench-wake TRIES=50

A real API server ($KUBEBUILDER_ASSETS), Postgres and Redis from wheels, and the operator at its default settings, as a process of its
own. Each run is published to an AgentRun of its own that has had no work before, at a random moment between two ticks. With the wake
message the operator looks at once; without it the next tick finds the run. No pods run. The last line is the summary; the exit code is 1
where a target is missed.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kube_client import Kube
from kube_servers import KubeServer, why_not
from operator_load import (
    come_up,
    is_ready,
    is_reconciled,
    make_agent_runs,
    make_databases,
    namespace,
    start_operator,
    until,
    verdict,
)
from processes import ProductProcess
from redis.asyncio import Redis
from store_servers import POSTGRES_SETTINGS, REDIS_SETTINGS, choose_programs, short_folder

from agentrun.bus.connection import connect
from agentrun.bus.keys import Keys
from agentrun.bus.runs import WorkStream
from agentrun.dev.stores import StoreSettings, StoreUrls, stores

TRIES = 20
TICK_SECONDS = 2.0
"""The operator's default."""
LIMIT_SECONDS = 30.0
POLL_SECONDS = 0.005
WOKEN_SECONDS = 0.5
LOST_SECONDS = 3.0
TARGETS = (
    f"targets: p50 at most {WOKEN_SECONDS} s with the wake message, max below a tick and a half, {LOST_SECONDS:.0f} s, without"
)

Publish = Callable[[Redis, Keys], Awaitable[object]]


async def main(tries: int) -> int:
    """Exit code."""
    reason = why_not()
    if reason:
        sys.exit(f"bench-wake: {reason}")
    choose_programs()
    with (
        short_folder() as folder,
        stores(folder / "s", StoreSettings(POSTGRES_SETTINGS, REDIS_SETTINGS)) as urls,
        short_folder() as kube_folder,
    ):
        await make_databases(urls, 2 * tries)
        server = KubeServer(kube_folder)
        try:
            await server.start()
            server.apply_crds()
            woken, lost = await measure(server, urls, tries)
        finally:
            server.discard()
    print(f"({TARGETS})")
    found = {"p50 with the wake message": statistics.median(woken) > WOKEN_SECONDS, "max without it": max(lost) >= LOST_SECONDS}
    missed = [what for what, is_missed in found.items() if is_missed]
    print(f"bench-wake: {verdict(missed)} | {summary('woken', woken)} | {summary('wake message lost', lost)}")
    return bool(missed)


async def measure(server: KubeServer, urls: StoreUrls, tries: int) -> tuple[list[float], list[float]]:
    """Seconds of each try, with the wake message and without it."""
    redis = await connect(urls.redis_url)
    async with Kube(server) as kube:
        await make_agent_runs(kube, urls, 2 * tries)
        operator = start_operator(server)
        try:
            await until(kube, 2 * tries, is_reconciled, operator)
            await come_up(kube)
            await until(kube, 2 * tries, is_ready, operator)
            woken = await one_after_another("woken", range(tries), publish, kube, redis, operator)
            lost = await one_after_another("wake message lost", range(tries, 2 * tries), publish_silently, kube, redis, operator)
        finally:
            operator.kill()
            await redis.aclose()
    return woken, lost


async def one_after_another(
    what: str, numbers: Sequence[int], publish: Publish, kube: Kube, redis: Redis, operator: ProductProcess
) -> list[float]:
    taken = []
    for number in numbers:
        await asyncio.sleep(random.uniform(0, TICK_SECONDS))
        assert await replicas(kube, number) == 0
        begun = time.monotonic()
        await publish(redis, Keys(namespace(number), f"agent-{number}"))
        while await replicas(kube, number) == 0:
            if operator.returncode is not None or time.monotonic() - begun > LIMIT_SECONDS:
                sys.exit(f"bench-wake: no worker is asked for; the operator's log:\n{operator.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        taken.append(time.monotonic() - begun)
        print(f"{what} {len(taken)}: {taken[-1]:.3f} s", flush=True)
    return taken


async def publish(redis: Redis, keys: Keys) -> None:
    stream = WorkStream(redis, keys)
    await stream.publish([uuid4()])
    await stream.aclose()


async def publish_silently(redis: Redis, keys: Keys) -> None:
    await redis.xadd(keys.runs, {"run": str(uuid4())})


async def replicas(kube: Kube, number: int) -> int:
    found = await kube.get("deployments", namespace(number), f"agent-{number}-worker")
    return int(found["spec"]["replicas"])


def summary(what: str, taken: Sequence[float]) -> str:
    return f"{what}: {len(taken)} runs, p50 {statistics.median(taken):.3f} s, max {max(taken):.3f} s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures how soon the operator asks for workers.")
    parser.add_argument("tries", nargs="?", type=int, default=TRIES)
    sys.exit(asyncio.run(main(parser.parse_args().tries)))
