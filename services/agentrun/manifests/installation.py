"""Brings the CustomResourceDefinitions of this version into a cluster. Knows of the API server only what it needs of it.

Definitions are never replaced by those of an older version: the API server would drop fields that are in use. So each carries the version
that it came with, and an older product leaves newer ones as they are; it works with them, as after a rollback.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from agentrun.domain.errors import ConfigurationError

MANAGER = "agentrun-crds"
"""The field manager. It applies with force: whoever applied the definitions before does not stand in the way."""
VERSION = "agentrun.dev/version"
"""The annotation with the version of agentrun that a definition came with."""
ESTABLISH_TRIES = 60

Definition = Mapping[str, Any]


class Cluster(Protocol):
    """What this needs of the API server."""

    async def get(self, name: str) -> Definition | None:
        """The definition as it is; None if it is not there."""
        ...

    async def apply(self, name: str, definition: Definition) -> Definition:
        """Server-side apply with force by MANAGER; what is there afterwards."""
        ...


async def install(
    definitions: Iterable[Definition],
    cluster: Cluster,
    *,
    pause: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
) -> None:
    """Applies each definition unless the cluster has a newer one, and waits until it is served; `pause` separates two looks.

    Raises ConfigurationError if the API server does not establish one after ESTABLISH_TRIES looks.
    """
    for definition in definitions:
        name, ours = definition["metadata"]["name"], version_of(definition)
        live = await cluster.get(name)
        if live is not None and is_newer(version_of(live), ours):
            say(
                f"{name}: left as it is, of version {version_of(live)}: going back to {ours} would drop fields that may be in use"
            )
        else:
            live = await cluster.apply(name, definition)
            say(f"{name}: applied, version {ours}")
        await _established(name, live, cluster, pause)


async def _established(name: str, live: Definition | None, cluster: Cluster, pause: Callable[[], Awaitable[None]]) -> None:
    for _ in range(ESTABLISH_TRIES):
        if live is not None and _condition(live, "Established").get("status") == "True":
            return
        await pause()
        live = await cluster.get(name)
    names = _condition(live or {}, "NamesAccepted")
    why = names.get("message") if names.get("status") == "False" else None
    raise ConfigurationError(
        f"{name}: the API server does not serve it: {why or 'no reason given'}; see kubectl describe crd {name}"
    )


def version_of(definition: Definition) -> str:
    """Its version; empty if it does not say."""
    return str((definition["metadata"].get("annotations") or {}).get(VERSION, ""))


def is_newer(version: str, than: str) -> bool:
    """Compares MAJOR.MINOR.PATCH; what does not begin like that is older than everything."""
    return _numbers(version) > _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(number) for number in found.groups()) if found else ()


def _condition(live: Definition, kind: str) -> Mapping[str, Any]:
    conditions = (live.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})
