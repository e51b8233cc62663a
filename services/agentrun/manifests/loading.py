"""From a file or an object of the API server to manifests, and from a mistake to one line that names place, field and remedy."""

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrun.domain.errors import ManifestError
from agentrun.manifests.agentrun import AgentRun
from agentrun.manifests.base import API_VERSION, CROSS_FIELD
from agentrun.manifests.crontask import CronTask

_SERVER_WRITTEN = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)
"""Members of metadata that are nobody's wish; `kubectl get -o yaml` shows them."""

Manifest = TypeVar("Manifest", AgentRun, CronTask)


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a file holds, each in its order."""

    agent_runs: list[AgentRun]
    cron_tasks: list[CronTask]


def load(path: Path) -> list[AgentRun]:
    """All AgentRuns of a YAML or JSON file, in its order; its CronTasks are checked and left out.

    Raises ManifestError, whose message is one line: file, field in camelCase, what is wrong, what to do.
    """
    return _agent_runs(load_all(path), str(path))


def load_all(path: Path) -> Manifests:
    """All that a YAML or JSON file holds. Raises ManifestError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; name an AgentRun manifest") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ManifestError(f"{path}: {_one_line(error.strerror or str(error))}; name a file that can be read") from None
    return parse_all(text, source=str(path))


def load_one(path: Path) -> AgentRun:
    """The only AgentRun of a file. Raises ManifestError, also if there are several."""
    found = load(path)
    if len(found) > 1:
        raise ManifestError(f"{path}: holds {len(found)} AgentRuns; keep one per file here")
    return found[0]


def parse(text: str, *, source: str) -> list[AgentRun]:
    """All AgentRuns of a YAML text; `source` is how messages name it. Raises ManifestError."""
    return _agent_runs(parse_all(text, source=source), source)


def _agent_runs(found: Manifests, source: str) -> list[AgentRun]:
    if not found.agent_runs:
        raise ManifestError(f"{source}: holds CronTasks only; name the file with the AgentRun too")
    return found.agent_runs


def parse_all(text: str, *, source: str) -> Manifests:
    """All that a YAML text holds. Raises ManifestError."""
    documents = _documents(text, source)
    if not documents:
        raise ManifestError(f"{source}: the file is empty; write an AgentRun (apiVersion, kind, metadata, spec)")
    many = len(documents) > 1
    found = [
        _manifest(document, f"{source} (document {number})" if many else source) for number, document in enumerate(documents, 1)
    ]
    return Manifests([one for one in found if isinstance(one, AgentRun)], [one for one in found if isinstance(one, CronTask)])


