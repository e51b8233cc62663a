"""A namespace in which one scenario lives."""

import contextlib
import json
import time
from collections.abc import Collection
from typing import Any

import httpx2
from waiting import eventually

from harness import agents
from harness.gateway import Gateway
from harness.invariants import Allowed
from harness.kubectl import Document
from harness.system import System

TOOLS = {"model": "openai:gpt-4.1", "instructions": "You run a shop.", "tools": ["shop:charge"]}
WORK = {"entrypoint": "shop:work"}
MADE = "deployments,replicasets,pods,jobs,services,configmaps,networkpolicies,poddisruptionbudgets"
"""The kinds of what follows from an AgentRun."""


class Shop:
    """Secrets, code and a provider; `agent` makes an AgentRun and returns a client of its gateway."""

    def __init__(self, system: System, namespace: str, allowed: Allowed | None = None) -> None:
        self.system = system
        self.kubectl = system.kubectl
        self.namespace = namespace
        self.allowed = allowed or Allowed()
        """What the scenario brings about, apart from which nothing may fail."""
        self._own = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
        """What there may be besides the provider without an AgentRun, as kind/name."""
        self._credentials = agents.credentials(system.new_database(namespace), system.redis_url)
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Makes the namespace and what every AgentRun in it needs."""
        self.kubectl.apply([agents.namespace(self.namespace)])
        self.apply(*self._credentials.documents, agents.code(), *agents.provider(self.system.image))

    def apply(self, *documents: Document) -> None:
        """Applies documents in this namespace."""
        self._own |= {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in documents}
        self.kubectl.apply(documents, self.namespace)

    def agent(self, name: str, agent: dict[str, Any], *, ready_within: float = 60.0, **spec: Any) -> Gateway:
        """An AgentRun, Ready within so many seconds."""
        self.kubectl("rollout", "status", "-n", self.namespace, "deployment/provider", "--timeout=60s", within=90)
        self.apply(agents.agent_run(name, agent, **spec))
        self.kubectl.wait(f"agentrun/{name}", "condition=Ready", self.namespace, within=ready_within)
        return self.gateway(name)

    def gateway(self, name: str) -> Gateway:
        """A client of an AgentRun's gateway."""
        client = Gateway(self.kubectl, self.namespace, name, self._credentials.api_key)
        self._open.callback(client.close)
        return client

    def change(self, name: str, **spec: Any) -> None:
        """Changes members of an AgentRun's spec; None takes one away."""
        self.kubectl(
            "patch", "agentrun", name, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec})
        )  # fmt: skip

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Reason and message of an AgentRun's condition; empty without one."""
        found = self.kubectl.condition("agentrun", name, self.namespace, kind) or {}
        return str(found.get("reason", "")), str(found.get("message", ""))

    async def says(self, name: str, reason: str, *, within: float, kind: str = "Ready") -> str:
        """The message of a condition as soon as it has that reason. What `kubectl describe` shows has it in one line, too."""
        await eventually(lambda: self.condition(name, kind)[0] == reason, within=within, what=f"{kind} of {name} says {reason}")
        _, message = self.condition(name, kind)
        assert message in self.kubectl("describe", "arun", name, "-n", self.namespace)
        return message

    def ready(self, name: str, *, within: float = 60.0) -> None:
        """Waits until an AgentRun is Ready and says so of its present spec."""
        generation = self.kubectl.get("agentrun", name, self.namespace)["metadata"]["generation"]
        where = f"agentrun/{name}"
        self.kubectl.wait(where, f"jsonpath={{.status.observedGeneration}}={generation}", self.namespace, within=within)
        self.kubectl.wait(where, "condition=Ready", self.namespace, within=within)

    def uids(self, name: str) -> dict[str, str]:
        """The uids of all pods of an AgentRun by their names, and how often their containers were restarted."""
        pods = self.kubectl.items("pods", self.namespace, labels=f"agentrun.dev/agentrun={name}")
        found = {}
        for one in pods:
            if one["metadata"]["labels"]["app.kubernetes.io/component"] != "migrate":
                restarts = sum(container["restartCount"] for container in one["status"]["containerStatuses"])
                found[one["metadata"]["name"]] = f"{one['metadata']['uid']} {restarts}"
        return found

    async def done(self, gateway: Gateway, runs: list[str], *, within: float) -> None:
        """All runs succeed, the gateway says so too, and the provider has counted each of them once."""
        statement = f"SELECT count(*) FROM runs WHERE status = 'succeeded' AND id IN ({', '.join(repr(run) for run in runs)})"
        await eventually(lambda: int(self.psql(statement)) == len(runs), within=within, what="all runs succeed")
        states = {run: gateway.run(run)["status"] for run in runs}
        assert set(states.values()) == {"succeeded"}, states
        counts = self.counts()
        wrong = {run: counts.get(f"done-{run}", 0) for run in runs if counts.get(f"done-{run}", 0) != 1}
        assert not wrong, f"not done once: {wrong}"

    def pods(self, name: str, component: str) -> list[Document]:
        """The pods of an AgentRun's component that are not being deleted."""
        labels = f"agentrun.dev/agentrun={name},app.kubernetes.io/component={component}"
        return [
            one for one in self.kubectl.items("pods", self.namespace, labels=labels) if "deletionTimestamp" not in one["metadata"]
        ]

    def generations(self, name: str) -> dict[str, int]:
        """How often the specs of an AgentRun's Deployments were changed."""
        found = self.kubectl.items("deployments", self.namespace, labels=f"agentrun.dev/agentrun={name}")
        return {one["metadata"]["name"]: one["metadata"]["generation"] for one in found}

    def outcomes(self) -> dict[str, int]:
        """How attempts have ended, and how many so."""
        rows = self.psql("SELECT outcome, count(*) FROM attempts GROUP BY outcome").splitlines()
        return {outcome: int(count) for outcome, count in (row.split("|") for row in rows)}

    def counts(self) -> dict[str, int]:
        """What the provider has counted."""
        with self.kubectl.forward("service/provider", agents.PROVIDER_PORT, self.namespace) as port:
            return dict(httpx2.get(f"http://127.0.0.1:{port}/counts", timeout=10).json())

    def psql(self, statement: str) -> str:
        """A statement on this namespace's database."""
        return self.system.psql(self.namespace, statement)

    def database_url(self, role: str, password: str) -> str:
        """The URL of this namespace's database for another role."""
        return self.system.database_url(self.namespace, role, password)

    def mark(self, name: str) -> None:
        """Counts a name at the provider: agents that work until then go on."""
        with self.kubectl.forward("service/provider", agents.PROVIDER_PORT, self.namespace) as port:
            httpx2.post(f"http://127.0.0.1:{port}/marks/{name}", timeout=10).raise_for_status()

    def remove_agents(self, *, besides: Collection[str] = ()) -> None:
        """Deletes AgentRuns and CronTasks; fails unless everything that followed from them goes too, within a minute.

        `besides` is what somebody else has put into the namespace, as kind/name.
        """
        self.kubectl("delete", "crontasks,agentruns", "--all", "-n", self.namespace, "--wait", "--timeout=60s", within=90)
        deadline = time.monotonic() + 60
        while left := [one for one in self.left() if one not in besides]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.5)

    def left(self) -> list[str]:
        """What there is in the namespace, of any kind, that neither the scenario nor its provider has made."""
        kinds = self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        asked = ",".join(kind for kind in kinds if kind.partition(".")[0] != "events")
        found = [name.partition("/") for name in self.kubectl("get", asked, "-n", self.namespace, "-o", "name").split()]
        return [
            plain
            for kind, _, name in found
            if (plain := f"{kind.partition('.')[0]}/{name}") not in self._own and not name.startswith("provider")
        ]

    def close(self) -> None:
        """Ends the port-forwards."""
        self._open.close()
