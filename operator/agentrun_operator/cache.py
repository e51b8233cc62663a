"""The newest seen state of every object that the operator watches. Fed by watch events, by full lists and by the answers to own writes.

Objects are as the API server sent them, without managedFields, which are half of their size, and our own kinds without the copy of
themselves that kubectl keeps in an annotation. They share their equal parts with others.
Readers must never change them.
resourceVersions are opaque: equal or not. Order is the order of arrival, with three exceptions: a uid that another uid has replaced, or
an AgentRun that was deleted, never comes back (events of different objects of one name may arrive in any order), a list does not
overwrite what arrived while it was made, and what arrives about an object while we write it waits for the answer: see `writing`.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrun_operator.resources import AGENTRUN_LABEL, AGENTRUNS, OURS, Key, Ref, Resource
from agentrun_operator.sharing import Sharing

Body = dict[str, Any]
_MOST_REPLACED = 10_000
_MOST_PASSED = 1_000
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(slots=True)
class Writing:
    """One object that is being written: the answers, in their order, and what arrived about it meanwhile (uid; None: it is gone)."""

    answers: list[Body] = field(default_factory=list)
    news: list[tuple[str | None, Body | None]] = field(default_factory=list)


class ObjectCache:
    """Objects by Ref, and the children of each AgentRun. One event loop uses it; nothing here waits."""

    def __init__(self) -> None:
        self._objects: dict[Resource, dict[Ref, Body]] = {}
        self._children: dict[Key, dict[Ref, None]] = {}
        self._sharing = Sharing()
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._writing: dict[Ref, Writing] = {}
        self._disturbed: set[Key] = set()
        self._changes = 0
        self._changed_at: dict[Ref, int] = {}
        self._lists = 0
        self._complete: set[Resource] = set()
        self._not_served: set[Resource] = set()

    def get(self, ref: Ref) -> Body | None:
        return self._objects.get(ref.resource, {}).get(ref)

    def known(self, resource: Resource, body: Mapping[str, Any]) -> Body | None:
        """What is kept of this object in this same state, None if nothing is."""
        found = self.get(ref_of(resource, body))
        return found if found is not None and _state(found) == _state(body) else None

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
        if (uid and uid in self._replaced) or _state(body) in self._passed:
            return False
        if (writing := self._writing.get(ref)) is not None:
            writing.news.append((uid, dict(body)))
            self._note(ref)
            return False
        objects = self._objects.setdefault(resource, {})
        known = objects.get(ref)
        if known is not None and _state(known) == _state(body):
            return False
        if known is not None:
            self._unlink(ref, known)
            if uid_of(known) != uid:
                self._forget_uid(uid_of(known))
        objects[ref] = self._sharing.share(slim(resource, body))
        self._link(ref, body)
        self._note(ref)
        return True

    def remove(self, ref: Ref, *, uid: str | None = None) -> bool:
        """Forgets an object that is gone; with a uid, only if it is that one. Whether it was known."""
        if (writing := self._writing.get(ref)) is not None:
            writing.news.append((uid, None))
            self._note(ref)
            return False
        if uid and ref.resource in OURS:
            self._forget_uid(uid)  # an answer to a write may come after this news
        known = self.get(ref)
        if known is None or (uid and uid_of(known) != uid):
            return False
        self._unlink(ref, known)
        del self._objects[ref.resource][ref]
        self._note(ref)
        return True

    @contextlib.contextmanager
    def writing(self, key: Key, ref: Ref) -> Iterator[Writing]:
        """While we write an object of an AgentRun, news of it wait. Then the last answer is kept, and what the watches told after it.

        So the news of our own writes, which often arrive before the answers, make nobody look again. Other news do: see `disturbed`.
        """
        writing = self._writing[ref] = Writing()
        try:
            yield writing
        finally:
            del self._writing[ref]
            if self._settle(ref, writing):
                self._disturbed.add(key)

    def disturbed(self, key: Key) -> bool:
        """Whether somebody else changed an object of this AgentRun while we wrote it. Asking ends it."""
        found = key in self._disturbed
        self._disturbed.discard(key)
        return found

    def _settle(self, ref: Ref, writing: Writing) -> bool:
        """Whether there were news that are not ours."""
        known, news = self.get(ref), writing.news
        made = [body for body in writing.answers if known is None or _state(body) != _state(known)]
        states = {_state(body) for body in made}
        ours = [number for number, (_, body) in enumerate(news) if body is not None and _state(body) in states]
        disturbed = False
        if made:
            disturbed = len(ours) < len(news)
            # What was told before our write is older. Where our write is still to be told, that is all of it; but an end is the last
            # that there is to tell, and a watch may leave out what came shortly before it.
            uids = {uid_of(body) for body in made}
            ends = [number for number, (uid, body) in enumerate(news) if body is None and uid in uids]
            news = news[ours[-1] + 1 :] if ours else news[ends[0] :] if ends else []
            self.put(ref.resource, made[-1])
            self._pass(made[:-1])
        for uid, body in news:
            changed = self.remove(ref, uid=uid) if body is None else self.put(ref.resource, body)
            disturbed = disturbed or changed
        return disturbed

    def _pass(self, bodies: Iterable[Body]) -> None:
        """States that we know to be over: told late, they would be taken for new ones."""
        for body in bodies:
            self._passed[_state(body)] = None
            if len(self._passed) > _MOST_PASSED:
                self._passed.popitem(last=False)

    def is_complete(self, resource: Resource) -> bool:
        """Whether a complete list of this kind was ever taken: else, what is not known may be there all the same."""
        return resource in self._complete

    def is_served(self, resource: Resource) -> bool:
        """Whether the API server has this kind, as far as `served` was told."""
        return resource not in self._not_served

    def served(self, resource: Resource, *, yes: bool) -> None:
        """The API server has this kind, or does not."""
        if yes:
            self._not_served.discard(resource)
        else:
            self._not_served.add(resource)

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
        self._complete.add(resource)
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
        """It never comes back."""
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


def _state(body: Mapping[str, Any]) -> tuple[str, str]:
    return uid_of(body), version_of(body)


def owners(resource: Resource, body: Mapping[str, Any]) -> Iterator[Key]:
    """The key that has to be looked at when this object changes: itself for our own kinds, else its AgentRun."""
    if resource in OURS:
        yield key_of(ref_of(resource, body))
    elif (key := _parent(resource, body)) is not None:
        yield key


def slim(resource: Resource, body: Mapping[str, Any]) -> Body:
    """An object without what nobody here reads. The rest is shared with the original."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    if resource in OURS and _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {name: value for name, value in metadata["annotations"].items() if name != _LAST_APPLIED}
    return {**body, "metadata": metadata}


def _parent(resource: Resource, body: Mapping[str, Any]) -> Key | None:
    if resource in OURS:
        return None
    metadata = body["metadata"]
    name = (metadata.get("labels") or {}).get(AGENTRUN_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None
