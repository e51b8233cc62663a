"""The operator's process on a real API server with faults: what it sees, when it works, and that it never works twice.

The decisions are replaced by a stub that notes what it was asked to reconcile; times are shortened by settings.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_client import Kube, agent_run, play_kubelet
from kube_front import KubeFront, is_watch, kube_front
from kube_servers import CRDS, KubeServer
from processes import ProductProcess, ProductProcesses, clean_environment, free_port
from store_servers import short_folder
from waiting import eventually

from agentrun.domain.errors import StoreUnavailable
from agentrun.maintenance.supervise import Supervisor
from agentrun_operator import main
from agentrun_operator import settings as operator_settings
from agentrun_operator.handlers import WatchEnded
from agentrun_operator.leading import Shared
from agentrun_operator.resources import AGENTRUNS, Key, Ref
from agentrun_operator.settings import OperatorSettings

LEASE = "agentrun-operator"


class Stub:
    """A leadership that notes what happens. `act` is what a reconcile does."""

    def __init__(self, act: Callable[[Shared, Key], Awaitable[None]] | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.generations: dict[str, int | None] = {}
        self.leading = 0
        self.ended = 0
        self.shared: Shared | None = None
        self._act = act

    @property
    def works(self) -> bool:
        return self.leading > self.ended

    def __call__(self, shared: Shared) -> "Stub":
        self.shared, self.leading = shared, self.leading + 1
        print("leading", flush=True)
        return self

    async def reconcile_run(self, key: Key, /) -> float | None:
        assert self.shared is not None
        self.asked[key.name] += 1
        found = self.shared.cache.get(Ref(AGENTRUNS, key.namespace, key.name))
        self.generations[key.name] = found["metadata"]["generation"] if found else None
        if self._act is not None:
            await self._act(self.shared, key)
        return None

    async def reconcile_cron_task(self, _key: Key, /) -> float | None:
        return None

    def start(self, _supervisor: Supervisor) -> None: ...

    async def aclose(self) -> None:
        self.ended += 1
        print("ended", flush=True)

    async def was_asked(self, name: str, *, times: int = 1, within: float = 10.0) -> None:
        await eventually(lambda: self.asked[name] >= times, within=within, what=f"{name} is reconciled {times} times")


@dataclasses.dataclass
class Running:
    """An operator inside this process."""

    stub: Stub
    task: asyncio.Task[None]
    stop: asyncio.Event
    port: int

    async def wrong(self, path: str = "/readyz") -> str | None:
        """What the probe says is wrong."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return None if answer.startswith("HTTP/1.1 200") else answer.partition("\r\n\r\n")[2].strip()

    async def is_ready(self, *, within: float = 15.0) -> None:
        async def ready() -> bool:
            return self.task.done() or await self.wrong() is None

        await eventually(ready, within=within, what="the operator is ready")
        assert not self.task.done(), self.task

    async def works(self, *, within: float = 15.0) -> None:
        await eventually(lambda: self.stub.works, within=within, what="it leads")


@contextlib.asynccontextmanager
async def running(
    kubeconfig: Path, stub: Stub | None = None, *, namespace: str = "", name: str = "here", **settings: Any
) -> AsyncIterator[Running]:
    """With a namespace the operator looks at nothing else, and its Lease is there."""
    stub, stop, port = stub or Stub(), asyncio.Event(), free_port()
    given: dict[str, Any] = {
        "request_seconds": 2.0,
        "lease_seconds": 4,
        "renew_seconds": 2.0,
        "retry_seconds": 0.3,
        "silence_seconds": 3.0,
        **settings,
    }
    given |= {"watched_namespaces": namespace, "pod_namespace": namespace or "default"}
    current = OperatorSettings(kubeconfig=str(kubeconfig), pod_name=name, health_host="127.0.0.1", health_port=port, **given)
    running = Running(stub, asyncio.create_task(main.run(current, build=stub, stop=stop)), stop, port)
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait([running.task], timeout=15)
        assert running.task.done()
        if not running.task.cancelled() and running.task.exception() and not isinstance(running.task.exception(), WatchEnded):
            running.task.result()


@pytest.fixture
async def front(crds_applied: KubeServer, tmp_path: Path) -> AsyncIterator[KubeFront]:
    """A front of the session's API server."""
    async with kube_front(crds_applied, tmp_path) as front:
        yield front


@pytest.fixture(scope="module")
def mistreated_server() -> Iterator[KubeServer]:
    """An API server with both CRDs for the tests of this file that stop and kill it, and start it again."""
    with short_folder() as folder:
        server = KubeServer(folder)
        try:
            server.start_now()
            server.apply_crds()
            yield server
        finally:
            server.discard()


