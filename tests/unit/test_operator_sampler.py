"""Lanes and their lives, without any Redis: what waits for nothing."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from waiting import eventually

from agentrun.control.scaling import Bounds
from agentrun.maintenance.reaper import Limits
from agentrun_operator.resources import DEPLOYMENTS, Key, Ref
from agentrun_operator.sampler import Sample, Sampler
from agentrun_operator.targets import Target


def target(name: str, url: str) -> Target:
    worker, scheduler = (Ref(DEPLOYMENTS, "shop", f"{name}-{part}") for part in ("worker", "scheduler"))
    return Target(Key("shop", name), f"uid-{name}", url, "", Bounds(0, 10, 1, 60, 300), Limits(30, 30, 1, 3), worker, scheduler)


@pytest.fixture
def samples() -> list[tuple[Key, Sample]]:
    return []


@pytest.fixture
async def sampler(samples: list[tuple[Key, Sample]]) -> AsyncIterator[Sampler]:
    made = Sampler(lambda key, sample: samples.append((key, sample)), tick_seconds=0.05)
    yield made
    await made.aclose()


async def test_agentruns_of_one_redis_share_a_lane(sampler: Sampler, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        sampler.watch(target(name, f"unix://{tmp_path}/one.sock"))
    sampler.watch(target("d", f"unix://{tmp_path}/two.sock"))
    assert sampler.lanes == 2
    sampler.watch(target("d", f"unix://{tmp_path}/one.sock"))
    assert sampler.lanes == 1
    for name in ("a", "b", "c", "d"):
        sampler.forget(Key("shop", name))
    assert sampler.lanes == 0


async def test_nobody_there_means_unknown_not_zero(sampler: Sampler, samples: list[tuple[Key, Sample]], tmp_path: Path) -> None:
    sampler.watch(target("a", f"unix://{tmp_path}/nobody.sock"))
    await eventually(lambda: len(samples) > 2, within=5, what="samples come all the same")
    assert all(sample.demand is None and sample.problem for _, sample in samples)


async def test_what_is_no_url_means_unknown(sampler: Sampler, samples: list[tuple[Key, Sample]]) -> None:
    sampler.watch(target("a", "hello"))
    sampler.watch(target("b", ""))
    await eventually(lambda: {key.name for key, _ in samples} == {"a", "b"}, within=5, what="both are sampled")
    assert all(sample.demand is None for _, sample in samples)


async def test_a_redis_that_hangs_delays_nobody_else(sampler: Sampler, samples: list[tuple[Key, Sample]], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "hangs.sock"))
        hanging.listen()
        sampler.watch(target("hangs", f"unix://{tmp_path}/hangs.sock"))
        sampler.watch(target("works", f"unix://{tmp_path}/nobody.sock"))
        await eventually(lambda: sum(key.name == "works" for key, _ in samples) > 10, within=5, what="the other one is sampled")
    assert sampler.stalled() is None


async def test_a_consumer_that_fails_for_one_agentrun_does_not_stop_the_others(tmp_path: Path) -> None:
    seen: list[str] = []

    def on_sample(key: Key, _sample: Sample) -> None:
        seen.append(key.name)
        if key.name == "bad":
            raise RuntimeError("planted")

    with structlog.testing.capture_logs():
        sampler = Sampler(on_sample, tick_seconds=0.02)
        for name in ("bad", "good"):
            sampler.watch(target(name, f"unix://{tmp_path}/nobody.sock"))
        await eventually(lambda: seen.count("good") > 3 and seen.count("bad") > 3, within=5, what="both are sampled")
        await sampler.aclose()
