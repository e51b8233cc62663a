"""Equal parts of many objects, kept once. A thousand AgentRuns have a thousand times the same probes, volumes and policies."""

import sys
from typing import Any

MOST = 10_000
_LONGEST_TEXT = 200


class Sharing:
    """Replaces values by equal ones that were seen before. What it returns must never be changed.

    It forgets everything when it knows MOST parts: objects keep what they share, and later ones share among themselves.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, ...], Any] = {}
        self._texts: dict[str, str] = {}

    def share(self, value: Any) -> Any:
        """An equal value. Parts of lists and mappings are shared one by one, so that objects that differ somewhere share the rest."""
        if len(self._parts) + len(self._texts) > MOST:
            # Both at once: parts are known by the identities of what they hold.
            self._parts.clear()
            self._texts.clear()
        return self._share(value)

    def _share(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._texts.setdefault(value, value) if len(value) <= _LONGEST_TEXT else value
        if isinstance(value, dict):
            made = {sys.intern(name): self._share(part) for name, part in value.items()}
            return self._known(made, (dict, *made, *map(_identity, made.values())))
        if isinstance(value, list):
            items = [self._share(item) for item in value]
            return self._known(items, (list, *map(_identity, items)))
        return value

    def _known(self, made: Any, sort: tuple[Any, ...]) -> Any:
        return self._parts.setdefault(sort, made)


def _identity(part: Any) -> Any:
    """Equal if and only if the parts are the same: numbers by type and value, all else by what holds them."""
    if part is None or isinstance(part, bool | int | float):
        return type(part), part
    return id(part)
