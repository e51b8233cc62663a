"""What the image is built from: a Dockerfile for any builder, and a list of what is installed."""

import importlib.util
import json
import re
from importlib.metadata import distributions, entry_points
from pathlib import Path
from types import ModuleType

from agentrun import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"image_{name}", ROOT / "image" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)


def test_the_classic_builder_can_read_it() -> None:
    assert not re.findall(r"# *syntax=|--mount|--chmod|--link|--network|<<", DOCKERFILE)


def test_it_fetches_nothing_while_it_builds() -> None:
    installs = [one for one in instructions("RUN") if "pip install" in one]

    assert len(installs) == 2, "the dependencies, and then the project"
    assert all("--no-index" in one and "--require-hashes" in one for one in installs)
    assert instructions("ADD") == []
    assert not re.findall(r"apt|apk|curl|wget|https?://", " ".join(instructions("RUN")))


def test_both_stages_take_the_base_image_that_is_given() -> None:
    assert instructions("ARG")[0] == "BASE_IMAGE=python:3.13-slim"
    assert [one.partition(" ")[0] for one in instructions("FROM")] == ["${BASE_IMAGE}", "${BASE_IMAGE}"]


def test_it_runs_as_a_number_that_kubernetes_can_tell_from_root() -> None:
    (user,) = instructions("USER")

    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


def test_qw_05_the_program_itself_is_process_1_and_gets_the_signals() -> None:
    """A list, so without a shell."""
    (entrypoint,) = instructions("ENTRYPOINT")

    assert json.loads(entrypoint) == ["agentrun"]
    assert instructions("CMD") == instructions("SHELL") == []
    assert [one.value for one in entry_points(group="console_scripts", name="agentrun")] == ["agentrun.cli:main"]


def test_nothing_but_the_wheels_goes_to_the_builder() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    assert lines == ["*", "!dist/image"]


def test_the_list_of_what_is_installed_is_cyclonedx() -> None:
    installed = list(distributions())
    document = load("sbom").document(installed)

    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert document["metadata"]["component"]["purl"] == f"pkg:pypi/agentrun@{__version__}"
    purls = [component["purl"] for component in document["components"]]
    assert purls == sorted(purls)
    names = {component["name"] for component in document["components"]}
    assert {"asyncpg", "kopf", "pydantic-ai-slim", "typing-extensions"} <= names
    assert len(names) == len({found.metadata["Name"].lower().replace("_", "-").replace(".", "-") for found in installed}) - 1


def test_requirements_are_those_of_the_lock_for_the_images_python() -> None:
    wheels = load("wheels")
    machine = {"platform_machine": "x86_64", "python_version": "3.13", "python_full_version": "3.13.5"}
    linux = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    target = wheels.Target({**machine, **linux, "platform_python_implementation": "CPython"}, [])

    exported = "a==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==2 ; sys_platform == 'win32' \\\n    --hash=sha256:cc\n"
    assert wheels.needed(exported, target) == ["a==1 --hash=sha256:aa --hash=sha256:bb"]
