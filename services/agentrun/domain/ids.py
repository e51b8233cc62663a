"""How ids look to people: run and session ids are UUIDs (version 7, so they sort by age) in the usual text form."""

from uuid import UUID


def parse_id(text: str) -> UUID | None:
    """The id, or None if `text` is not one in canonical form: one id has one spelling."""
    try:
        parsed = UUID(text)
    except ValueError:
        return None
    return parsed if str(parsed) == text else None
