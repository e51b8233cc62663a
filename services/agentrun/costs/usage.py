"""What one model call used: the figures that are booked and priced."""

from dataclasses import dataclass


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
