"""The newest seen state of every object that the operator watches. Fed by watch events, by full lists and by the answers to own writes.

Objects are as the API server sent them, without managedFields, which are half of their size, and share their equal parts with others.
Readers must never change them.
resourceVersions are opaque: equal or not. Order is the order of arrival, with two exceptions: a uid that another uid has replaced
never comes back (events of different objects of one name may arrive in any order), and a list does not overwrite what arrived
while it was made.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from agentrun_operator.resources import AGENTRUN_LABEL, AGENTRUNS, OURS, Key, Ref, Resource
from agentrun_operator.sharing import Sharing

Body = dict[str, Any]
_MOST_REPLACED = 10_000


class ObjectCache:
    """Objects by Ref, and the children of each AgentRun. One event loop uses it; nothing here waits."""

    def __init__(self) -> None:
        self._objects: dict[Resource, dict[Ref, Body]] = {}
        self._children: dict[Key, dict[Ref, None]] = {}
        self._sharing = Sharing()
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._changes = 0
        self._changed_at: dict[Ref, int] = {}
        self._lists = 0

    def get(self, ref: Ref) -> Body | None:
        return self._objects.get(ref.resource, {}).get(ref)

    def children(self, key: Key) -> dict[Ref, Body]:
        """What carries the label of this AgentRun, whoever made it."""
        return {ref: self._objects[ref.resource][ref] for ref in self._children.get(key, ())}

    def of(self, resource: Resource) -> Mapping[Ref, Body]:
        """All objects of a kind. Not to be held over an await."""
        return self._objects.get(resource, {})

    def agent_runs(self) -> list[Key]:
        return [key_of(ref) for ref in self._objects.get(AGENTRUNS, ())]

    def put(self, resource: Resource, body: Mapping[str, Any]) -> bool:
        """Keeps an object that was seen. Whether it differs from what is known."""
        ref, uid = ref_of(resource, body), uid_of(body)
        if uid and uid in self._replaced:
            return False
        objects = self._objects.setdefault(resource, {})
        known = objects.get(ref)
        if known is not None and uid_of(known) == uid and version_of(known) == version_of(body):
            return False
        if known is not None:
            self._unlink(ref, known)
            if uid_of(known) != uid:
                self._forget_uid(uid_of(known))
        objects[ref] = self._sharing.share(slim(body))
        self._link(ref, body)
        self._note(ref)
        return True

    def remove(self, ref: Ref, *, uid: str | None = None) -> bool:
        """Forgets an object that is gone; with a uid, only if it is that one. Whether it was known."""
        known = self.get(ref)
        if known is None or (uid and uid_of(known) != uid):
            return False
        self._unlink(ref, known)
        del self._objects[ref.resource][ref]
        self._note(ref)
        return True

    def begin_list(self) -> int:
        """To be called before a list is asked for; its answer goes to `replace_all` as `since`, or to `end_list` if there is none."""
        self._lists += 1
        return self._changes

    def end_list(self) -> None:
        self._lists -= 1
        if not self._lists:
            self._changed_at.clear()

    def replace_all(
        self,
        resource: Resource,
        items: Iterable[Mapping[str, Any]],
        *,
        since: int | None = None,
        within: Callable[[Ref], bool] = lambda _ref: True,
    ) -> set[Key]:
        """Takes a complete list of a kind. Returns the AgentRuns (CronTasks) of which something changed or vanished unseen.

        `within` narrows the list to the refs that it could have contained. What changed after `since` is left as it is.
        """
        touched: set[Key] = set()
        listed: set[Ref] = set()
        for body in items:
            ref = ref_of(resource, body)
            listed.add(ref)
            if not self._is_newer(ref, since) and self.put(resource, body):
                touched.update(owners(resource, body))
        for ref, known in list(self._objects.get(resource, {}).items()):
            if ref not in listed and within(ref) and not self._is_newer(ref, since):
                touched.update(owners(resource, known))
                self.remove(ref)
        return touched

    def _is_newer(self, ref: Ref, since: int | None) -> bool:
        return since is not None and self._changed_at.get(ref, -1) >= since

    def _note(self, ref: Ref) -> None:
        if self._lists:
            self._changed_at[ref] = self._changes
        self._changes += 1

    def _link(self, ref: Ref, body: Mapping[str, Any]) -> None:
        key = _parent(ref.resource, body)
        if key:
            self._children.setdefault(key, {})[ref] = None

    def _unlink(self, ref: Ref, body: Mapping[str, Any]) -> None:
        key = _parent(ref.resource, body)
        if key in self._children:
            self._children[key].pop(ref, None)
            if not self._children[key]:
                del self._children[key]

    def _forget_uid(self, uid: str) -> None:
        if uid:
            self._replaced[uid] = None
            if len(self._replaced) > _MOST_REPLACED:
                self._replaced.popitem(last=False)


def ref_of(resource: Resource, body: Mapping[str, Any]) -> Ref:
    metadata = body["metadata"]
    return Ref(resource, metadata.get("namespace", ""), metadata["name"])


def key_of(ref: Ref) -> Key:
    return Key(ref.namespace, ref.name)


def uid_of(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("uid", ""))


def version_of(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("resourceVersion", ""))


def owners(resource: Resource, body: Mapping[str, Any]) -> Iterator[Key]:
    """The key that has to be looked at when this object changes: itself for our own kinds, else its AgentRun."""
    if resource in OURS:
        yield key_of(ref_of(resource, body))
    elif (key := _parent(resource, body)) is not None:
        yield key


def slim(body: Mapping[str, Any]) -> Body:
    """An object without its managedFields. The rest is shared with the original."""
    if "managedFields" not in body["metadata"]:
        return dict(body)
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": metadata}


def _parent(resource: Resource, body: Mapping[str, Any]) -> Key | None:
    if resource in OURS:
        return None
    metadata = body["metadata"]
    name = (metadata.get("labels") or {}).get(AGENTRUN_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None
