"""What the typed manifests are made of: the closed base model, the shared types, and refusals that name field and remedy.

Patterns are written so that Rust's, Go's and Python's engines read them alike: ASCII classes, no look-around.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

API_VERSION = "agentrun.dev/v1alpha1"
CROSS_FIELD = "cross_field"

ONLY_IN_KUBERNETES: dict[str, JsonValue] = {"kubernetes": "only"}
"""Of fields that are accepted and have no effect where there is no Kubernetes: in `dev`, and in processes started by hand."""
REQUIRED_IN_KUBERNETES: dict[str, JsonValue] = {"kubernetes": "required"}
"""Of fields that the API server requires and that may be left out elsewhere."""

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=63)]
DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
KeyName = Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]
AnnotationValue = Annotated[str, StringConstraints(max_length=4096)]
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LabelKey = Annotated[str, StringConstraints(pattern=LABEL_KEY_PATTERN, max_length=253)]
Annotations = Annotated[dict[LabelKey, AnnotationValue], Field(max_length=32)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]


def refuse(path: tuple[str, ...], what: str, remedy: str) -> NoReturn:
    """Refuses a combination of fields; `path` leads from the object under validation to the field to be changed."""
    raise PydanticCustomError(CROSS_FIELD, "{what}; {remedy}", {"path": path, "what": what, "remedy": remedy})


class Spec(BaseModel):
    """Base of all parts: frozen, strict about types, closed against unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )


@dataclass(frozen=True, slots=True)
class Keyed:
    """Of a list whose items are told apart by some of their members: the API server refuses two with the same ones."""

    members: tuple[str, ...]

    def check(self, items: Sequence[Any]) -> Sequence[Any]:
        """Refuses the second of two items with the same key."""
        seen: set[Hashable] = set()
        for item in items:
            key = tuple(getattr(item, member) for member in self.members)
            if key in seen:
                shown = ", ".join(str(value) for value in key)
                refuse((), f"{shown} is there twice", f"items differ in {' and '.join(map(to_camel, self.members))}: remove one")
            seen.add(key)
        return items


def keyed(*members: str) -> AfterValidator:
    """For `Annotated[list[X], keyed("name")]`; members are named as in Python."""
    return AfterValidator(Keyed(members).check)


class SecretRef(Spec):
    """A value in a Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of this object.")
    key: KeyName = Field(default="url", description="Key in the Secret whose value is used.")


class KeysSecretRef(Spec):
    """A file of API keys in a Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of this object.")
    key: KeyName = Field(default="api-keys", description="Key in the Secret whose value is the file of hashed API keys.")


class NamedRef(Spec):
    """Another object of the same namespace, by its name."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of this object.")
