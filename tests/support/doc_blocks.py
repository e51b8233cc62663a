"""The fenced blocks of a page under docs/, so that a test runs what the page tells people to run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, heading: str, language: str) -> list[str]:
    """The blocks of one language under a heading (of level 2 or 3), down to the next heading; at least one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading {heading!r}"
    section = re.findall(rf"^```{language}\n(.*?)^```", found[1], re.MULTILINE | re.DOTALL)
    assert section, f"{page} has no block of {language} under {heading!r}"
    return section
