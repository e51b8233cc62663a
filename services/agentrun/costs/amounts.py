"""Amounts of money as text."""

from decimal import Decimal


def usd(amount: Decimal) -> str:
    """All digits, none that say nothing, and no exponent: a sum of such texts is exact."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
