"""What one model call used: the figures that are booked and priced."""

import math
from dataclasses import dataclass, replace
from typing import Any

from agentrun.domain.text import clean

MOST_TOKENS = 2**53 - 1
"""The largest count that every reader of JSON takes exactly, and far beyond any call."""
NAME_CHARACTERS = 253
COUNTS = (
    "input_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "audio_input_tokens",
    "audio_output_tokens",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one model call used. Token counts are totals: cached and cache-write tokens are part of input, reasoning is part of output.

    `measured` is False for a call cut before its usage came: the counts are an estimate then.
    """

    model: str
    provider: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    measured: bool = True

    def counted(self) -> "Usage":
        """The same as it can be booked, whatever a provider reported.

        A count that cannot be one (negative, above MOST_TOKENS, no number) is 0, half a token is a whole one, and with any such
        count the call is not `measured`.
        """
        counts = {name: whole(getattr(self, name)) for name in COUNTS}
        exact = all(count == getattr(self, name) for name, count in counts.items())
        return replace(
            self, model=_name(self.model), provider=_name(self.provider), measured=bool(self.measured) and exact, **counts
        )


def whole(value: Any) -> int:
    """A count of tokens as an integer from 0 to MOST_TOKENS; 0 for what cannot be one."""
    if isinstance(value, float) and math.isfinite(value):
        value = math.ceil(value)
    return int(value) if isinstance(value, int) and 0 <= value <= MOST_TOKENS else 0


def _name(value: Any) -> str:
    return str(clean(str(value or "")))[:NAME_CHARACTERS]