@pytest.fixture
async def mistreated(mistreated_server: KubeServer) -> AsyncIterator[Kube]:
    """Its administrator."""
    async with Kube(mistreated_server) as client:
        yield client


async def make(admin: Kube, name: str, *, namespace: str = "default") -> None:
    async def accepted() -> bool:
        await admin.apply("agentruns", namespace, agent_run(name))
        return True

    await eventually(accepted, within=10, what=f"{name} is made")


async def change(admin: Kube, name: str, *, pool: int, namespace: str = "default") -> None:
    await admin.patch("agentruns", namespace, name, {"spec": {"database": {"poolSize": pool}}})


def child(name: str, owner: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "agentrun-operator", "agentrun.dev/agentrun": owner}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"x": "1"}}


async def test_missing_kinds_are_waited_for_and_every_change_reaches_the_queue(private_api_server: KubeServer) -> None:
    async with Kube(private_api_server) as private, running(private_api_server.kubeconfig) as operator:
        stub = operator.stub

        async def says_why() -> bool:
            return "agentruns.agentrun.dev" in (await operator.wrong() or "")

        await eventually(says_why, within=5, what="it says which kinds are missing")
        assert await operator.wrong("/healthz") is None

        await asyncio.to_thread(private_api_server.apply_crds)
        await operator.is_ready()
        await operator.works()

        await make(private, "a")
        await stub.was_asked("a")
        await change(private, "a", pool=3)
        await eventually(lambda: stub.generations["a"] == 2, within=5, what="the new generation is seen")

        before = stub.asked["a"]
        await private.apply("configmaps", "default", child("a-config", "a"))
        await stub.was_asked("a", times=before + 1)
        before = stub.asked["a"]
        await private.delete("configmaps", "default", "a-config")
        await stub.was_asked("a", times=before + 1)

        before = stub.asked["a"]
        await private.secret("default", "database", url="postgresql://somewhere")
        await stub.was_asked("a", times=before + 1)
        before = stub.asked["a"]
        await private.secret("default", "somebody-elses", url="x")
        await private.secret("default", "redis", url="redis://somewhere")
        await stub.was_asked("a", times=before + 1)

        found = await private.get("agentruns", "default", "a")
        assert not found["metadata"].get("finalizers") and not found["metadata"].get("annotations")
        assert {entry["manager"] for entry in found["metadata"]["managedFields"]} <= {
            "test",
            "Go-http-client",
            "python-httpx2",
        }, found["metadata"]["managedFields"]

        await private.delete("agentruns", "default", "a")
        await eventually(lambda: stub.generations["a"] is None, within=5, what="the deletion is seen")

        await asyncio.to_thread(private_api_server.kubectl, "delete", "-f", str(CRDS / "crontasks.yaml"))
        await asyncio.wait([operator.task], timeout=10)
        assert isinstance(operator.task.exception(), WatchEnded)


async def test_ko_02_a_watch_that_goes_silent_is_opened_anew(front: KubeFront, kube: Kube, namespace: str) -> None:
    async with running(front.kubeconfig, namespace=namespace, silence_seconds=2.0) as operator:
        await operator.works()
        await make(kube, "a", namespace=namespace)
        await operator.stub.was_asked("a")

        front.freeze_watches()
        await make(kube, "b", namespace=namespace)

        await operator.stub.was_asked("b", within=8)
        assert await operator.wrong() is None


async def test_ko_03_what_was_deleted_while_versions_expired_is_noticed(
    mistreated: Kube, mistreated_server: KubeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "FIRST_LISTS_SECONDS", 0.0)
    async with kube_front(mistreated_server, tmp_path) as front, running(front.kubeconfig) as operator:
        await operator.works()
        for name in ("kept", "gone"):
            await make(mistreated, name)
            await operator.stub.was_asked(name)

        front.cut()
        await change(mistreated, "kept", pool=3)
        await mistreated.delete("agentruns", "default", "gone")
        await mistreated_server.compact()
        await mistreated_server.kill()
        await mistreated_server.start()
        front.mend()

        await eventually(lambda: operator.stub.generations == {"kept": 2, "gone": None}, within=15, what="both changes are seen")


async def test_ko_03_an_expired_version_as_the_status_of_a_watch_ends_the_process_and_a_new_one_lists(
    front: KubeFront, kube: Kube, namespace: str
) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    front.answer(lambda request: is_watch(request) and request.path.endswith("/agentruns"), 410, body=gone)
    async with running(front.kubeconfig, namespace=namespace) as operator:
        await asyncio.wait([operator.task], timeout=15)
        assert isinstance(operator.task.exception(), WatchEnded)
    async with running(front.kubeconfig, namespace=namespace, name="next") as operator:
        await operator.works()
        await make(kube, "a", namespace=namespace)
        await operator.stub.was_asked("a")


