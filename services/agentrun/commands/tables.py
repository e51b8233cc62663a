"""Tables on a terminal."""

from collections.abc import Sequence


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> None:
    """Columns as wide as their cells; from the column `right` on they are figures, which stand to the right."""
    widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right is not None and place >= right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
