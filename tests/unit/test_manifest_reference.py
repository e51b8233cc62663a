"""The reference page is the model's."""

from pathlib import Path

from agentrun.manifests.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs`"