async def test_ko_05_a_failed_reconcile_is_tried_again_without_a_trace_in_the_object(
    front: KubeFront, kube: Kube, namespace: str
) -> None:
    times: list[float] = []

    async def fail_twice(_shared: Shared, _key: Key) -> None:
        times.append(time.monotonic())
        if len(times) < 3:
            raise StoreUnavailable("away")

    async with running(front.kubeconfig, Stub(fail_twice), namespace=namespace) as operator:
        await operator.works()
        await make(kube, "a", namespace=namespace)
        before = (await kube.get("agentruns", namespace, "a"))["metadata"]["resourceVersion"]
        await operator.stub.was_asked("a", times=3)
        await asyncio.sleep(1.5)

        assert operator.stub.asked["a"] == 3
        assert 0.25 <= times[1] - times[0] <= 0.8
        assert 0.5 <= times[2] - times[1] <= 1.3
        assert (await kube.get("agentruns", namespace, "a"))["metadata"]["resourceVersion"] == before


async def test_ko_06_own_status_writes_end_in_silence(front: KubeFront, kube: Kube, namespace: str) -> None:
    writes = 0

    async def write_status(shared: Shared, key: Key) -> None:
        nonlocal writes
        writes += 1
        status = {"status": {"observedGeneration": 1}}
        ref = Ref(AGENTRUNS, key.namespace, key.name)
        shared.cache.put(AGENTRUNS, await shared.kube.apply(ref, status, manager="agentrun-status", subresource="status"))

    for number in range(20):
        await make(kube, f"a{number}", namespace=namespace)
    async with running(front.kubeconfig, Stub(write_status), namespace=namespace) as operator:
        await operator.works()
        await eventually(lambda: len(operator.stub.asked) == 20, within=10, what="all are reconciled")
        await asyncio.sleep(1)
        settled, requests = writes, len(front.requests)
        await asyncio.sleep(2)

        assert writes == settled <= 60
        assert not [request for request in front.requests[requests:] if request.startswith(("PATCH", "POST"))]


