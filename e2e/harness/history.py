"""Earlier states of this project: what somebody has installed who upgrades now."""

import tarfile
from io import BytesIO
from pathlib import Path
from subprocess import run as start

from harness.commands import CommandError, run
from harness.system import ROOT, System


def changed_since(*folders: str) -> str | None:
    """The last commit of the main line that touched these folders and has other contents in them than this tree; None without one."""
    try:
        commits = run(["git", "-C", str(ROOT), "log", "--first-parent", "--format=%H", "-50", "--", *folders]).split()
    except CommandError:
        return None
    return next((commit for commit in commits if _differs(commit, folders)), None)


def _differs(commit: str, folders: tuple[str, ...]) -> bool:
    return start(["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *folders], check=False).returncode == 1


def image(system: System, commit: str, folder: Path) -> str:
    """Writes the whole commit into a folder, and builds its image, which is on the cluster's node then; the image's name."""
    archive = start(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    name = f"{system.image}-earlier"
    uv = run(["make", "-C", str(ROOT), "--silent", "--eval", "print-uv: ; @echo $(abspath $(UV))", "print-uv"]).strip()
    run(["make", "-C", str(folder), "image", f"IMAGE={name}", f"UV={uv}"], within=900)
    system.cluster.load(name, again=True)
    return name
