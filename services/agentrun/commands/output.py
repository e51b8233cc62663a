"""What the commands that ask a gateway have in common: asking, pages, tables and JSON lines."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrun.commands import access
from agentrun.domain.slots import minute

if TYPE_CHECKING:
    from agentrun.commands.gateway import GatewayClient

PAGE = 200

Json = Annotated[bool, typer.Option("--json", help="JSON, one object per line.")]


def ask_gateway() -> "GatewayClient":
    """The gateway that the environment names. Raises ConfigurationError."""
    from agentrun.commands.gateway import GatewayClient  # its HTTP client takes longer to load than all the rest

    return GatewayClient(access.read())


def pages(gateway: "GatewayClient", path: str, member: str, **query: str | None) -> Iterator[dict[str, Any]]:
    """All items of a list, from page to page. Raises GatewayRefused."""
    after = None
    while True:
        page = gateway.ask("GET", path, query={**query, "after": after, "limit": PAGE})
        yield from page[member]
        after = page["next"]
        if after is None:
            return


def when(text: str | None) -> str:
    """A moment as tables show it: by the minute, in UTC."""
    return minute(datetime.fromisoformat(text)) if text else ""


def print_json(found: Iterable[Any]) -> None:
    """One object per line."""
    for one in found:
        print(json.dumps(one))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> None:
    """Columns as wide as their cells; from the column `right` on they are figures, which stand to the right."""
    widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right is not None and place >= right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
