"""The API server's verbs, on raw requests with dicts. Its errors are those of `kube_errors`."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from agentrun import failpoints
from agentrun_operator import kube_config, kube_watch
from agentrun_operator.kube_errors import Conflict, Expired, Forbidden, Invalid, KubeError, NotFound, Unavailable, error_of
from agentrun_operator.kube_http import JSON, NETWORK_ERRORS, Body, Http, Request
from agentrun_operator.kube_watch import Listing, MetadataEvent
from agentrun_operator.metrics import API_REQUESTS
from agentrun_operator.resources import LEASES, Ref, Resource

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

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

PAGE = 200
"""Objects in one answer to a list."""
Keep = Callable[[list[Body]], list[Body]]

_PAUSES = (0.1, 0.4, 1.0)
"""Seconds before the second, third and fourth try of one call."""
_LONGEST_WAIT = 5.0
"""A Retry-After above this is not waited for here: the caller has better things to do."""
_DRY_RUN = ("dryRun", "All")
_NO_VERSION = "1"
"""A resourceVersion that no object has: the store's counter is past it before the API server serves."""


class Kube:
    """The verbs. One call takes at most `seconds`, its retries included."""

    def __init__(self, http: Http, *, seconds: float = 10.0) -> None:
        self._http = http
        self._seconds = seconds

    @classmethod
    async def connect(cls, kubeconfig: Sequence[Path] = (), *, seconds: float = 10.0) -> "Kube":
        """Reads the configuration; the first request makes the first connection. Raises ConfigurationError."""
        return cls(Http(await kube_config.access(kubeconfig)), seconds=seconds)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def served(self, group: str, version: str) -> set[str]:
        """The plurals of the kinds that the API server serves in a group; empty if it does not know the group."""
        try:
            found = await self._call(Request("GET", f"/apis/{group}/{version}"))
        except NotFound:
            return set()
        return {item["name"] for item in found.get("resources", ()) if "/" not in item["name"]}

    async def get(self, ref: Ref) -> Body | None:
        try:
            return await self._call(Request("GET", ref.path()))
        except NotFound:
            return None

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        limit: int = PAGE,
        keep: Keep = lambda page: page,
    ) -> Listing:
        """A complete list without managedFields, in pages of `limit`, made of what `keep` says to each page. If it expires half-way,
        it is asked for once more in one piece."""
        return await self._list(_list_request(resource, namespace, labels), limit, keep)

    async def list_metadata(self, resource: Resource, *, namespace: str | None = None, labels: str | None = None) -> Listing:
        """The same without contents."""
        return await self._list(_list_request(resource, namespace, labels, accept=METADATA_LIST), PAGE)

    async def apply(
        self,
        ref: Ref,
        body: Body,
        *,
        manager: str,
        subresource: str | None = None,
        only_new: bool = False,
        dry_run: bool = False,
    ) -> Body:
        """Server-side apply with force; makes the object if it is not there (a subresource's object must be).

        With a uid in the body only that object is changed, with `only_new` none that is there: else it raises Conflict. With `dry_run`
        everybody who may refuse it is asked, and nothing is changed.
        """
        query = [("fieldManager", manager), ("force", "true"), *([_DRY_RUN] if dry_run else [])]
        complete = _complete(ref, body)
        if only_new:
            complete["metadata"]["resourceVersion"] = _NO_VERSION
        return await self._call(Request("PATCH", ref.path(subresource=subresource), query, complete, APPLY))

    async def create(self, ref: Ref, body: Body) -> Body:
        return await self._call(Request("POST", ref.resource.path(ref.namespace), (), _complete(ref, body)))

    async def replace(self, ref: Ref, body: Body) -> Body:
        """Raises Conflict if the body's resourceVersion is not the current one."""
        return await self._call(Request("PUT", ref.path(), (), _complete(ref, body)))

    async def merge_patch(self, ref: Ref, body: Body, *, subresource: str | None = None) -> Body:
        return await self._call(Request("PATCH", ref.path(subresource=subresource), (), body, MERGE))

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        """Deletes with its dependents in the background; with a uid, only that object (else Conflict). Absent is fine."""
        options: Body = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call(Request("DELETE", ref.path(), (), options))
        except NotFound:
            pass

    def watch_metadata(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        silence: float = kube_watch.SILENCE_SECONDS,
    ) -> AsyncIterator[Listing | MetadataEvent]:
        """Lists and then watches the metadata of a kind, for ever; the contents never leave the API server. First comes a Listing.

        An expired version lists anew, a watch that ends or is silent for `silence` seconds is opened anew. Other errors are raised.
        """
        collection = _list_request(resource, namespace, labels)
        return kube_watch.follow(
            self._http,
            collection,
            lambda: self.list_metadata(resource, namespace=namespace, labels=labels),
            connect_seconds=self._seconds,
            silence=silence,
        )

    async def _list(self, request: Request, limit: int, keep: Keep = lambda page: page) -> Listing:
        try:
            return await self._pages(request, limit, keep)
        except Expired:  # its continue token: changes were faster than we
            return await self._pages(request, 0, keep)

    async def _pages(self, request: Request, limit: int, keep: Keep) -> Listing:
        items: list[Body] = []
        token = ""
        while True:
            query = [*request.query, *([("limit", str(limit))] if limit else []), *([("continue", token)] if token else [])]
            page = await self._call(Request("GET", request.path, query, accept=request.accept))
            kind, version = str(page.get("kind", "")).removesuffix("List"), page.get("apiVersion", "")
            found: list[Body] = page.get("items") or []
            for item in found:
                item.setdefault("kind", kind)
                item.setdefault("apiVersion", version)
                item["metadata"].pop("managedFields", None)
            items += keep(found)
            token = page["metadata"].get("continue", "")
            if not token:
                return Listing(items, page["metadata"].get("resourceVersion", ""))

    async def _call(self, request: Request) -> Body:
        """Answers, or raises a KubeError. What a moment may mend is tried again within the time limit."""
        deadline = time.monotonic() + self._seconds
        last: Unavailable | None = None
        for pause in (*_PAUSES, None):
            try:
                answer = await self._try(request, deadline - time.monotonic())
                if request.method != "GET" and f"/{LEASES.group}/" not in request.path and _DRY_RUN not in request.query:
                    await failpoints.hit("operator.kube.written")
                return answer
            except Unavailable as error:
                last = error
                wait = max(pause or 0.0, error.retry_after or 0.0) * random.uniform(1.0, 1.2)
                refused = error.status in (401, 429, 503)  # says that nothing was done, so that even a POST may be repeated
                if pause is None or not (request.repeatable or refused):
                    raise
                if wait > _LONGEST_WAIT or time.monotonic() + wait >= deadline:
                    raise
            await asyncio.sleep(wait)
        raise last or AssertionError("no try was made")

    async def _try(self, request: Request, seconds: float) -> Body:
        try:
            async with asyncio.timeout(max(seconds, 0.05)):
                answer = await self._http.call(request)
        except TimeoutError:
            API_REQUESTS.labels(request.method, "timeout").inc()
            raise Unavailable(f"{request}: no answer from the API server within {self._seconds:g} s") from None
        except NETWORK_ERRORS as error:
            API_REQUESTS.labels(request.method, "connection").inc()
            raise Unavailable(f"{request}: the API server cannot be reached: {type(error).__name__}: {error}") from None
        API_REQUESTS.labels(request.method, str(answer.status)).inc()
        if answer.status >= 400:
            raise error_of(str(request), answer.status, answer.body, retry_after=answer.retry_after)
        return answer.body


def _list_request(resource: Resource, namespace: str | None, labels: str | None, *, accept: str = JSON) -> Request:
    return Request("GET", resource.path(namespace), [("labelSelector", labels)] if labels else [], accept=accept)


def _complete(ref: Ref, body: Body) -> Body:
    """The body with what follows from the ref; what it says itself stays."""
    metadata = {"name": ref.name, **({"namespace": ref.namespace} if ref.namespace else {}), **body.get("metadata", {})}
    return {"apiVersion": ref.resource.api_version, "kind": ref.resource.kind, **body, "metadata": metadata}
