"""Fills a folder with all that the image is built from: wheels for its Python and platform, and a list of them with their hashes.

    python image/wheels.py FOLDER BASE_IMAGE UV

Versions and hashes are those of uv.lock; the project's own wheel is built. Needs uv, pip, Docker and an index of Python packages.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

# What a base image says about itself. The names are those of environment markers (PEP 508).
_ASK = """
import json, os, platform, sys, sysconfig
print(json.dumps({
    "os_name": os.name, "sys_platform": sys.platform, "platform_system": platform.system(), "platform_machine": platform.machine(),
    "implementation_name": sys.implementation.name, "platform_python_implementation": platform.python_implementation(),
    "python_version": "%d.%d" % sys.version_info[:2], "python_full_version": platform.python_version(),
    "musl": "musl" in (sysconfig.get_config_var("MULTIARCH") or ""), "libc": platform.libc_ver()[1],
}))
"""


@dataclass(frozen=True)
class Target:
    """The Python that the wheels are for."""

    markers: dict[str, str]
    platforms: list[str]
    """Platform tags of wheels that it takes (PEP 600, PEP 656), best first."""


def target_of(base_image: str) -> Target:
    """Asks the base image's own Python."""
    told = json.loads(_run("docker", "run", "--rm", "--network=none", "--entrypoint=python", base_image, "-c", _ASK))
    musl, libc, machine = told.pop("musl"), told.pop("libc"), told["platform_machine"]
    if musl:
        return Target(told, [f"musllinux_1_{minor}_{machine}" for minor in (2, 1, 0)])
    newest = int(libc.split(".")[1])
    return Target(told, [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)] + [f"manylinux2014_{machine}"])


def locked(uv: str) -> str:
    """What uv.lock holds for the image, as requirements with markers and hashes; without the project itself and what is for development."""
    return _run(
        uv, "export", "--locked", "--quiet", "--no-default-groups", "--no-emit-project", "--no-annotate", "--no-header", cwd=ROOT
    )


def needed(exported: str, target: Target) -> list[str]:
    """The lines `name==version --hash=… --hash=…` of what the target needs."""
    lines = []
    for line in exported.replace("\\\n", " ").splitlines():
        requirement, *hashes = line.split(" --hash=")
        wanted = Requirement(requirement.strip())
        if wanted.marker is None or wanted.marker.evaluate(dict(target.markers)):
            lines.append(" --hash=".join([f"{wanted.name}{wanted.specifier}", *(one.strip() for one in hashes)]))
    return lines


def fetch(lines: list[str], target: Target, folder: Path) -> None:
    """Downloads the wheels, unless they are there from last time. pip compares the hashes."""
    fingerprint = hashlib.sha256("\n".join([*lines, *target.platforms, target.markers["python_version"]]).encode()).hexdigest()
    stamp, wheels = folder / "fetched", folder / "wheels"
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    shutil.rmtree(folder, ignore_errors=True)
    wheels.mkdir(parents=True)
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(lines) + "\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"),
            *("--only-binary=:all:", "--implementation=cp", f"--python-version={target.markers['python_version']}"),
            *(f"--platform={tag}" for tag in target.platforms),
            *(f"--dest={wheels}", f"--requirement={wanted}"),
        ],
        check=True,
    )
    stamp.write_text(fingerprint)


def build(uv: str, folder: Path) -> None:
    """Builds the project's own wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    _run(uv, "build", "--quiet", "--wheel", f"--out-dir={folder}", cwd=ROOT)
    (folder / ".gitignore").unlink(missing_ok=True)
    (wheel,) = folder.glob("agentrun-*.whl")
    version = wheel.name.split("-")[1]
    (folder / "requirements.txt").write_text(
        f"agentrun=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    )
    shutil.copy(Path(__file__).with_name("sbom.py"), folder)


def main(folder: Path, base_image: str, uv: str) -> None:
    """Makes the folder; repeated calls fetch only what changed."""
    target = target_of(base_image)
    fetch(needed(locked(uv), target), target, folder)
    build(uv, folder / "own")


def _run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3])
