"""The release as a whole: install, upgrade, roll back, uninstall, and the deletion of what others stand on. Nothing hangs."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import eventually

from harness import agents, history
from harness.chart import CHART, NAMESPACE, Chart
from harness.commands import CommandError
from harness.images import derive
from harness.invariants import API_STARTS_ANEW
from harness.shop import WORK, Shop
from harness.system import CRDS, ROOT
from harness.watching import every_pod

pytestmark = pytest.mark.full

FORMER = """
import yaml
path = "crds/agentruns.yaml"
crd = yaml.safe_load(open(path))
crd["metadata"]["annotations"]["agentrun.dev/version"] = "0.0.9"
for version in crd["spec"]["versions"]:
    whole = version["schema"]["openAPIV3Schema"]["properties"]
    del whole["spec"]["properties"]["suspend"], whole["status"]["properties"]["schema"]
open(path, "w").write(yaml.safe_dump(crd))
"""
"""Takes a field of the spec and one of the status out of the CRD: so it is before a version that adds them."""


@pytest.fixture
def disturbed(shop: Shop) -> Iterator[Shop]:
    """A scenario that does things to the release. The one that the others use is there again afterwards."""
    shop.allowed.operators_replaced = True
    shop.allowed.error("operator", API_STARTS_ANEW)
    yield shop
    shop.system.chart.install()


async def test_he_03_into_an_empty_namespace_ready_in_one_go_with_one_migration(
    disturbed: Shop, say: Callable[[str], None]
) -> None:
    """On an external database only: the chart brings none."""
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    chart.uninstall()
    shop.system.delete_definitions()
    kubectl.delete("namespace", NAMESPACE, within=90)

    started = time.monotonic()
    with every_pod(kubectl, shop.namespace) as seen:
        chart.install()
        shop.apply(agents.agent_run("jobs", WORK))
        shop.ready("jobs", within=300 - (time.monotonic() - started))
        say(f"from nothing to Ready: {time.monotonic() - started:.0f} s (at most 300)")
        assert len(seen.created("migrate")) == 1
    gateway = shop.gateway("jobs")
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


async def test_he_07_he_08_upgrades_without_a_change_restart_nothing_and_a_hook_that_failed_blocks_no_later_one(
    disturbed: Shop, tmp_path: Path
) -> None:
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    chart.install()
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    before = shop.uids("jobs"), operators(shop), secrets(shop)
    jobs = [hook(shop)["metadata"]["uid"]]
    for _ in range(2):
        chart.install()
        jobs.append(hook(shop)["metadata"]["uid"])
        assert "agentruns.agentrun.dev" in kubectl("logs", "-n", NAMESPACE, f"job/{chart.release}-crds")
    assert (shop.uids("jobs"), operators(shop), secrets(shop)) == before
    assert len(set(jobs)) == 3, "each upgrade has a Job of its own"

    broken = tmp_path / "agentrun"
    shutil.copytree(CHART, broken)
    template = broken / "templates" / "crds.yaml"
    text = template.read_text()
    assert "args: [crds, apply]" in text and "backoffLimit: 3" in text
    template.write_text(
        text.replace("args: [crds, apply]", "args: [crds, nonsense]").replace("backoffLimit: 3", "backoffLimit: 0")
    )
    with pytest.raises(CommandError):
        chart.install(chart=broken, within=60)
    assert any(one["type"] == "Failed" for one in hook(shop)["status"]["conditions"])
    assert "nonsense" in kubectl("logs", "-n", NAMESPACE, f"job/{chart.release}-crds")
    chart.install()
    assert any(one["type"] == "Complete" for one in hook(shop)["status"]["conditions"])
    assert (shop.uids("jobs"), operators(shop)) == before[:2]
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


def operators(shop: Shop) -> set[str]:
    """The uids of the operator's pods. That no container was restarted holds for all scenarios."""
    return {pod["metadata"]["uid"] for pod in shop.system.chart.operator_pods()}


def hook(shop: Shop) -> dict[str, Any]:
    """The Job that brings the CRDs in."""
    return shop.kubectl.get("job", f"{shop.system.chart.release}-crds", NAMESPACE)


def secrets(shop: Shop) -> dict[str, str]:
    """The Secrets of the operator's namespace, but for helm's own, and those of the AgentRun."""
    items = [*shop.kubectl.items("secrets", NAMESPACE), *shop.kubectl.items("secrets", shop.namespace)]
    return {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in items if not one["type"].startswith("helm.sh")}


