"""Objects whose CRD is newer than this operator: what it does not know of a spec is left out and named, so that the rest is followed.

A new member often has a default, so that every object has it as soon as the new CRD is there. A file of a person is read strictly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel

from agentrun.domain.errors import ManifestError
from agentrun.manifests import AgentRun, CronTask, agent_run_of, cron_task_of
from agentrun.manifests.pods import EgressRule

_STRICT = (EgressRule,)
"""Half of a rule about what is let through would let more through."""
_NAMED = 5

Manifest = TypeVar("Manifest", AgentRun, CronTask)


@dataclass(frozen=True, slots=True)
class Known(Generic[Manifest]):
    """What this operator understands of an object, and the members that it left out."""

    manifest: Manifest
    unknown: tuple[str, ...] = field(default=())


def known_agent_run(found: Mapping[str, Any]) -> Known[AgentRun]:
    """Raises ManifestError where the rest is not valid either."""
    return _known(AgentRun, agent_run_of, found)


def known_cron_task(found: Mapping[str, Any]) -> Known[CronTask]:
    """Raises ManifestError where the rest is not valid either."""
    return _known(CronTask, cron_task_of, found)


def note_of(unknown: tuple[str, ...]) -> str:
    """What a condition adds about them; empty if there are none."""
    if not unknown:
        return ""
    named = ", ".join(unknown[:_NAMED]) + (" and more" if len(unknown) > _NAMED else "")
    return f"; this operator is older than the CRDs, does not know {named}, and goes by the rest: upgrade the operator"


def _known(model: type[Manifest], read: Callable[[Mapping[str, Any]], Manifest], found: Mapping[str, Any]) -> Known[Manifest]:
    try:
        return Known(read(found))
    except ManifestError:
        unknown: list[str] = []
        spec = _kept(model.model_fields["spec"].annotation, found.get("spec"), "spec", unknown)
        if not unknown:
            raise
        return Known(read({**found, "spec": spec}), tuple(unknown))


def _kept(annotation: Any, value: Any, place: str, unknown: list[str]) -> Any:
    """The value without what its model does not have; `unknown` is told of it."""
    model = _model(annotation)
    if model is None or model in _STRICT:
        return value
    if isinstance(value, list):
        return [_kept(model, item, f"{place}[{number}]", unknown) for number, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    fields = {f.alias or name: f for name, f in model.model_fields.items()}
    unknown += [f"{place}.{name}" for name in value if name not in fields]
    return {
        name: _kept(fields[name].annotation, member, f"{place}.{name}", unknown)
        for name, member in value.items()
        if name in fields
    }


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that holds one, several, or perhaps none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model(part)) is not None), None)
