"""The reference of the AgentRun manifest as Markdown, made from the model: `python -m agentrun.manifests.reference`."""

from collections.abc import Iterator
from typing import Any

from agentrun.manifests.agentrun import AgentRun

HEAD = """# The AgentRun manifest

Every field, its type and bounds, its default and what it does. Made from `services/agentrun/manifests/agentrun.py` (`make docs`).
A field that is not here is refused.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_sections(AgentRun.model_json_schema(by_alias=True)))


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    """One table per object, outermost first."""
    definitions = schema.get("$defs", {})

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        name = part.get("$ref", "").rpartition("/")[2]
        return {**definitions.get(name, {}), **part} if name else part

    def section(path: str, part: dict[str, Any]) -> Iterator[str]:
        rows, nested = [], []
        required = part.get("required", [])
        for name, raw in part["properties"].items():
            field = resolved(raw)
            if field.get("properties"):
                nested.append((f"{path}.{name}" if path else name, field))
                continue
            default = "required" if name in required else f"`{_shown(field.get('default'))}`"
            rows.append(f"| `{name}` | {_type(field)} | {default} | {raw.get('description', field.get('description', ''))} |\n")
        if rows:
            yield f"\n## {path or 'top level'}\n\n| field | type | default | what it does |\n|---|---|---|---|\n" + "".join(rows)
        for where, field in nested:
            yield from section(where, field)

    yield from section("", schema)


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        return _type(next(choice for choice in field["anyOf"] if choice.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" + (f", at most {field['maxItems']}" if "maxItems" in field else "")
    if field.get("type") == "object":
        return "mapping"
    bounds = [f"{field[key]:,}" if isinstance(field.get(key), int) else None for key in ("minimum", "maximum")]
    if all(bounds):
        return f"{field['type']}, {bounds[0]} to {bounds[1]}"
    return f"{field.get('type', 'JSON')}" + (f", at most {field['maxLength']:,} characters" if "maxLength" in field else "")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return {"": '""'}.get(value, str(value)) if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201