async def test_ko_09_one_operator_works_and_another_takes_over(
    crds_applied: KubeServer, kube: Kube, namespace: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    both = [stub_process(crds_applied, product_processes, tmp_path, name, namespace=namespace) for name in ("one", "two")]
    await asyncio.gather(*(process.ready(within=60) for process in both))
    await eventually(lambda: any(said(process, "leading") for process in both), within=10, what="one leads")
    await make(kube, "a", namespace=namespace)
    first, second = sorted(both, key=lambda process: not said(process, "leading"))
    assert not said(second, "leading")

    first.kill()
    killed = time.monotonic()
    await eventually(lambda: said(second, "leading"), within=15, what="the other takes over")
    assert time.monotonic() - killed >= 1.5, "the lease of a leader that was killed has to run out"
    lease = await kube.get("leases", namespace, LEASE)
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == (second.name, 1)

    patient = {"lease_seconds": 30, "renew_seconds": 20.0}
    async with running(crds_applied.kubeconfig, namespace=namespace, name="third", **patient) as third:
        await third.is_ready()
        assert not third.stub.works
        assert await second.terminate(within=10) == 0
        released = time.monotonic()
        await third.works(within=5)
        assert time.monotonic() - released < 3, "a lease that was given back is free at once"
        await third.stub.was_asked("a")
    lease = await kube.get("leases", namespace, LEASE)
    assert lease["spec"]["holderIdentity"] == ""


async def test_work_ends_at_the_renew_deadline_while_the_api_server_hangs(
    mistreated: Kube, mistreated_server: KubeServer
) -> None:
    async with running(mistreated_server.kubeconfig) as operator:
        await operator.works()
        await mistreated_server.pause()
        paused = time.monotonic()
        await eventually(lambda: not operator.stub.works, within=5, what="work is cancelled")
        assert time.monotonic() - paused < 3
        assert await operator.wrong("/healthz") is None
        assert await operator.wrong() is None

        await mistreated_server.resume()
        await operator.works(within=10)
        await make(mistreated, "after-hang")
        await operator.stub.was_asked("after-hang")


async def test_an_api_server_that_was_killed_is_found_again(mistreated: Kube, mistreated_server: KubeServer) -> None:
    async with running(mistreated_server.kubeconfig) as operator:
        await operator.works()
        await make(mistreated, "before-kill")
        await operator.stub.was_asked("before-kill")

        await mistreated_server.kill()
        await eventually(lambda: not operator.stub.works, within=5, what="work is cancelled")
        await mistreated_server.start()

        await make(mistreated, "after-kill")
        await operator.stub.was_asked("after-kill", within=10)
        assert operator.stub.works


@pytest.mark.skipif(not os.environ.get("AGENTRUN_TEST_LONG"), reason="AGENTRUN_TEST_LONG is not set: takes ten minutes")
@pytest.mark.parametrize(("fault", "seconds"), [("hangs", 90), ("is killed", 300)])
async def test_a_long_outage_at_default_times_is_over_within_a_minute(
    mistreated: Kube, mistreated_server: KubeServer, fault: str, seconds: int
) -> None:
    defaults = {"lease_seconds": 15, "renew_seconds": 10.0, "retry_seconds": 2.0, "silence_seconds": 70.0}
    async with running(mistreated_server.kubeconfig, request_seconds=10.0, **defaults) as operator:
        await operator.works()
        await (mistreated_server.pause() if fault == "hangs" else mistreated_server.kill())
        await asyncio.sleep(seconds)
        assert await operator.wrong("/healthz") is None
        assert not operator.stub.works
        await (mistreated_server.resume() if fault == "hangs" else mistreated_server.start())
        name = f"after-{seconds}"
        await make(mistreated, name)
        await operator.stub.was_asked(name, within=60)


async def test_ko_10_objects_that_block_do_not_hold_up_the_others(front: KubeFront, kube: Kube, namespace: str) -> None:
    async def block(_shared: Shared, key: Key) -> None:
        if key.name.startswith("slow"):
            await asyncio.sleep(20)

    async with running(front.kubeconfig, Stub(block), namespace=namespace, workers=4) as operator:
        await operator.works()
        for number in range(3):
            await make(kube, f"slow{number}", namespace=namespace)
            await operator.stub.was_asked(f"slow{number}")
        for number in range(5):
            await make(kube, f"fast{number}", namespace=namespace)
        for number in range(5):
            await operator.stub.was_asked(f"fast{number}", within=5)
        assert await operator.wrong("/healthz") is None


async def test_the_operator_as_shipped_makes_an_agentrun_ready_and_then_is_silent(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    process = await operator_process(namespace, ready=False)
    await process.ready(within=60)
    await make(kube, "a", namespace=namespace)
    await eventually(lambda: condition(kube, namespace, "Accepted", "False"), within=10, what="it misses the secrets")

    await kube.secret(namespace, "database", url=database_url)
    await kube.secret(namespace, "redis", url=redis_url)
    await kube.secret(namespace, "api-keys", **{"api-keys": "{}"})
    await eventually(lambda: kube.find("deployments", namespace, "a-worker"), within=20, what="workers are made")

    async def is_ready() -> bool:
        await play_kubelet(kube, namespace)
        return await condition(kube, namespace, "Ready", "True")

    await eventually(is_ready, within=20, what="it is ready")
    before = await versions(kube, namespace)
    await asyncio.sleep(5)
    assert await versions(kube, namespace) == before
    assert (await process.metrics())["agentrun_operator_leader"] == 1
    assert await process.terminate() == 0


async def condition(kube: Kube, namespace: str, kind: str, status: str) -> bool:
    found = await kube.condition(namespace, "a", kind)
    return found is not None and found["status"] == status


async def versions(kube: Kube, namespace: str) -> dict[str, str]:
    """The resourceVersions of everything that the operator writes, its Lease aside."""
    kinds = ("agentruns", "deployments", "services", "configmaps", "jobs", "poddisruptionbudgets", "networkpolicies", "events")
    return {
        f"{kind}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
        for kind in kinds
        for one in await kube.list(kind, namespace)
    }


def stub_process(server: KubeServer, processes: ProductProcesses, folder: Path, name: str, *, namespace: str) -> ProductProcess:
    """This file as a program: an operator with a stub, which says what it does in its log."""
    port = free_port()
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KUBECONFIG": str(server.kubeconfig),
        "POD_NAME": name,
        "POD_NAMESPACE": namespace,
        "AGENTRUN_OPERATOR_NAMESPACES": namespace,
        "AGENTRUN_OPERATOR_HEALTH_PORT": str(port),
        "AGENTRUN_OPERATOR_LEASE_SECONDS": "3",
        "AGENTRUN_OPERATOR_RENEW_SECONDS": "2",
        "AGENTRUN_OPERATOR_RETRY_SECONDS": "0.3",
    }
    process = ProductProcess(name, [sys.executable, __file__], environment, port, folder / f"{name}.log")
    processes.started.append(process)
    return process


def said(process: ProductProcess, word: str) -> bool:
    assert process.returncode is None, process.log_tail()
    return word in process.log.read_text().splitlines()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(main.run(operator_settings.read(), build=Stub()))
