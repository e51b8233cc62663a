"""Images that are made from the one under test: another tag, or some files more."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness.commands import run
from harness.system import System

PACKAGE = "/opt/agentrun/lib/python3*/site-packages/agentrun"


def retag(system: System, tag: str) -> str:
    """The image under test under another tag; its name."""
    return derive(system, tag, {})


def derive(system: System, tag: str, files: Mapping[str, str], *, script: str = "") -> str:
    """The image under test with files (by their path in the package `agentrun`) and a script that root runs in the package's folder.

    It is on the cluster's node then. Its name.
    """
    name = f"{system.image.rpartition(':')[0]}:{system.image.rpartition(':')[2]}-{tag}"
    if not files and not script:
        run(["docker", "tag", system.image, name])
    else:
        _build(system.image, name, files, script)
    system.cluster.load(name, again=True)
    return name


def _build(base: str, name: str, files: Mapping[str, str], script: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copies = "".join(
            f"COPY file{number} /tmp/files/\nRUN cd {PACKAGE} && cp /tmp/files/file{number} {path} && chmod 644 {path}\n"
            for number, path in enumerate(files)
        )
        for number, text in enumerate(files.values()):
            (Path(folder) / f"file{number}").write_text(text)
        (Path(folder) / "script.py").write_text(script)
        ran = f"COPY script.py /tmp/script.py\nRUN cd {PACKAGE} && python /tmp/script.py\n" if script else ""
        (Path(folder) / "Dockerfile").write_text(f"FROM {base}\nUSER 0\n{copies}{ran}USER 10001:10001\n")
        run(["docker", "build", "--quiet", "--network=none", "--tag", name, folder], within=180)
