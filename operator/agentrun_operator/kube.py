"""The API server: the only module that talks to it, on raw requests with dicts. Its errors are those of `kube_errors`."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from agentrun_operator.kube_config import configuration
from agentrun_operator.kube_errors import Conflict, Expired, Forbidden, Invalid, KubeError, NotFound, Unavailable, error_of
from agentrun_operator.metrics import API_REQUESTS
from agentrun_operator.resources import Ref, Resource

__all__ = [
    "Body",
    "Conflict",
    "Expired",
    "Forbidden",
    "Invalid",
    "Kube",
    "KubeError",
    "Listing",
    "MetadataEvent",
    "NotFound",
    "Unavailable",
]

Body = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_PAUSES = (0.1, 0.4, 1.0)
"""Seconds before the second, third and fourth try of one call."""
_LONGEST_WAIT = 5.0
"""A Retry-After above this is not waited for here: the caller has better things to do."""
_WATCH_SECONDS = 300
_SILENCE_SECONDS = 70.0


@dataclass(frozen=True, slots=True)
class Listing:
    items: list[Body]
    resource_version: str


@dataclass(frozen=True, slots=True)
class MetadataEvent:
    """One state of an object's metadata."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    body: Body


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: Body
    retry_after: float | None


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Sequence[tuple[str, str]] = ()
    body: Body | None = None
    content_type: str = JSON
    accept: str = JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def repeatable(self) -> bool:
        """Whether doing it twice is the same as once: not so for POST."""
        return self.method != "POST"


