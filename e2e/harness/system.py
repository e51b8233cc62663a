"""Everything that an AgentRun needs around it: cluster, image, stores, operator. Made once and used by all scenarios."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from harness.chart import Chart
from harness.cluster import Cluster
from harness.commands import run

ROOT = Path(__file__).parents[2]
STORES = Path(__file__).parents[1] / "stores"
STORES_NAMESPACE = "stores"
STORE_IMAGES = ("postgres:17", "valkey/valkey:8")
"""As e2e/stores names them. The variable STORE_IMAGES names others in the same order, such as those of a mirror."""
PASSWORD = "try-me"
CRDS = ("agentruns.agentrun.dev", "crontasks.agentrun.dev")
CLUSTER = os.environ.get("CLUSTER", "agentrun")
IMAGE = os.environ.get("IMAGE", "agentrun:dev")


class System:
    """The whole system on one kind cluster."""

    def __init__(self, name: str = CLUSTER, image: str = IMAGE) -> None:
        self.cluster = Cluster(name)
        self.kubectl = self.cluster.kubectl
        self.chart = Chart(self.cluster, image)
        self.image = image

    def up(self, say: Callable[[str], None]) -> None:
        """Cluster, image and stores; what is there already stays. One line per step."""
        self.step(say, f"cluster {self.cluster.name}", self.cluster.make)
        self.step(say, f"image {self.image}", self._image)
        self.step(say, "stores", self._stores)

    def down(self) -> None:
        """Takes the cluster down."""
        self.cluster.remove()

    def new_database(self, name: str) -> str:
        """The URL of a fresh database, as pods of the cluster reach it."""
        self.psql("postgres", f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self.psql("postgres", f'CREATE DATABASE "{name}"')
        return self.database_url(name)

    @staticmethod
    def database_url(name: str, role: str = "postgres", password: str = PASSWORD) -> str:
        """As pods of the cluster reach a database."""
        return f"postgresql://{role}:{password}@postgres.{STORES_NAMESPACE}:5432/{name}"

    def delete_definitions(self) -> None:
        """Deletes the CRDs, and with them all AgentRuns and CronTasks."""
        self.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=90s", within=100)

    @property
    def redis_url(self) -> str:
        """As pods of the cluster reach it."""
        return f"redis://valkey.{STORES_NAMESPACE}:6379/0"

    def psql(self, database: str, statement: str) -> str:
        """What a statement says, without decoration: rows by lines, columns by |."""
        command = ["psql", f"postgresql://postgres:{PASSWORD}@127.0.0.1/{database}", "-v", "ON_ERROR_STOP=1", "-qAtc", statement]
        return self.kubectl("exec", "-n", STORES_NAMESPACE, "statefulset/postgres", "--", *command).strip()

    def valkey(self, *command: str) -> str:
        """What valkey-cli says."""
        return self.kubectl("exec", "-n", STORES_NAMESPACE, "deploy/valkey", "--", "valkey-cli", *command).strip()

    def _image(self) -> None:
        run(["make", "-C", str(ROOT), "image", f"IMAGE={self.image}"], within=900)
        self.cluster.load(self.image, again=True)

    def _stores(self) -> None:
        manifests = "\n---\n".join(file.read_text() for file in sorted(STORES.glob("*.yaml")))
        chosen = os.environ.get("STORE_IMAGES", "").split() or STORE_IMAGES
        for image, used in zip(STORE_IMAGES, chosen, strict=True):
            self.cluster.load(used)
            manifests = manifests.replace(f"image: {image}\n", f"image: {used}\n")
        self.kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": STORES_NAMESPACE}}])
        self.kubectl("apply", "-n", STORES_NAMESPACE, "-f", "-", stdin=manifests)
        for name in ("statefulset/postgres", "deployment/valkey"):
            self.kubectl("rollout", "status", "-n", STORES_NAMESPACE, name, "--timeout=120s", within=150)

    @staticmethod
    def step(say: Callable[[str], None], what: str, work: Callable[[], None]) -> None:
        """Does it, and says how long it took."""
        started = time.monotonic()
        say(f"{what} …")
        work()
        say(f"{what}: {time.monotonic() - started:.0f} s")
