"""One kind cluster: made, filled with images, broken on purpose, and taken down."""

import os
import shlex

from harness.commands import CommandError, run
from harness.kubectl import Kubectl


class Cluster:
    """A kind cluster of one node by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kubectl = Kubectl(f"kind-{name}")
        self.node = f"{name}-control-plane"

    @property
    def context(self) -> str:
        """What kubectl and helm call it."""
        return self.kubectl.context

    def exists(self) -> bool:
        """Whether it is there and answers."""
        return self.name in run(["kind", "get", "clusters"]).split()

    def make(self) -> None:
        """Makes it unless it exists. KIND_NODE_IMAGE names another node image than kind's own."""
        if not self.exists():
            image = os.environ.get("KIND_NODE_IMAGE", "")
            run(
                ["kind", "create", "cluster", "--name", self.name, "--wait", "180s", *(["--image", image] if image else [])],
                within=600,
            )

    def remove(self) -> None:
        """Takes it down with everything in it."""
        run(["kind", "delete", "cluster", "--name", self.name], within=180)

    def load(self, image: str, *, again: bool = False) -> None:
        """Brings an image, pulled if this machine lacks it, onto the node. One of that name on the node stays, unless `again`."""
        if not again and any(name.endswith(image) for name in self._images()):
            return
        if not _is_here(image):
            run(["docker", "pull", "--quiet", image], within=600)
        run(["kind", "load", "docker-image", "--name", self.name, image], within=300)

    def _images(self) -> list[str]:
        nodes = self.kubectl.items("nodes")
        return [name for node in nodes for image in node["status"].get("images", []) for name in image.get("names", [])]

    def on_node(self, script: str, *, within: float = 60.0) -> str:
        """What a shell command says that runs as root on the node."""
        return run(["docker", "exec", self.node, "sh", "-c", script], within=within)

    def kill(self, pod_uid: str, *, signal: str = "KILL", command: str = "agentrun") -> int:
        """Sends a signal to the processes of a pod whose command line has this word, from outside, as the kernel would; how many."""
        cgroup = pod_uid.replace("-", "[-_]")
        script = f"""
            count=0
            for process in /proc/[0-9]*; do
                grep -q {shlex.quote(cgroup)} "$process/cgroup" 2>/dev/null || continue
                tr '\\0' ' ' < "$process/cmdline" | grep -q {shlex.quote(command)} || continue
                kill -s {shlex.quote(signal)} "${{process#/proc/}}" && count=$((count + 1))
            done
            echo $count"""
        return int(self.on_node(script))

    def restart_node(self) -> None:
        """Restarts the machine that the cluster runs on."""
        run(["docker", "restart", self.node], within=180)


def _is_here(image: str) -> bool:
    try:
        run(["docker", "image", "inspect", image])
    except CommandError:
        return False
    return True
