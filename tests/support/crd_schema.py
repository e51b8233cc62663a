"""What a CRD and a typed model say about each field, in one form, so that the two can be compared."""

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import AfterValidator, BaseModel
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from agentrun.manifests.base import Keyed

Facts = dict[str, Any]

BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "pattern")
QUANTITY = "quantity"
ANY = "any"


def of_crd(crd: Mapping[str, Any]) -> dict[str, Facts]:
    """Facts of every field below spec."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return dict(_crd_fields("spec", schema["properties"]["spec"]))


def of_model(model: type[BaseModel]) -> dict[str, Facts]:
    """The same of a typed model."""
    return dict(_model_fields("spec", model))


def _crd_fields(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Facts]]:
    required = node.get("required", [])
    assert set(required) <= node["properties"].keys(), f"{path} requires what is not there"
    for name, field in node["properties"].items():
        where = f"{path}.{name}"
        facts = {"description": field["description"], "required": name in required, **_crd_value(field)}
        if "default" in field:
            facts["default"] = field["default"]
        if field.get("type") == "array":
            facts["items"] = _crd_value(field["items"])
            facts["keys"] = field.get("x-kubernetes-list-map-keys", [])
            assert field["x-kubernetes-list-type"] == ("map" if facts["keys"] else "atomic"), where
            if "properties" in field["items"]:
                yield from _crd_fields(f"{where}[]", field["items"])
        if "additionalProperties" in field:
            facts["values"] = _crd_value(field["additionalProperties"])
        yield where, facts
        if "properties" in field:
            yield from _crd_fields(where, field)


def _crd_value(node: Mapping[str, Any]) -> Facts:
    facts = {key: node[key] for key in BOUNDS if key in node}
    if node.get("x-kubernetes-int-or-string"):
        assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        return {**facts, "type": QUANTITY}
    kind = ANY if node.get("x-kubernetes-preserve-unknown-fields") else node["type"]
    return {**facts, "type": kind, **({"enum": node["enum"]} if "enum" in node else {})}


def _model_fields(path: str, model: type[BaseModel]) -> Iterator[tuple[str, Facts]]:
    schema = model.model_json_schema(by_alias=True)
    for field in model.model_fields.values():
        assert field.alias is not None
        where, raw = f"{path}.{field.alias}", schema["properties"][field.alias]
        part = _resolved(raw, schema.get("$defs", {}))
        required = field.is_required() or raw.get("kubernetes") == "required"
        facts = {"description": field.description, "required": required, **_model_value(part)}
        below = nested(field.annotation)
        fields = dict(_model_fields(f"{where}[]" if part.get("type") == "array" else where, below)) if below else {}
        if not required and (default := _default(field, fields, where)) is not None:
            facts["default"] = default
        if part.get("type") == "array":
            facts["items"] = _model_value(_resolved(part["items"], schema.get("$defs", {})))
            facts["keys"] = [to_camel(name) for name in _keys(field)]
        if part.get("type") == "object" and "properties" not in part:
            values = _map_values(part)
            facts |= {"type": ANY} if values == {} else {"values": _model_value(values)}
        yield where, facts
        yield from fields.items()


def _map_values(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a mapping's values; {} for any JSON value."""
    values = part.get("additionalProperties")
    if not isinstance(values, dict):
        values = next(iter(part.get("patternProperties", {}).values()), {})
    return {} if "JsonValue" in values.get("$ref", "") else values


def _model_value(part: Mapping[str, Any]) -> Facts:
    facts = {key: part[key] for key in BOUNDS if key in part}
    if "anyOf" in part:
        whole, text = (choice for choice in part["anyOf"] if choice["type"] != "null")
        assert (whole["type"], text["type"]) == ("integer", "string")
        return {**_model_value(whole), **_model_value(text), "type": QUANTITY}
    enum = [part["const"]] if "const" in part else part.get("enum")
    return {**facts, "type": part["type"], **({"enum": enum} if enum else {})}


def _resolved(part: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    part = {**definitions.get(part.get("$ref", "").rpartition("/")[2], {}), **part}
    choices = [choice for choice in part.get("anyOf", []) if choice.get("type") != "null"]
    return (
        {**_resolved(choices[0], definitions), **{k: v for k, v in part.items() if k != "anyOf"}} if len(choices) == 1 else part
    )


def _default(field: FieldInfo, fields: Mapping[str, Facts], where: str) -> Any:
    """What the API server has to fill in; None for nothing. An object whose members have defaults of their own starts empty."""
    own = [
        facts for path, facts in fields.items() if path.count(".") == where.count(".") + 1 and not path.startswith(f"{where}[]")
    ]
    default = without_empty(_plain(field.get_default(call_default_factory=True)))
    if default in (None, "", {}, []):
        return None
    return {} if any("default" in facts for facts in own) else default


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def without_empty(value: Any) -> Any:
    """Without members that say nothing: the API server does not store them unless they are given."""
    if isinstance(value, dict):
        pruned = {key: without_empty(member) for key, member in value.items()}
        return {key: member for key, member in pruned.items() if member not in (None, "", {}, [])}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def nested(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := nested(part)) is not None), None)


def _keys(field: FieldInfo) -> tuple[str, ...]:
    for one in field.metadata:
        owner = getattr(one.func, "__self__", None) if isinstance(one, AfterValidator) else None
        if isinstance(owner, Keyed):
            return owner.members
    return ()
