"""Runs the tools that the suite drives: docker, kind, kubectl, helm."""

import subprocess
from collections.abc import Sequence


class CommandError(Exception):
    """A tool refused. The message is what it said."""


def run(arguments: Sequence[str], *, stdin: str | None = None, within: float = 60.0) -> str:
    """The tool's output. Raises CommandError with what it said if it fails, or takes longer than `within` seconds."""
    try:
        told = subprocess.run(arguments, input=stdin, capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{' '.join(arguments)}: no end within {within:g} s") from error
    except FileNotFoundError as error:
        raise CommandError(f"{arguments[0]} is not installed; docker, kind, kubectl and helm are needed") from error
    if told.returncode:
        raise CommandError(f"{' '.join(arguments)}: {(told.stderr or told.stdout).strip()}")
    return told.stdout
