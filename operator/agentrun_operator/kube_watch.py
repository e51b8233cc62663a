"""Following the metadata of a kind: list, watch, and from the beginning where the place is lost."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from agentrun_operator.kube_errors import Expired, Unavailable, error_of
from agentrun_operator.kube_http import NETWORK_ERRORS, Answer, Body, Http, Request
from agentrun_operator.pauses import Pauses

METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
SILENCE_SECONDS = 70.0
"""The API server sends bookmarks each minute."""
FIRST_SECONDS = 0.5
RELIST_SECONDS = 60.0
REWATCH_SECONDS = 15.0
"""The longest pauses before a list, and before a watch from where the last one was."""
_WATCH_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Listing:
    items: list[Body]
    resource_version: str


@dataclass(frozen=True, slots=True)
class MetadataEvent:
    """One state of an object's metadata."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    body: Body


async def follow(
    http: Http, collection: Request, list_all: Callable[[], Awaitable[Listing]], *, connect_seconds: float, silence: float
) -> AsyncGenerator[Listing | MetadataEvent, None]:
    """Lists and then watches, for ever. First comes a Listing.

    An expired version lists anew. A watch that ends, that is silent for `silence` seconds, or that the API server has no time for is
    opened anew. What happens again and again is done less and less often. Other KubeErrors, and those of the list, are raised.
    """
    lists, watches = Pauses(FIRST_SECONDS, RELIST_SECONDS), Pauses(FIRST_SECONDS, REWATCH_SECONDS, calm=REWATCH_SECONDS)
    while True:
        listing = await list_all()
        yield listing
        version = listing.resource_version
        try:
            while True:
                wait = 0.0
                try:
                    events = _watch(http, collection, version=version, connect_seconds=connect_seconds, silence=silence)
                    async with aclosing(events):
                        async for kind, body in events:
                            version = body["metadata"]["resourceVersion"]
                            if kind != "BOOKMARK":
                                yield MetadataEvent(kind, body)  # type: ignore[arg-type]
                except Unavailable as error:
                    wait = error.retry_after or 0.0
                await asyncio.sleep(max(wait, watches.next()))
        except Expired:
            await asyncio.sleep(lists.next())


async def _watch(
    http: Http, collection: Request, *, version: str, connect_seconds: float, silence: float
) -> AsyncGenerator[tuple[str, Body], None]:
    """One watch request until it ends. Raises Expired, also for an error inside the stream."""
    query = [
        ("watch", "true"),
        ("allowWatchBookmarks", "true"),
        ("resourceVersion", version),
        ("timeoutSeconds", str(_WATCH_SECONDS)),
        *collection.query,
    ]
    request = replace(collection, query=query, accept=METADATA)
    try:
        async with aclosing(http.stream(request, connect_seconds=connect_seconds, silence=silence)) as lines:
            async for line in lines:
                if isinstance(line, Answer):
                    raise error_of(str(request), line.status, line.body, retry_after=line.retry_after)
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    raise error_of(str(request), int(event["object"].get("code", 500)), event["object"])
                yield event["type"], event["object"]
    except NETWORK_ERRORS:
        return  # closed or silent: the caller goes on from the last version
