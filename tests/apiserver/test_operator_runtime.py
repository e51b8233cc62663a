"""The operator's process on a real API server with faults: what it sees, when it works, and that it never works twice.

The decisions are replaced by a stub that notes what it was asked to reconcile; times are shortened by settings.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_client import Kube, agent_run, play_kubelet
from kube_front import KubeFront, is_watch, kube_front
from kube_servers import CRDS, KubeServer
from operator_running import Stub, running
from processes import ProductProcess, ProductProcesses, clean_environment, free_port
from store_servers import short_folder
from waiting import eventually, rests

from agentrun.domain.errors import StoreUnavailable
from agentrun_operator import main, resync
from agentrun_operator import settings as operator_settings
from agentrun_operator.leading import Shared
from agentrun_operator.resources import AGENTRUNS, Key, Ref

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of kopf: see collect_what_kopf_left
    pytest.mark.usefixtures("collected"),
]

LEASE = "agentrun-operator"
SHORT: dict[str, Any] = {"request_seconds": 2.0, "lease_seconds": 60, "renew_seconds": 2.0}
"""Settings with which an operator soon notices that the API server does not answer. The lease is long: only it works again then."""


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

    await eventually(accepted, within=30, what=f"{name} is made")


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

        await eventually(says_why, within=20, what="it says which kinds are missing")
        assert await operator.wrong("/healthz") is None

        await asyncio.to_thread(private_api_server.apply_crds)
        await operator.is_ready()
        await operator.works()

        await make(private, "a")
        await stub.was_asked("a")
        await change(private, "a", pool=3)
        await eventually(lambda: stub.generations["a"] == 2, within=20, what="the new generation is seen")

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
        await eventually(lambda: stub.generations["a"] is None, within=20, what="the deletion is seen")


async def test_a_kind_that_is_removed_ends_the_process(
    private_api_server: KubeServer, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    private_api_server.apply_crds()
    process = stub_process(private_api_server.kubeconfig, product_processes, tmp_path, "one", namespace="default")
    await process.ready()
    await eventually(lambda: said(process, "leading"), within=20, what="it leads")

    await asyncio.to_thread(private_api_server.kubectl, "delete", "-f", str(CRDS / "agentruns.yaml"))

    await ends_since_its_watches_ended(process)


async def test_ko_02_a_watch_that_goes_silent_is_opened_anew(front: KubeFront, kube: Kube, namespace: str) -> None:
    async with running(front.kubeconfig, namespace=namespace, silence_seconds=2.0) as operator:
        await operator.works()
        await make(kube, "a", namespace=namespace)
        await operator.stub.was_asked("a")

        front.freeze_watches()
        await make(kube, "b", namespace=namespace)

        await operator.stub.was_asked("b")
        assert await operator.wrong() is None


async def test_ko_03_what_was_deleted_while_versions_expired_is_noticed(
    mistreated: Kube, mistreated_server: KubeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "FIRST_LISTS_SECONDS", 0.0)
    monkeypatch.setattr(resync, "HURRY_AGAIN_SECONDS", 1.0)  # objects of the first lists may have hurried one already
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

        await eventually(lambda: operator.stub.generations == {"kept": 2, "gone": None}, within=30, what="both changes are seen")


async def test_ko_03_an_expired_version_as_the_status_of_a_watch_ends_the_process_and_a_new_one_lists(
    front: KubeFront, kube: Kube, namespace: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    front.answer(lambda request: is_watch(request) and request.path.endswith("/agentruns"), 410, body=gone)
    process = stub_process(front.kubeconfig, product_processes, tmp_path, "one", namespace=namespace)
    await ends_since_its_watches_ended(process)
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
        await operator.stub.rests()

        assert operator.stub.asked["a"] == 3
        assert times[1] - times[0] >= 0.25, "half of the first back-off at least"
        assert times[2] - times[1] >= 0.5, "half of the second at least"
        assert (await kube.get("agentruns", namespace, "a"))["metadata"]["resourceVersion"] == before


async def test_ko_06_own_status_writes_end_in_silence(front: KubeFront, kube: Kube, namespace: str) -> None:
    async def write_status(shared: Shared, key: Key) -> None:
        # Another one each time: an operator that takes its own writes for news never ends.
        status = {"status": {"observedGeneration": operator.stub.asked[key.name]}}
        ref = Ref(AGENTRUNS, key.namespace, key.name)
        shared.cache.put(AGENTRUNS, await shared.kube.apply(ref, status, manager="agentrun-status", subresource="status"))

    async def pass_by(*others: str) -> None:
        """Others go all the way that events go: those before them are through then."""
        for other in others:
            await make(kube, other, namespace=namespace)
            await operator.stub.was_asked(other)

    names = {f"a{number}" for number in range(20)}
    for name in names:
        await make(kube, name, namespace=namespace)
    async with running(front.kubeconfig, namespace=namespace) as operator:
        await operator.works()
        await eventually(lambda: operator.stub.asked.keys() >= names, within=30, what="all are reconciled")
        await pass_by("first", "second")
        await operator.stub.rests()

        # Where an event overtakes the answer to its write, one more look is right, so here it never does.
        operator.stub.act = write_status
        before, shared = operator.stub.asked.copy(), operator.stub.shared
        assert shared is not None
        front.hold_watches()
        for name in names:
            shared.runs.add(Key(namespace, name))
        await eventually(lambda: all(operator.stub.asked[name] > before[name] for name in names), within=30, what="all wrote")
        await operator.stub.rests()
        operator.stub.act = None
        requests = len(front.requests)
        front.release_watches()
        await pass_by("third", "fourth")
        await operator.stub.rests()

        assert {name: operator.stub.asked[name] - before[name] for name in names} == dict.fromkeys(names, 1)
        assert not [request for request in front.requests[requests:] if request.startswith(("PATCH", "POST"))]


async def test_ko_09_one_operator_works_and_another_takes_over(
    crds_applied: KubeServer, kube: Kube, namespace: str, product_processes: ProductProcesses, tmp_path: Path
) -> None:
    both = [
        stub_process(crds_applied.kubeconfig, product_processes, tmp_path, name, namespace=namespace) for name in ("one", "two")
    ]
    await asyncio.gather(*(process.ready(within=180) for process in both))
    await eventually(lambda: any(said(process, "leading") for process in both), within=30, what="one leads")
    await make(kube, "a", namespace=namespace)
    first, second = sorted(both, key=lambda process: not said(process, "leading"))
    assert not said(second, "leading")

    first.kill()
    killed = time.monotonic()
    await eventually(lambda: said(second, "leading"), within=30, what="the other takes over")
    assert time.monotonic() - killed >= 1.5, "the lease of a leader that was killed has to run out"
    lease = await kube.get("leases", namespace, LEASE)
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == (second.name, 1)

    async with running(crds_applied.kubeconfig, namespace=namespace, name="third") as third:
        await third.is_ready()
        assert not third.stub.works
        assert await second.terminate(within=30) == 0
        await third.works()
        await third.stub.was_asked("a")
        async with running(crds_applied.kubeconfig, namespace=namespace, name="fourth") as fourth:
            await fourth.is_ready()
            assert not fourth.stub.works
            third.stop.set()
            # Far sooner than the lease of a minute runs out: one that was given back is free at once.
            await fourth.works(within=90)
            await fourth.stub.was_asked("a")
    lease = await kube.get("leases", namespace, LEASE)
    assert lease["spec"]["holderIdentity"] == ""


async def test_work_ends_at_the_renew_deadline_while_the_api_server_hangs(
    mistreated: Kube, mistreated_server: KubeServer
) -> None:
    async with running(mistreated_server.kubeconfig, **SHORT) as operator:
        await operator.works()
        await mistreated_server.pause()
        # At the deadline of two seconds, long before the lease of a minute runs out.
        await eventually(lambda: not operator.stub.works, within=30, what="work is cancelled")
        assert await operator.wrong("/healthz") is None
        assert await operator.wrong() is None

        await mistreated_server.resume()
        await operator.works()
        await make(mistreated, "after-hang")
        await operator.stub.was_asked("after-hang")


async def test_an_api_server_that_was_killed_is_found_again(mistreated: Kube, mistreated_server: KubeServer) -> None:
    async with running(mistreated_server.kubeconfig, **SHORT) as operator:
        await operator.works()
        await make(mistreated, "before-kill")
        await operator.stub.was_asked("before-kill")

        await mistreated_server.kill()
        await eventually(lambda: not operator.stub.works, within=30, what="work is cancelled")
        await mistreated_server.start()

        await make(mistreated, "after-kill")
        await operator.stub.was_asked("after-kill")
        assert operator.stub.works


async def test_ko_10_objects_that_block_do_not_hold_up_the_others(front: KubeFront, kube: Kube, namespace: str) -> None:
    async def block(_shared: Shared, key: Key) -> None:
        if key.name.startswith("slow"):
            await asyncio.Event().wait()

    async with running(front.kubeconfig, Stub(block), namespace=namespace, workers=4) as operator:
        await operator.works()
        for number in range(3):
            await make(kube, f"slow{number}", namespace=namespace)
            await operator.stub.was_asked(f"slow{number}")
        for number in range(5):
            await make(kube, f"fast{number}", namespace=namespace)
        for number in range(5):
            await operator.stub.was_asked(f"fast{number}")
        assert await operator.wrong("/healthz") is None


async def test_the_operator_as_shipped_makes_all_ready_and_then_is_silent_without_a_trace_of_kopf(
    operator_process: Any, kube: Kube, namespace: str, database_url: str, redis_url: str
) -> None:
    process = await operator_process(namespace)
    await make(kube, "a", namespace=namespace)
    await kube.create("crontasks", namespace, cron_task("nightly", agent="a"))
    await eventually(lambda: condition(kube, namespace, "Accepted", "False"), within=30, what="it misses the secrets")

    await kube.store_secrets(namespace, database_url=database_url, redis_url=redis_url)
    await eventually(lambda: kube.list("jobs", namespace), within=30, what="the migration is made")

    async def is_ready() -> bool:
        await play_kubelet(kube, namespace, migrates=True)
        return await condition(kube, namespace, "Ready", "True")

    async def is_stored() -> bool:
        found = await kube.condition(namespace, "nightly", "Accepted", plural="crontasks")
        return found is not None and found["status"] == "True"

    async def ticks() -> float:
        return (await process.metrics())["agentrun_operator_tick_seconds_count"]

    await eventually(is_ready, within=30, what="it is ready")
    await eventually(is_stored, within=30, what="the CronTask is stored")
    await rests(lambda: versions(kube, namespace), turns=ticks, count=2, within=60, what="everything that the operator writes")
    assert await condition(kube, namespace, "Ready", "True")
    assert (await process.metrics())["agentrun_operator_leader"] == 1

    found = await kube.everything(namespace)
    assert {"agentruns", "crontasks", "deployments", "jobs", "configmaps", "secrets", "leases", "events"} <= {*found}
    for kind, objects in found.items():
        for one in objects:
            name = f"{kind}/{one['metadata']['name']}"
            assert not one["metadata"].get("finalizers"), name
            # Data are not looked at: they may be random, as certificates are.
            assert "kopf" not in json.dumps({**one, "data": None}).lower(), name
    assert await process.terminate() == 0


def cron_task(name: str, *, agent: str) -> dict[str, Any]:
    spec = {"agentRunRef": {"name": agent}, "schedule": "0 3 * * *", "input": "report"}
    return {"apiVersion": "agentrun.dev/v1alpha1", "kind": "CronTask", "metadata": {"name": name}, "spec": spec}


async def condition(kube: Kube, namespace: str, kind: str, status: str) -> bool:
    found = await kube.condition(namespace, "a", kind)
    return found is not None and found["status"] == status


async def versions(kube: Kube, namespace: str) -> dict[str, str]:
    """The resourceVersions of everything that the operator writes, its Lease aside."""
    kinds = (
        "agentruns",
        "crontasks",
        "deployments",
        "services",
        "configmaps",
        "jobs",
        "poddisruptionbudgets",
        "networkpolicies",
        "events",
    )
    return {
        f"{kind}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
        for kind in kinds
        for one in await kube.list(kind, namespace)
    }


async def ends_since_its_watches_ended(process: ProductProcess) -> None:
    """In a process of its own, as shipped: kopf leaves its connections open when it ends by an error."""
    assert await process.wait(within=60) != 0
    assert "the watches ended" in process.log_tail()


def stub_process(kubeconfig: Path, processes: ProductProcesses, folder: Path, name: str, *, namespace: str) -> ProductProcess:
    """This file as a program: an operator with a stub, which says what it does in its log."""
    port = free_port()
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KUBECONFIG": str(kubeconfig),
        "POD_NAME": name,
        "POD_NAMESPACE": namespace,
        "AGENTRUN_OPERATOR_NAMESPACES": namespace,
        "AGENTRUN_OPERATOR_HEALTH_PORT": str(port),
        "AGENTRUN_OPERATOR_LEASE_SECONDS": "5",
        "AGENTRUN_OPERATOR_RENEW_SECONDS": "3",
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
