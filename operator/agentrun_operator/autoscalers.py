"""Who else scales the workers: HorizontalPodAutoscalers (also those that KEDA makes for a ScaledObject).

Two signs. The list of autoscalers says it for certain, where the operator may read it. Where it may not, the manager of `replicas` on the
Deployment says who set the number last: an autoscaler is let alone, anybody else (`kubectl scale`) is corrected.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from agentrun_operator.kube import Forbidden, Kube, KubeError, NotFound
from agentrun_operator.resources import Ref, Resource

HPAS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
AUTOSCALER_MANAGERS = frozenset({"kube-controller-manager", "keda", "keda-operator"})
LIST_SECONDS = 60.0

_log = structlog.get_logger(__name__)


def managers_of_replicas(deployment: Mapping[str, Any]) -> frozenset[str]:
    """Who owns spec.replicas, by metadata.managedFields."""
    entries = deployment["metadata"].get("managedFields") or ()
    return frozenset(
        entry.get("manager", "") for entry in entries if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    )


class Autoscalers:
    """The autoscalers of the watched namespaces, listed about once a minute and at once where there is a reason."""

    def __init__(self, kube: Kube, namespaces: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        """No namespaces: all of the cluster."""
        self._kube = kube
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._clock = clock
        self._found: dict[tuple[str, str], str] = {}
        self._allowed: bool | None = None
        self._listed_at = float("-inf")
        self._lock = asyncio.Lock()

    def of(self, deployment: Ref) -> str | None:
        """The autoscaler of a Deployment by the last list."""
        return self._found.get((deployment.namespace, deployment.name))

    @property
    def known(self) -> bool:
        """Whether the list could be read: then who is not in it is no autoscaler."""
        return bool(self._allowed)

    async def check(self, ref: Ref, deployment: Mapping[str, Any]) -> str | None:
        """The autoscaler of a Deployment that was just read, with its managedFields. Lists anew if they speak of one.

        A list from before the Deployment was read may lack the autoscaler. Checks at the same time share lists.
        """
        suspects = managers_of_replicas(deployment) & AUTOSCALER_MANAGERS
        if suspects:
            await self.refresh(not_older_than=0.0)
        if self.known:
            return self.of(ref)
        return min(suspects, default=None)

    async def refresh(self, *, not_older_than: float = LIST_SECONDS) -> None:
        """Lists, if the last list was begun longer ago than this, as of this call. Without an answer the old list stays."""
        oldest = self._clock() - not_older_than
        async with self._lock:
            begun = self._clock()
            if self._listed_at > oldest:
                return
            try:
                found = [
                    item for namespace in self._namespaces for item in (await self._kube.list(HPAS, namespace=namespace)).items
                ]
            except (Forbidden, NotFound):
                if self._allowed is not False:
                    _log.info("autoscalers cannot be listed; who set the number of workers last tells", resource=str(HPAS))
                self._found, self._allowed = {}, False
            except KubeError as error:
                _log.warning("autoscalers could not be listed", error=str(error))
                return
            else:
                self._found, self._allowed = dict(filter(None, map(_aim, found))), True
            self._listed_at = begun


def _aim(item: Mapping[str, Any]) -> tuple[tuple[str, str], str] | None:
    target = (item.get("spec") or {}).get("scaleTargetRef") or {}
    if target.get("kind") != "Deployment" or not str(target.get("apiVersion", "apps/v1")).startswith("apps/"):
        return None
    metadata = item["metadata"]
    return (metadata["namespace"], str(target.get("name", ""))), str(metadata["name"])