async def test_he_01_he_02_the_release_of_an_earlier_commit_is_upgraded_to_this_one(
    disturbed: Shop, tmp_path: Path, say: Callable[[str], None]
) -> None:
    shop, chart = disturbed, disturbed.system.chart
    commit = history.changed_since("charts", "crds")
    if commit is None:
        pytest.skip("there is no earlier commit with other charts/ or crds/: no git history here")
    say(f"the earlier release is that of {commit[:12]}")
    former = history.image(shop.system, commit, tmp_path)
    chart.uninstall()
    shop.system.delete_definitions()
    chart.install(chart=tmp_path / "charts" / "agentrun", image=former)
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    runs = [gateway.submit("until upgraded")["run_id"], gateway.submit("0.1")["run_id"]]
    await eventually(lambda: gateway.run(runs[1])["status"] == "succeeded", within=60, what="the earlier release works")

    chart.install()

    (today,) = yaml.safe_load((ROOT / "crds" / "agentruns.yaml").read_text())["spec"]["versions"]
    for part in ("spec", "status"):
        assert properties(shop, part) == set(today["schema"]["openAPIV3Schema"]["properties"][part]["properties"])
    await eventually(lambda: images(shop) == {shop.system.image}, within=120, what="all pods have the new image")
    shop.ready("jobs", within=120)
    shop.mark("upgraded")
    runs.append(gateway.submit("0.1")["run_id"])
    await shop.done(gateway, runs, within=90)
    assert set(shop.outcomes()) <= {"finished", "handed_back"}, "no attempt was lost"
    chart.test()


def images(shop: Shop) -> set[str]:
    """The images of an AgentRun's pods."""
    pods = [pod for part in ("gateway", "worker", "scheduler") for pod in shop.pods("jobs", part)]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


async def test_he_01_an_upgrade_brings_a_new_field_and_old_definitions_are_said(disturbed: Shop, tmp_path: Path) -> None:
    """The operator says so in conditions and goes on working, where the case asks for unreadiness (decision 0110)."""
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    former = derive(shop.system, "former", {}, script=FORMER)
    chart.uninstall()
    shop.system.delete_definitions()
    chart.install(chart=of_version(tmp_path, "0.0.9"), image=former)
    gateway = shop.agent("jobs", WORK, image=shop.system.image)
    with pytest.raises(CommandError, match="suspend"):
        shop.apply(agents.agent_run("jobs", WORK, image=shop.system.image, suspend=False))

    # The operator of this version on definitions of the former one says so.
    chart.install({"crds": {"install": False}}, wait=False)
    await eventually(lambda: says_old(shop), within=60, what="old definitions are said")

    chart.install()
    assert "suspend" in properties(shop, "spec") and "schema" in properties(shop, "status")
    shop.apply(agents.agent_run("jobs", WORK, image=shop.system.image, suspend=True))
    assert kubectl.get("agentrun", "jobs", shop.namespace)["spec"]["suspend"] is True, "the field is kept"
    await shop.says("jobs", "Suspended", within=90)
    shop.change("jobs", suspend=None)
    shop.ready("jobs", within=90)
    assert not says_old(shop)
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)

    chart.uninstall()
    assert kubectl.find("agentrun", "jobs", shop.namespace), "an uninstall deletes nobody's objects"


def of_version(folder: Path, version: str) -> Path:
    """The chart as a former version."""
    copy = folder / "agentrun"
    shutil.copytree(CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": version, "appVersion": version}))
    return copy


def properties(shop: Shop, part: str) -> set[str]:
    """The members of an AgentRun's spec or status by its CRD."""
    (version,) = shop.kubectl.get("crd", CRDS[0])["spec"]["versions"]
    return set(version["schema"]["openAPIV3Schema"]["properties"][part]["properties"])


def says_old(shop: Shop) -> bool:
    _, message = shop.condition("jobs", "Accepted")
    return "the CRDs are older than this operator" in message


async def test_in_namespaced_mode_there_are_only_roles_and_other_namespaces_are_left_alone(disturbed: Shop) -> None:
    shop, kubectl, system = disturbed, disturbed.kubectl, disturbed.system
    system.chart.uninstall()
    other = f"{shop.namespace}-other"
    team = Chart(system.cluster, system.image, release="team", namespace=f"{shop.namespace}-operator")
    kubectl.apply([agents.namespace(other), agents.namespace(team.namespace)])
    try:
        team.install({"watchNamespaces": [shop.namespace]})
        owned = "app.kubernetes.io/instance=team"
        for kind in ("clusterroles", "clusterrolebindings"):
            assert kubectl("get", kind, "-l", owned, "-o", "name").split() == []
        account = f"system:serviceaccount:{team.namespace}:team-agentrun"
        bound = [one["metadata"]["name"] for one in kubectl.items("clusterrolebindings") if account in subjects(one)]
        assert bound == []
        kubectl.apply([agents.agent_run("stranger", WORK)], other)
        gateway = shop.agent("jobs", WORK)
        await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)
        shop.apply(agents.cron_task("each-minute", "jobs"))
        kubectl.wait("crontask/each-minute", "condition=Accepted", shop.namespace, within=30)
        assert "status" not in kubectl.get("agentrun", "stranger", other)
        assert kubectl("get", "deployments,jobs,pods", "-n", other, "-o", "name").split() == []
        forbidden = [
            line
            for pod in team.operator_pods()
            for line in kubectl("logs", "-n", team.namespace, pod["metadata"]["name"]).splitlines()
            if "orbidden" in line
        ]
        assert forbidden == []
        shop.remove_agents(besides=[f"{kind}/team-agentrun" for kind in ("role", "rolebinding")])
    finally:
        team.uninstall()
        for name in (other, team.namespace):
            kubectl.delete("namespace", name, within=90)


