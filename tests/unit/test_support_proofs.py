"""What a test has measured is shown, also if it passes and another process ran it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "1"]])
def test_a_line_of_a_test_that_passes_or_fails_is_shown_at_the_end(processes: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_well(proof):\n    print('captured'); proof('duplicates 0')\n"
        "def test_ill(proof):\n    proof('duplicates 1'); assert False\n"
        "def test_silent():\n    pass\n"
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "proofs",
            "-p",
            "no:cacheprovider",
            *processes,
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shown = ran.stdout.partition("= figures =")[2].partition("\n=")[0].splitlines()[1:]
    assert shown == ["test_ill: duplicates 1", "test_well: duplicates 0"], ran.stdout