class _Loader(yaml.SafeLoader):
    """YAML that refuses a member written twice: the last one would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the member {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _documents(text: str, source: str) -> list[Any]:
    try:
        found = list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ManifestError(f"{source}{place}: {_one_line(error.problem or 'not YAML')}; correct the YAML there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"{source}: not YAML: {_one_line(str(error))}; correct the file") from None
    return [document for document in found if document is not None]


def agent_run_of(found: Mapping[str, Any]) -> AgentRun:
    """The AgentRun in an object of the API server; status and what the server writes into metadata are left out.

    Raises ManifestError without a source in front: the object is the place. Secrets may be missing: see `store_secrets`.
    """
    return _validated(AgentRun, found, "")


def cron_task_of(found: Mapping[str, Any]) -> CronTask:
    """The CronTask in an object of the API server. Raises ManifestError."""
    return _validated(CronTask, found, "")


def _manifest(document: Any, source: str) -> AgentRun | CronTask:
    if not isinstance(document, dict):
        raise ManifestError(f"{source}: holds {_kind_of(document)}; write an AgentRun (apiVersion, kind, metadata, spec)")
    kind = document.get("kind")
    if kind == "CronTask":
        return _validated(CronTask, document, f"{source}: ")
    if kind != "AgentRun":
        raise ManifestError(f"{source}: kind: {_show(kind)} is not known; write kind: AgentRun")
    return _validated(AgentRun, document, f"{source}: ")


def _validated(model: type[Manifest], document: Mapping[str, Any], before: str) -> Manifest:
    """`before` stands in front of the message."""
    if (version := document.get("apiVersion")) != API_VERSION:
        raise ManifestError(f"{before}apiVersion: {_show(version)} is not known; write apiVersion: {API_VERSION}")
    try:
        return model.model_validate(_wished(document), by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(f"{before}{_first(error, model)}") from None


def _wished(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the API server and the operator write."""
    wished = {member: value for member, value in document.items() if member != "status"}
    if isinstance(metadata := wished.get("metadata"), dict):
        wished["metadata"] = {member: value for member, value in metadata.items() if member not in _SERVER_WRITTEN}
    return wished


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    """The mistake to mend first: a misspelt field before the one that is therefore missing."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    more = f" ({len(details) - 1} more after this one)" if len(details) > 1 else ""
    return _one_line(_sentence(details[0], model)) + more


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    place = detail["loc"] + tuple(context.get("path", ()))
    what, remedy = detail["msg"], "correct it"
    if kind == CROSS_FIELD:
        what, remedy = context["what"], context["remedy"]
    elif kind == "extra_forbidden":
        what, remedy = "unknown field", _suggestion(detail["loc"], model)
    elif kind == "missing":
        what, remedy = "is missing", f"add it: {_description(place, model)}"
    elif kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        what, remedy = f"{_show(value)} is out of range", f"set it to {bound}"
    elif kind in _TYPES:
        what, remedy = f"must be {_TYPES[kind]}, not {_kind_of(value)}", f"expected: {_description(place, model)}"
    elif kind == "literal_error":
        what, remedy = f"{_show(value)} is not allowed", f"use {context['expected']}"
    elif kind in ("string_pattern_mismatch", "string_too_long", "too_long", "invalid_key"):
        what, remedy = f"{_show(value)} is not valid", f"expected: {_description(place, model)}"
    return f"{_path(place)}: {what}; {remedy}"


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "list_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "invalid-json-value": "a JSON value",
}


def _path(place: Sequence[int | str]) -> str:
    """`spec.agent.tools[2]`; pieces that name an alternative of a type are left out."""
    text = ""
    for piece in place:
        if isinstance(piece, int):
            text += f"[{piece}]"
        elif piece.isidentifier() or not text:
            text += f".{piece}" if text else piece
        else:
            text += f"[{piece!r}]"
    return text


def _models(place: Sequence[int | str], outermost: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """The models on the way to a field, each with the name of the member that leads on."""
    model: type[BaseModel] | None = outermost
    for piece in place:
        if isinstance(piece, int):
            continue
        if model is None:
            return
        yield model, piece
        model = next((_nested(f.annotation) for f in model.model_fields.values() if f.alias == piece), None)


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _nested(part)) is not None), None)


def _fields(model: type[BaseModel]) -> Mapping[str, str]:
    return {f.alias or name: f.description or "" for name, f in model.model_fields.items()}


def _suggestion(place: Sequence[int | str], outermost: type[BaseModel]) -> str:
    """What to write instead of an unknown member: the nearest known name, or all that are known there."""
    *_, (model, unknown) = _models(place, outermost)
    names = {_folded(name): name for name in _fields(model)}
    near = difflib.get_close_matches(_folded(unknown), names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"remove it; known here: {', '.join(names.values())}" if names else "remove it; nothing can be set here"


def _folded(name: str) -> str:
    return str(name).replace("_", "").replace("-", "").lower()


def _description(place: Sequence[int | str], outermost: type[BaseModel]) -> str:
    found = [_fields(model).get(name, "") for model, name in _models(place, outermost)]
    text = next((text for text in reversed(found) if text), "see the reference")
    return text[0].lower() + text[1:].rstrip(".")


def _kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return _show(value)


def _show(value: Any) -> str:
    """A value as YAML users write it, cut to a readable length."""
    if value is None:
        return "nothing"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
