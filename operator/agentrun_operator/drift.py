"""Whether somebody changed a field that is ours. Pure.

The API server writes values in its own way (quantities, defaults), so this compares only what it keeps as it is; server-side apply
corrects the rest all the same. What others add is not drift.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_REWRITTEN = frozenset({"resources", "managedFields", "annotations", "sizeLimit"})
_KEYS = ("name", "containerPort", "port", "mountPath", "topologyKey", "uid")


def drifted(live: Any, desired: Any) -> bool:
    """Whether `live` lacks something of `desired` or has another value there."""
    if live == desired:
        return False
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return bool(desired)
        return any(name not in _REWRITTEN and drifted(live.get(name), value) for name, value in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _list_drifted(live, desired)
    return bool(_absent(desired) != _absent(live))


def _list_drifted(live: Any, desired: Sequence[Any]) -> bool:
    if not isinstance(live, Sequence) or isinstance(live, str):
        return bool(desired)
    key = next((key for key in _KEYS if _tells_apart(key, desired)), None)
    if key is None:
        return len(live) != len(desired) or any(drifted(one, other) for one, other in zip(live, desired, strict=True))
    known = {item.get(key): item for item in live if isinstance(item, Mapping)}
    return any(item[key] not in known or drifted(known[item[key]], item) for item in desired)


def _tells_apart(key: str, items: Sequence[Any]) -> bool:
    """Whether it is in each item and has another value in each: port 53 is there twice, for UDP and for TCP."""
    if not items or not all(isinstance(item, Mapping) and key in item for item in items):
        return False
    return len({item[key] for item in items}) == len(items)


def _absent(value: Any) -> Any:
    """Empty values are left out by the API server."""
    return None if value in ("", False, 0) else value
