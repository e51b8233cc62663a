"""The image as it was built: what it says of itself, who it runs as, and that it needs neither a network nor a writable disk."""

import json

from agentrun import __version__
from harness.commands import run
from harness.system import System

LARGEST = 450_000_000
"""Bytes, with the base image."""
LOOK = """
import json, os
try:
    open("/opt/agentrun/x", "w")
    writable = True
except OSError:
    writable = False
sbom = json.load(open("/opt/agentrun/sbom.cdx.json"))
print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "writable": writable, "sbom": sbom}))
"""


def test_the_image_is_small_labelled_listed_and_runs_as_nobody_on_a_disk_that_is_read_only(system: System) -> None:
    (about,) = json.loads(run(["docker", "image", "inspect", system.image]))
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"]["Entrypoint"] == ["agentrun"]
    assert about["Size"] <= LARGEST
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in about["Config"]["Labels"].items()}
    assert labels["title"] == "agentrun" and labels["version"] == __version__ and labels["licenses"] == "Apache-2.0"
    assert labels["description"]

    closed = ["docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", "--network=none", "--cap-drop=ALL"]
    assert run([*closed, system.image, "--version"]).strip() == __version__

    seen = json.loads(run([*closed, "--entrypoint=python", system.image, "-c", LOOK]))
    assert (seen["uid"], seen["gid"], seen["writable"]) == (10001, 10001, False)
    sbom = seen["sbom"]
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "agentrun" and sbom["metadata"]["component"]["version"] == __version__
    assert {"asyncpg", "kopf", "redis"} <= {one["name"] for one in sbom["components"]}
