"""Carries out a plan: objects in their order, then what is to go, the status last, Events at the very end.

Each write is one that may be repeated, so a crash between any two is mended by the next reconcile. A write is left out if neither the
wish nor the object has changed since it was made last. The memory of that is this process' own: after a start everything is applied once,
which changes nothing where nothing is to be changed.

An object that was not seen is made as a new one or not at all, and one that was seen is changed only while it is that one: what somebody
else made under our name in between is never touched.

Before the first Deployment of an AgentRun the API server is asked whether it takes what makes pods, so that a spec which it refuses (bad
affinity, a webhook) leaves nothing half made. Later there is something that works, and each write says for itself.

A worker Deployment is made in three steps, so that no pod starts at the default of one replica:
  1. the scaler's manager applies all of it with the first number of replicas, marked with the annotation CREATING;
  2. the operator's manager applies all of it without replicas, and so owns the rest too;
  3. the scaler's manager applies the number of replicas only, and so gives up the rest and the mark with it.
While the mark is there, steps 2 and 3 are due.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from typing import Any

import structlog

from agentrun import failpoints
from agentrun.domain.errors import AgentrunError
from agentrun_operator.cache import ObjectCache, version_of
from agentrun_operator.conditions import stamp
from agentrun_operator.digests import digest
from agentrun_operator.drift import drifted
from agentrun_operator.facts import Object, Observed, Refusal
from agentrun_operator.kube import Kube
from agentrun_operator.kube_errors import Conflict, Forbidden, Invalid, KubeError, NotFound
from agentrun_operator.plan import Apply, Event, Plan
from agentrun_operator.render.labels import CREATING
from agentrun_operator.resources import AGENTRUNS, DEPLOYMENTS, EVENTS, JOBS, Key, Ref
from agentrun_operator.status_write import write_status

OPERATOR = "agentrun-operator"
SCALER = "agentrun-scaler"

_log = structlog.get_logger(__name__)


class ObjectRefused(AgentrunError):
    """The API server does not take an object; trying again at once does not help."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"the API server refused {refusal.ref}: {refusal.message}")
        self.refusal = refusal


class NameTaken(AgentrunError):
    """Under this name there is something else than was seen, or nothing any more: look again."""

    def __init__(self, ref: Ref) -> None:
        super().__init__(f"{ref} was made or replaced by somebody else")
        self.ref = ref


class Memory:
    """What was applied last: for each object the wish, and the object as it was after it."""

    def __init__(self) -> None:
        self._applied: dict[Key, dict[Ref, tuple[str, str]]] = {}
        self._rewritten: dict[Key, set[Ref]] = {}

    def knows(self, key: Key, apply: Apply) -> bool:
        """Whether applying this again would change nothing."""
        known = self._applied.get(key, {}).get(apply.ref)
        return known is not None and apply.live is not None and known == (digest(apply.body), fingerprint(apply.live, apply.body))

    def note(self, key: Key, apply: Apply, live: Object) -> None:
        """It was applied, and this is what the API server has now."""
        self._applied.setdefault(key, {})[apply.ref] = (digest(apply.body), fingerprint(live, apply.body))
        rewritten = self._rewritten.setdefault(key, set())
        if drifted(live, apply.body):
            rewritten.add(apply.ref)
        else:
            rewritten.discard(apply.ref)

    def rewritten(self, key: Key) -> frozenset[Ref]:
        """Objects that came back from our last write with other values than ours."""
        return frozenset(self._rewritten.get(key, ()))

    def forget(self, key: Key) -> None:
        """The AgentRun is gone."""
        self._applied.pop(key, None)
        self._rewritten.pop(key, None)


def fingerprint(live: Object, body: Mapping[str, Any]) -> str:
    """All of an object that could be ours to set right. Replicas only where the wish has them."""
    metadata = live["metadata"]
    content = {name: value for name, value in live.items() if name not in ("metadata", "status", "apiVersion", "kind")}
    if "spec" in content and "replicas" not in body.get("spec", {}):
        content["spec"] = {name: value for name, value in content["spec"].items() if name != "replicas"}
    return digest([metadata.get("uid"), *(metadata.get(name) for name in ("labels", "annotations", "ownerReferences")), content])


async def execute(plan: Plan, observed: Observed, *, kube: Kube, cache: ObjectCache, memory: Memory, now: datetime) -> bool:
    """Does it; whether a Deployment was changed. Raises ObjectRefused, NameTaken, and KubeError for what may be tried again."""
    await failpoints.hit("operator.apply.before")
    changed = False
    for delete in plan.deletes:
        await _delete(kube, delete.ref, delete.uid)
    try:
        await _rehearse(kube, plan, observed)
        for apply in plan.applies:
            if apply.first_replicas is None and memory.knows(observed.key, apply):
                continue
            with _refusals_of(apply.ref), cache.writing(observed.key, apply.ref) as writing:
                async for answer in _apply(kube, apply):
                    writing.answers.append(answer)
            live = writing.answers[-1]
            memory.note(observed.key, apply, live)
            changed = changed or (
                apply.ref.resource == DEPLOYMENTS and (apply.live is None or version_of(apply.live) != version_of(live))
            )
            await failpoints.hit("operator.apply.between")
    except _NamespaceEnds:
        return False  # and everything in it goes, too
    await failpoints.hit("operator.status.before")
    await _write_status(kube, cache, plan, observed)
    for event in plan.events:
        await tell(kube, observed, event, now)
    return changed


