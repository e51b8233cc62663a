"""New ids: UUIDv7, so that they sort by age and inserts go to the right edge of each index."""

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    """An id nobody has used."""
    return uuid7()
