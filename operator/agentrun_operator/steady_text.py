"""Messages of kubelets and controllers without what differs from try to try, so that no try makes a status write of its own. Pure."""

import re
from collections.abc import Sequence

_IDS = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a uid
    r"|\b(?:sha256:)?(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b"  # a container, a digest
    r"|\b0x[0-9a-f]+\b"
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)?"
)
_TRY = re.compile(r'(?<=_)\d+(?=["\s]|$)')
_MADE = re.compile(r'\b(pods) "[^"]*"')
_USED = re.compile(r", used: .*?(?=, limited: )")
_NODES = re.compile(r"^\d+/\d+ nodes are available: ")
_COUNT = re.compile(r"^\d+ (?=\D)")


def steady(message: object, *, names: Sequence[str] = ()) -> str:
    """The message in one line; ids, times, what a quota has used, generated names of pods, and `names`, are left out."""
    text = " ".join(str(message or "").split())
    for name in names:
        text = text.replace(name, "…") if name else text
    for pattern, instead in ((_IDS, "…"), (_TRY, "…"), (_MADE, r"\1"), (_USED, "")):
        text = pattern.sub(instead, text)
    return text.rstrip(".; ")


def scheduling(message: object) -> str:
    """The scheduler's reasons, without how many nodes have each of them, which changes as nodes come and go."""
    text = _NODES.sub("", steady(message).partition(". ")[0])
    return ", ".join(sorted({_COUNT.sub("", reason) for reason in text.split(", ")}))
