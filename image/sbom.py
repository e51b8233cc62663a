"""Prints what is installed beside this interpreter as a CycloneDX 1.5 document (https://cyclonedx.org/docs/1.5/json/).

Runs once, while the image is built, with nothing but the standard library. Packages of the base image are not in it.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

PRODUCT = "agentrun"


def document(installed: list[Distribution]) -> dict[str, Any]:
    """The document. It has no time and no random serial number, so that equal images have equal documents."""
    components = sorted((_component(found) for found in installed), key=lambda component: component["purl"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": next(one for one in components if one["name"] == PRODUCT)},
        "components": [one for one in components if one["name"] != PRODUCT],
    }


def _component(found: Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    purl = f"pkg:pypi/{name}@{found.version}"
    kind = "application" if name == PRODUCT else "library"
    component: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "version": found.version, "purl": purl}
    if expression := found.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": expression}]
    return component


if __name__ == "__main__":
    json.dump(document(list(distributions())), sys.stdout, indent=1)
