"""The CustomResourceDefinitions. They are files of their own, crds/*.yaml, since people apply them with kubectl."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

NAMES = ("agentruns", "crontasks")


def definitions() -> str:
    """Both CRDs as YAML documents: those of the installed package, else those of the source tree that this module is in."""
    installed = files("agentrun") / "crds"
    folder = installed if installed.is_dir() else Path(__file__).parents[3] / "crds"
    return "---\n".join((folder / f"{name}.yaml").read_text(encoding="utf-8") for name in NAMES)


def documents() -> list[dict[str, Any]]:
    """Both CRDs as values."""
    return list(yaml.safe_load_all(definitions()))
