"""`make up` and `make down`: the whole system on a kind cluster, with an example to try."""

import sys

from harness import agents, diagnostics
from harness.commands import CommandError
from harness.system import ROOT, System

NAMESPACE = "demo"
REPORT = ROOT / ".pytest_cache" / "e2e" / "make-up"
NAME = "assistant"
EXAMPLE = ROOT / "examples" / "cluster" / "agentrun.yaml"
HINT = """
It is Ready. Try it:

    kubectl {context} get agents
    kubectl {context} port-forward svc/{name}-gateway 8080:80 &
    KEY=$(kubectl {context} get secret demo-key -o jsonpath='{{.data.key}}' | base64 -d)
    curl -N http://127.0.0.1:8080/v1/sessions/one/messages -H "Authorization: Bearer $KEY" \\
         -H "Content-Type: application/json" -H "Accept: text/event-stream" -d '{{"input": "Hello!"}}'

    make down       # when you have seen enough"""


def main(what: str) -> None:
    system = System()
    try:
        if what == "down":
            system.down()
        else:
            up(system)
    except CommandError as error:
        if what == "up":
            diagnostics.collect(system, NAMESPACE, REPORT)
            say(f"diagnostics: {REPORT}")
        sys.exit(f"{what}: {error}")


def up(system: System) -> None:
    """Each step says what it does; what is there already stays."""
    system.up(say)
    system.step(say, "operator", system.chart.install)
    system.step(say, f"AgentRun {NAMESPACE}/{NAME}", lambda: example(system))
    say(HINT.format(context=f"--context {system.kubectl.context} -n {NAMESPACE}", name=NAME))


def example(system: System) -> None:
    """The example AgentRun and CronTask, until it is Ready."""
    kubectl = system.kubectl
    if kubectl.find("secret", "database", NAMESPACE) is None:
        given = agents.credentials(system.new_database(NAMESPACE), system.redis_url)
        kubectl.apply([agents.namespace(NAMESPACE)])
        kubectl.apply([*given.documents, agents.secret("demo-key", {"key": given.api_key})], NAMESPACE)
    kubectl("apply", "-n", NAMESPACE, "-f", str(EXAMPLE))
    kubectl.wait(f"agentrun/{NAME}", "condition=Ready", NAMESPACE, within=120)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
