"""Kubernetes quantities (500m, 1.5, 2Gi) as exact numbers: whole, or text with a suffix."""

from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from agentrun.manifests.base import refuse

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/ without signs and exponents.
PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
MAX_LENGTH = 32

_Whole = Annotated[int, Field(ge=0, le=1_000_000_000_000_000)]
_Text = Annotated[str, StringConstraints(pattern=PATTERN, max_length=MAX_LENGTH)]


def _in_one_message(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        refuse((), f"{value!r} is no quantity", "write it as 2, 500m or 1Gi; a fraction goes into quotes")


Quantity = Annotated[_Whole | _Text, WrapValidator(_in_one_message)]

_FACTORS = {"": Fraction(1), "m": Fraction(1, 1000)}
_FACTORS |= {suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)}


def amount(quantity: int | str) -> Fraction:
    """The number that a valid quantity stands for."""
    text = str(quantity)
    digits = text.rstrip("mkMGTPEKi")
    return Fraction(digits) * _FACTORS[text[len(digits) :]]