async def _rehearse(kube: Kube, plan: Plan, observed: Observed) -> None:
    if any(ref.resource == DEPLOYMENTS for ref in observed.children):
        return
    for apply in plan.applies:
        if apply.live is None and apply.ref.resource in (DEPLOYMENTS, JOBS):
            with _refusals_of(apply.ref):
                await kube.apply(apply.ref, dict(apply.body), manager=OPERATOR, only_new=True, dry_run=True)


class _NamespaceEnds(Exception):
    """The namespace is being deleted."""


@contextlib.contextmanager
def _refusals_of(ref: Ref) -> Iterator[None]:
    """What the API server says against an object, in our words."""
    try:
        yield
    except (Invalid, Forbidden) as error:
        if error.status == 403 and "being terminated" in str(error):
            raise _NamespaceEnds from error
        raise ObjectRefused(Refusal(ref, _said(error))) from error
    except Conflict as error:
        raise NameTaken(ref) from error


async def _apply(kube: Kube, apply: Apply) -> AsyncIterator[dict[str, Any]]:
    """The answers to the writes that one object takes."""
    uid = apply.live["metadata"]["uid"] if apply.live is not None else None
    if apply.first_replicas is None:
        yield await _put(kube, apply.ref, apply.body, uid, manager=OPERATOR)
        return
    if uid is None:
        begun = await _put(kube, apply.ref, _beginning(apply.body, apply.first_replicas), None, manager=SCALER)
        yield begun
        uid = begun["metadata"]["uid"]
        await failpoints.hit("operator.apply.between")
    made = await _put(kube, apply.ref, apply.body, uid, manager=OPERATOR)
    yield made
    await failpoints.hit("operator.apply.between")
    yield await _put(kube, apply.ref, {"spec": {"replicas": made["spec"]["replicas"]}}, uid, manager=SCALER)


async def _put(kube: Kube, ref: Ref, body: Mapping[str, Any], uid: str | None, *, manager: str) -> dict[str, Any]:
    """Changes the object with this uid, or makes one where there is none. Raises Conflict if there is another one, or none."""
    if uid is None:
        return await kube.apply(ref, dict(body), manager=manager, only_new=True)
    return await kube.apply(ref, {**body, "metadata": {**body.get("metadata", {}), "uid": uid}}, manager=manager)


def _beginning(body: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    annotations = {**body["metadata"].get("annotations", {}), CREATING: "true"}
    return {
        **body,
        "metadata": {**body["metadata"], "annotations": annotations},
        "spec": {**body["spec"], "replicas": replicas},
    }


async def _delete(kube: Kube, ref: Ref, uid: str) -> None:
    try:
        await kube.delete(ref, uid=uid)
    except Conflict:
        return  # another object has the name by now: the next look decides about it
    await failpoints.hit("operator.apply.between")


async def _write_status(kube: Kube, cache: ObjectCache, plan: Plan, observed: Observed) -> None:
    if plan.status is None:
        return
    ref = Ref(AGENTRUNS, observed.key.namespace, observed.key.name)
    try:
        with cache.writing(observed.key, ref) as writing:
            writing.answers.append(await write_status(kube, ref, observed.uid, plan.status))
    except NotFound:
        return  # deleted meanwhile


async def tell(kube: Kube, observed: Observed, event: Event, now: datetime) -> None:
    """Writes an Event on an AgentRun. One that cannot be written is not worth a failed reconcile."""
    key, at = observed.key, stamp(now)
    name = f"{key.name}.{digest([observed.uid, event.reason, event.message, now.isoformat()])}"
    body = {
        "metadata": {"name": name, "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": AGENTRUNS.api_version,
            "kind": AGENTRUNS.kind,
            "namespace": key.namespace,
            "name": key.name,
            "uid": observed.uid,
        },
        "reason": event.reason.value,
        "message": event.message[:1000],
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": OPERATOR},
        "reportingComponent": OPERATOR,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    try:
        await kube.create(Ref(EVENTS, key.namespace, name), body)
    except KubeError as error:
        _log.warning("an Event could not be written", agent=str(key), reason=event.reason, error=str(error))


def _said(error: KubeError) -> str:
    """What the API server said, without the request."""
    return str(error).partition(": ")[2].strip()
