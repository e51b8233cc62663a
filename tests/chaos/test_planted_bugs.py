"""Plants each bug in a copy of the product and sees its test go red: `make test-planted`. `make test-slow` plants the quick ones."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from planted_bugs import BUGS, Bug, table

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "services" / "agentrun"
ALL = os.environ.get("AGENTRUN_PLANTED") == "all"
SECONDS, SECONDS_A_TEST = 240, 60
GUARD = """
import agentrun
assert agentrun.__file__.startswith({services!r}), agentrun.__file__
"""


def patched(bug: Bug) -> dict[str, str]:
    """The files that the bug changes, with it. Fails if a patch does not fit any more."""
    texts: dict[str, str] = {}
    for patch in bug.patches:
        text = texts.get(patch.file) or (PRODUCT / patch.file).read_text()
        found = text.count(patch.old)
        assert found == patch.times or (patch.times == 0 and found), f"{bug.name}: {patch.old!r} is {found} times in {patch.file}"
        texts[patch.file] = text.replace(patch.old, patch.new)
    return texts


def test_every_bug_can_be_planted() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        for file, text in patched(bug).items():
            assert text != (PRODUCT / file).read_text()
        path, _, name = bug.test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{bug.name}: there is no {bug.test}"
        )


def test_the_page_lists_every_bug() -> None:
    assert table() in (ROOT / "docs" / "testing.md").read_text(), "put in what `python tests/chaos/planted_bugs.py` prints"


PLANTED = [bug for bug in BUGS if ALL or bug.quick]


def run_tests(tests: Sequence[str], texts: dict[str, str], folder: Path) -> tuple[int, str]:
    """Runs tests against a copy of the product with these files in it; pytest's exit code, and what it said."""
    services = folder / "services"
    shutil.copytree(PRODUCT, services / "agentrun", ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in texts.items():
        (services / "agentrun" / file).write_text(text)
    (folder / "planted_guard.py").write_text(GUARD.format(services=str(services)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), str(services)]), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "planted_guard", f"--basetemp={folder / 'inner'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS + SECONDS_A_TEST * len(tests),
        check=False,
    )
    return done.returncode, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_without_a_bug_the_same_tests_are_green(tmp_path: Path) -> None:
    tests = sorted({bug.test for bug in PLANTED})
    code, told = run_tests(tests, {}, tmp_path)
    assert code == 0 and "skipped" not in told.splitlines()[-1], told


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_turns_its_test_red(bug: Bug, tmp_path: Path) -> None:
    code, told = run_tests([bug.test], patched(bug), tmp_path)
    assert code == 1 and f"FAILED {bug.test}" in told, f"{bug.what}, and nobody noticed ({code}):\n{told}"
