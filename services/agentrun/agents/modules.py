"""Finds what a manifest names as `module:attribute`, and words the mistakes of a manifest's `agent` part."""

import importlib
from typing import Any

from agentrun.domain.errors import ManifestError


def named(path: str, field: str) -> Any:
    """The object at `module:attribute`, importing the module. Raises ManifestError."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise mistake(field, f"{path!r} is not module:attribute", "write it as my_agent:agent")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        remedy = "put it beside the manifest, on PYTHONPATH or into the image"
        raise mistake(field, f"there is no module {missing}", remedy) from error
    except Exception as error:
        what = f"importing {module_name} raised {type(error).__name__}: {first_line(error)}"
        raise mistake(field, what, f"make `python -c 'import {module_name}'` work") from error
    value: Any = module
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise mistake(field, f"module {module_name} has no {attribute}", "correct the name after the colon")
        value = getattr(value, name)
    return value


def first_line(error: BaseException) -> str:
    """What an error says first, or its type if it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def mistake(field: str, what: str, remedy: str) -> ManifestError:
    """One line: field, what, remedy."""
    return ManifestError(f"spec.agent.{field}: {what}; {remedy}")
