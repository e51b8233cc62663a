"""The tier is skipped, with the reason, on a machine that has no Postgres or no Redis."""

from pathlib import Path

import pytest
from store_servers import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs no store runs all the same."""
    reason = why_not()
    if reason:
        for item in items:
            if HERE in item.path.parents and item.get_closest_marker("asyncio"):
                item.add_marker(pytest.mark.skip(reason=reason))
