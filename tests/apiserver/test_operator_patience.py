"""An API server that has no time or forgets all the time is asked less and less often."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from kube_client import Kube, agent_run
from kube_front import KubeFront, is_watch, kube_front
from kube_servers import KubeServer
from operator_running import running
from waiting import eventually

from agentrun_operator import handlers, kube_watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of kopf: see collect_what_kopf_left
    pytest.mark.usefixtures("collected"),
]

EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}


@pytest.fixture
async def front(crds_applied: KubeServer, tmp_path: Path) -> AsyncIterator[KubeFront]:
    async with kube_front(crds_applied, tmp_path) as front:
        yield front


def requests_of(front: KubeFront, *, since: int) -> list[str]:
    return [request for request in front.requests[since:] if "/leases" not in request]


async def test_ko_03_versions_that_expire_all_the_time_cost_less_than_a_request_a_second(
    front: KubeFront, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first pauses are shorter than they are, so that the long ones are there soon; the longest are as they are.
    monkeypatch.setattr(handlers, "RELIST_FIRST_SECONDS", 0.25)
    monkeypatch.setattr(kube_watch, "FIRST_SECONDS", 0.25)
    rule = front.answer(is_watch, 200, body=EXPIRED, headers={"Connection": "close"}, times=float("inf"))
    async with running(front.kubeconfig, namespace=namespace) as operator:
        await operator.works()
        await eventually(lambda: rule.count >= 3 * 9, within=30, what="each watch has expired three times")
        begun, before = time.monotonic(), len(front.requests)
        await eventually(lambda: time.monotonic() > begun + 6, within=30, what="six seconds are over")
        asked = requests_of(front, since=before)
        assert len(asked) < time.monotonic() - begun, asked
        assert await operator.wrong() is None
        assert await operator.wrong("/healthz") is None


async def test_a_secret_watch_that_is_refused_for_now_waits_and_goes_on_from_its_place(
    front: KubeFront, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_watch, "FIRST_SECONDS", 0.1)

    def secrets(watch: bool) -> list[str]:
        verb = "WATCH" if watch else "GET"
        return [request for request in front.requests if request == f"{verb} /api/v1/namespaces/{namespace}/secrets"]

    asked: list[float] = []

    def of_secrets(request: web.BaseRequest) -> bool:
        if not (is_watch(request) and request.path.endswith("/secrets")):
            return False
        asked.append(time.monotonic())
        return True

    front.answer(of_secrets, 429, headers={"Retry-After": "1"}, times=2)
    async with running(front.kubeconfig, namespace=namespace) as operator:
        await operator.works()
        await kube.apply("agentruns", namespace, agent_run("a"))
        await operator.stub.was_asked("a")
        await eventually(lambda: len(asked) == 2, within=20, what="it is refused, and tried again")
        assert asked[1] - asked[0] >= 1.0
        before = operator.stub.asked["a"]
        await kube.secret(namespace, "redis", url="redis://somewhere")
        await operator.stub.was_asked("a", times=before + 1)
        assert len(secrets(watch=False)) == 1, "nothing was listed again"
