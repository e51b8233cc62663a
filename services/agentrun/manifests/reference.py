"""The reference of the manifests as Markdown, made from the models: `python -m agentrun.manifests.reference`."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from agentrun.manifests.agentrun import AgentRun
from agentrun.manifests.crontask import CronTask

HEAD = """# The manifests

Every field, its type and bounds, its default and what it does. Made from `services/agentrun/manifests/` (`make docs`); the API server
checks the same by `crds/*.yaml`. A field that is not here is refused.

The same AgentRun runs in a cluster and with `agentrun dev`. What is marked *Kubernetes only* is checked in both and has no effect in `dev`;
what is *required in Kubernetes* may be left out in `dev`, which brings its own stores and key.
"""
ABOUT: dict[type[BaseModel], str] = {
    AgentRun: "A deployment of an agent: `kubectl get arun`. Its status and conditions are written by the operator.",
    CronTask: (
        "A schedule on which an agent is run: `kubectl get ctask`. The operator keeps it, the AgentRun's scheduler fires it; `dev` does"
        " both. [schedules.md](schedules.md) explains slots, outcomes and changes of the clocks."
    ),
}
MARKS = {"only": " *Kubernetes only.*", "required": " *Required in Kubernetes.*"}


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_kind(model, about) for model, about in ABOUT.items())


def _kind(model: type[BaseModel], about: str) -> str:
    return f"\n## {model.__name__}\n\n{about}\n" + "".join(_sections(model.model_json_schema(by_alias=True)))


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    """One table per object, outermost first; of items of a list the path ends in []."""
    definitions = schema.get("$defs", {})

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        choices = [choice for choice in part.get("anyOf", []) if choice.get("type") != "null"]
        if len(choices) == 1:
            part = {**resolved(choices[0]), **{key: value for key, value in part.items() if key != "anyOf"}}
        name = part.get("$ref", "").rpartition("/")[2]
        return {**definitions.get(name, {}), **part} if name else part

    def section(path: str, part: dict[str, Any]) -> Iterator[str]:
        rows, nested = [], []
        required = part.get("required", [])
        for name, raw in part["properties"].items():
            field, where = resolved(raw), f"{path}.{name}" if path else name
            items = resolved(field["items"]) if field.get("type") == "array" else {}
            if items.get("properties"):
                nested.append((f"{where}[]", items))
            if field.get("properties"):
                nested.append((where, field))
            if not field.get("properties") or "default" in raw or "kubernetes" in raw:
                said = field.get("description", "") + MARKS.get(raw.get("kubernetes", ""), "")
                default = "required" if name in required else f"`{_shown(field.get('default'))}`"
                if "kubernetes" in raw and field.get("properties") and "default" not in raw:
                    default = "see below"
                rows.append(f"| `{name}` | {_type(field)} | {default} | {said} |\n")
        if rows:
            yield f"\n### {path or 'top level'}\n\n| field | type | default | what it does |\n|---|---|---|---|\n" + "".join(rows)
        for where, field in nested:
            yield from section(where, field)

    yield from section("", schema)


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return "quantity"
    if field.get("type") == "array":
        items = field["items"]
        kind = "objects" if "$ref" in items else _type(items)
        return f"list of {kind}" + (f", at most {field['maxItems']}" if "maxItems" in field else "")
    if field.get("type") == "object":
        return "object" if "properties" in field else "mapping"
    bounds = [f"{field[key]:,}" if isinstance(field.get(key), int) else None for key in ("minimum", "maximum")]
    if all(bounds):
        return f"{field['type']}, {bounds[0]} to {bounds[1]}"
    return f"{field.get('type', 'JSON')}" + (f", at most {field['maxLength']:,} characters" if "maxLength" in field else "")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        shown = (f"{key}: {_shown(member)}" for key, member in value.items() if member not in ({}, [], None))
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return {"": '""'}.get(value, str(value)) if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201