def subjects(binding: dict[str, Any]) -> set[str]:
    """The service accounts of a binding."""
    return {
        f"system:serviceaccount:{one.get('namespace')}:{one['name']}"
        for one in binding.get("subjects") or ()
        if one["kind"] == "ServiceAccount"
    }


async def test_ko_01_an_uninstall_without_an_operator_ends_and_what_is_left_serves_and_can_be_deleted(disturbed: Shop) -> None:
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    gateway = shop.agent("jobs", WORK, workers={"minReplicas": 1})
    before = shop.uids("jobs")
    kubectl("scale", "-n", NAMESPACE, f"deployment/{chart.release}", "--replicas=0")
    await eventually(lambda: not chart.operator_pods(), within=60, what="no operator is left")

    started = time.monotonic()
    chart.uninstall(within=60)
    assert time.monotonic() - started < 60
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=30)
    assert shop.uids("jobs") == before

    chart.install()
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)
    shop.remove_agents()
    shop.psql("UPDATE meta SET owner = NULL")
    gateway = shop.agent("again", WORK)
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


async def test_ko_01_a_namespace_goes_with_an_agentrun_and_a_crontask_in_it_also_together_with_the_operator(
    disturbed: Shop,
) -> None:
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    doomed = Shop(shop.system, f"{shop.namespace}-doomed")
    doomed.open()
    doomed.agent("jobs", WORK, workers={"minReplicas": 1})
    doomed.apply(agents.cron_task("each-minute", "jobs"))
    kubectl.wait("crontask/each-minute", "condition=Accepted", doomed.namespace, within=30)
    kubectl.delete("namespace", doomed.namespace, within=90)
    shop.agent("jobs", WORK)  # the operator works on

    # The operator's own namespace, with an AgentRun in it.
    beside = Shop(shop.system, NAMESPACE)
    beside.open()
    beside.agent("beside", WORK, workers={"minReplicas": 1})
    beside.apply(agents.cron_task("each-minute", "beside"))
    kubectl.delete("namespace", NAMESPACE, within=90)
    assert not any(one["metadata"]["namespace"] == NAMESPACE for one in kubectl.items("agentruns"))

    chart.install()
    shop.change("jobs", workers={"minReplicas": 1})
    shop.ready("jobs", within=60)
    await eventually(lambda: len(shop.pods("jobs", "worker")) == 1, within=60, what="the new operator works")


async def test_the_definitions_are_deleted_with_agentruns_in_use_and_an_installation_afterwards_works(disturbed: Shop) -> None:
    shop, chart, kubectl = disturbed, disturbed.system.chart, disturbed.kubectl
    # Its watches end with the definitions; it ends, too, and waits for them as a new process.
    shop.allowed.error("operator", "the watches ended", "has failed: 404 page not found")
    shop.allowed.restarts["operator"] = 4
    shop.agent("jobs", WORK, workers={"minReplicas": 1})
    shop.apply(agents.cron_task("each-minute", "jobs"))

    shop.system.delete_definitions()

    await eventually(
        lambda: not kubectl("get", "deployments,services,configmaps,jobs,pods", "-n", shop.namespace,
                            "-l", "agentrun.dev/agentrun", "-o", "name").split(),
        within=90,
        what="what followed from them goes, too",
    )  # fmt: skip
    await eventually(lambda: waits_for_definitions(shop), within=90, what="the operator says what it waits for")
    chart.install()
    chart.test()
    gateway = shop.agent("jobs", WORK)
    await shop.done(gateway, [gateway.submit("0.1")["run_id"]], within=60)


def waits_for_definitions(shop: Shop) -> bool:
    """Whether an operator says that its definitions are not there."""
    names = [pod["metadata"]["name"] for pod in shop.system.chart.operator_pods()]
    return any("not installed" in shop.kubectl("logs", "-n", NAMESPACE, name, "--tail=5") for name in names)