class Kube:
    """The verbs. One call takes at most `seconds`, its retries included."""

    def __init__(self, api: client.ApiClient, *, seconds: float = 10.0) -> None:
        self._api = api
        self._seconds = seconds

    @classmethod
    async def connect(cls, kubeconfig: Sequence[Path] = (), *, seconds: float = 10.0) -> "Kube":
        """Reads the configuration; the first request makes the first connection. Raises ConfigurationError."""
        return cls(client.ApiClient(await configuration(kubeconfig)), seconds=seconds)

    async def aclose(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def served(self, group: str, version: str) -> set[str]:
        """The plurals of the kinds that the API server serves in a group; empty if it does not know the group."""
        try:
            found = await self._call(_Request("GET", f"/apis/{group}/{version}"))
        except NotFound:
            return set()
        return {item["name"] for item in found.get("resources", ()) if "/" not in item["name"]}

    async def get(self, ref: Ref) -> Body | None:
        try:
            return await self._call(_Request("GET", ref.path()))
        except NotFound:
            return None

    async def list(
        self, resource: Resource, *, namespace: str | None = None, labels: str | None = None, limit: int = 500
    ) -> Listing:
        """A complete list, in pages of `limit`. If it expires half-way, it is asked for once more in one piece."""
        return await self._list(_list_request(resource, namespace, labels), limit)

    async def apply(self, ref: Ref, body: Body, *, manager: str, subresource: str | None = None) -> Body:
        """Server-side apply with force; makes the object if it is not there (a subresource's object must be)."""
        query = [("fieldManager", manager), ("force", "true")]
        return await self._call(_Request("PATCH", ref.path(subresource=subresource), query, _complete(ref, body), APPLY))

    async def create(self, ref: Ref, body: Body) -> Body:
        return await self._call(_Request("POST", ref.resource.path(ref.namespace), (), _complete(ref, body)))

    async def replace(self, ref: Ref, body: Body) -> Body:
        """Raises Conflict if the body's resourceVersion is not the current one."""
        return await self._call(_Request("PUT", ref.path(), (), _complete(ref, body)))

    async def merge_patch(self, ref: Ref, body: Body, *, subresource: str | None = None) -> Body:
        return await self._call(_Request("PATCH", ref.path(subresource=subresource), (), body, MERGE))

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        """Deletes with its dependents in the background; with a uid, only that object (else Conflict). Absent is fine."""
        options: Body = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call(_Request("DELETE", ref.path(), (), options))
        except NotFound:
            pass

    async def watch_metadata(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        silence: float = _SILENCE_SECONDS,
    ) -> AsyncIterator[Listing | MetadataEvent]:
        """Lists and then watches the metadata of a kind, for ever; the contents never leave the API server. First comes a Listing.

        An expired version lists anew, a watch that ends or is silent for `silence` seconds is opened anew. Other errors are raised.
        """
        while True:
            listing = await self._list(_list_request(resource, namespace, labels, accept=METADATA_LIST), 500)
            yield listing
            version = listing.resource_version
            try:
                while True:
                    async for kind, body in self._watch(resource, namespace, labels, version=version, silence=silence):
                        version = body["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            yield MetadataEvent(kind, body)  # type: ignore[arg-type]
                    await asyncio.sleep(random.uniform(0.2, 1.0))
            except Expired:
                await asyncio.sleep(random.uniform(0.5, 2.0))

    async def _watch(
        self, resource: Resource, namespace: str | None, labels: str | None, *, version: str, silence: float
    ) -> AsyncIterator[tuple[str, Body]]:
        """One watch request until it ends. Raises Expired, also for an error inside the stream."""
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(_WATCH_SECONDS)),
            *([("labelSelector", labels)] if labels else []),
        ]
        request = _Request("GET", resource.path(namespace), query, accept=METADATA)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._seconds, sock_read=silence)
        response: Any = None
        try:
            response = await self._send(request, limits)
            if response.status >= 400:
                answer = await _read(response)
                raise error_of(str(request), answer.status, answer.body, retry_after=answer.retry_after)
            async for line in _lines(response.response.content):
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    raise error_of(str(request), int(event["object"].get("code", 500)), event["object"])
                yield event["type"], event["object"]
        except (OSError, TimeoutError, aiohttp.ClientError):
            return  # closed or silent: the caller goes on from the last version
        finally:
            if response is not None:
                response.response.close()

    async def _list(self, request: _Request, limit: int) -> Listing:
        try:
            return await self._pages(request, limit)
        except Expired:  # its continue token: changes were faster than we
            return await self._pages(request, 0)

    async def _pages(self, request: _Request, limit: int) -> Listing:
        items: list[Body] = []
        token = ""
        while True:
            query = [*request.query, *([("limit", str(limit))] if limit else []), *([("continue", token)] if token else [])]
            page = await self._call(_Request("GET", request.path, query, accept=request.accept))
            kind, version = str(page.get("kind", "")).removesuffix("List"), page.get("apiVersion", "")
            for item in page.get("items") or ():
                item.setdefault("kind", kind)
                item.setdefault("apiVersion", version)
                items.append(item)
            token = page["metadata"].get("continue", "")
            if not token:
                return Listing(items, page["metadata"].get("resourceVersion", ""))

    async def _call(self, request: _Request) -> Body:
        """Answers, or raises a KubeError. What a moment may mend is tried again within the time limit."""
        deadline = time.monotonic() + self._seconds
        last: Unavailable | None = None
        for pause in (*_PAUSES, None):
            try:
                return await self._try(request, deadline - time.monotonic())
            except Unavailable as error:
                last = error
                wait = max(pause or 0.0, error.retry_after or 0.0) * random.uniform(1.0, 1.2)
                refused = error.status in (429, 503)  # says that nothing was done, so that even a POST may be repeated
                if pause is None or not (request.repeatable or refused):
                    raise
                if wait > _LONGEST_WAIT or time.monotonic() + wait >= deadline:
                    raise
            await asyncio.sleep(wait)
        raise last or AssertionError("no try was made")

    async def _try(self, request: _Request, seconds: float) -> Body:
        try:
            async with asyncio.timeout(max(seconds, 0.05)):
                answer = await _read(await self._send(request, aiohttp.ClientTimeout(total=None)))
        except TimeoutError:
            API_REQUESTS.labels(request.method, "timeout").inc()
            raise Unavailable(f"{request}: no answer from the API server within {self._seconds:g} s") from None
        except (OSError, aiohttp.ClientError) as error:
            API_REQUESTS.labels(request.method, "connection").inc()
            raise Unavailable(f"{request}: the API server cannot be reached: {type(error).__name__}: {error}") from None
        API_REQUESTS.labels(request.method, str(answer.status)).inc()
        if answer.status >= 400:
            raise error_of(str(request), answer.status, answer.body, retry_after=answer.retry_after)
        return answer.body

    async def _send(self, request: _Request, limits: aiohttp.ClientTimeout) -> Any:
        headers = {"Accept": request.accept}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        try:
            prepared = await self._api.param_serialize(
                request.method,
                request.path,
                query_params=list(request.query),
                header_params=headers,
                body=request.body,
                auth_settings=["BearerToken"],
            )
            return await self._api.call_api(*prepared, _request_timeout=limits)
        except (ApiException, config.ConfigException) as error:
            raise Unavailable(f"{request}: {error}") from None


def _list_request(resource: Resource, namespace: str | None, labels: str | None, *, accept: str = JSON) -> _Request:
    return _Request("GET", resource.path(namespace), [("labelSelector", labels)] if labels else [], accept=accept)


def _complete(ref: Ref, body: Body) -> Body:
    """The body with what follows from the ref; what it says itself stays."""
    metadata = {"name": ref.name, **({"namespace": ref.namespace} if ref.namespace else {}), **body.get("metadata", {})}
    return {"apiVersion": ref.resource.api_version, "kind": ref.resource.kind, **body, "metadata": metadata}


async def _read(response: Any) -> _Answer:
    data: bytes = await response.read()
    try:
        body = msgspec.json.decode(data) if data else {}
    except msgspec.DecodeError:
        body = data.decode(errors="replace")
    if not isinstance(body, dict):
        body = {"message": str(body)[:500]}
    return _Answer(response.status, body, _seconds(response.headers.get("Retry-After")))


def _seconds(header: str | None) -> float | None:
    """Retry-After as the API server writes it: whole seconds. A date, which it never sends, counts as unsaid."""
    try:
        return max(float(header), 0.0) if header else None
    except ValueError:
        return None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        *whole, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in whole:
            if line:
                yield bytes(line)
