"""Messages of kubelets and controllers without what differs from try to try, so that no try makes a status write of its own. Pure."""

import re
from collections.abc import Sequence

_IDS = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a uid
    r"|\b(?:sha256:)?(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b"  # a container, a digest
    r"|\b0x[0-9a-f]+\b"
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)?"
)
_GIVEN = re.compile(r'(\b(?:secret|configmap) (?:"[^"]*"|[\w.-]+/[\w.-]+))', re.IGNORECASE)
"""A name that people gave, though it may look like an id: how it is written is all that they have to find it by."""
_TRY = re.compile(r'(?<=_)\d+(?=["\s]|$)')
_MADE = re.compile(r'\b(pods) "[^"]*"')
_USED = re.compile(r", used: .*?(?=, limited: )")
_NODES = re.compile(r"^\d+/\d+ nodes are available: ")
_COUNT = re.compile(r"^\d+ (?=\D)")


def steady(message: object, *, names: Sequence[str] = ()) -> str:
    """The message in one line; ids, times, what a quota has used, generated names of pods, and `names`, are left out.

    Names of Secrets and ConfigMaps stay.
    """
    text = " ".join(str(message or "").split())
    for name in names:
        text = text.replace(name, "…") if name else text
    pieces = _GIVEN.split(text)  # every other one is a name
    pieces[::2] = [_without_what_changes(piece) for piece in pieces[::2]]
    return "".join(pieces).rstrip(".; ")


def _without_what_changes(text: str) -> str:
    for pattern, instead in ((_IDS, "…"), (_TRY, "…"), (_MADE, r"\1"), (_USED, "")):
        text = pattern.sub(instead, text)
    return text


def scheduling(message: object) -> str:
    """The scheduler's reasons, without how many nodes have each of them, which changes as nodes come and go."""
    text = _NODES.sub("", steady(message).partition(". ")[0])
    return ", ".join(sorted({_COUNT.sub("", reason) for reason in text.split(", ")}))
