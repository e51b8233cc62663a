"""A report of what was spent as rows of text: the same for the table, for CSV and for JSON."""

import csv
import io
from collections.abc import Sequence
from uuid import UUID

from agentrun.costs.amounts import usd
from agentrun.store import usage
from agentrun.store.pool import Executor
from agentrun.store.usage import GroupBy, Report, Sums

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Spreadsheets take a cell that begins so for a formula, and run it."""
SUMS = tuple(Sums.__dataclass_fields__)


async def names_of(conn: Executor, report: Report, by: Sequence[GroupBy]) -> dict[str, str]:
    """The names of the sessions in a report, by their ids. Raises StoreUnavailable."""
    if GroupBy.SESSION not in by:
        return {}
    place = list(by).index(GroupBy.SESSION)
    found = await usage.session_names(conn, [UUID(group.values[place]) for group in report.groups])
    return {str(key): name for key, name in found.items()}


def figures(sums: Sums) -> dict[str, int | str | None]:
    """Sums by their names: counts, and amounts as text; a cost of None: no call had a price."""
    found: dict[str, int | str | None] = {
        name: usd(getattr(sums, name)) if name.endswith("_usd") else getattr(sums, name) for name in SUMS
    }
    if sums.calls and sums.calls == sums.unpriced:
        found["cost_usd"] = None
    return found


def labels(values: Sequence[str], by: Sequence[GroupBy], names: dict[str, str]) -> dict[str, str]:
    """What a group is called; a session has its id and its name."""
    found: dict[str, str] = {}
    for one, value in zip(by, values, strict=True):
        if one is GroupBy.SESSION:
            found |= {"session": names.get(value, ""), "session_id": value}
        else:
            found[one.value] = value
    return found


def as_csv(report: Report, by: Sequence[GroupBy], names: dict[str, str]) -> str:
    """RFC 4180, with a header line and without a total. Text that a spreadsheet would run is made harmless by a leading apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*labels([""] * len(by), by, {}), *SUMS])
    for group in report.groups:
        cells = [defused(text) for text in labels(group.values, by, names).values()]
        writer.writerow([*cells, *("" if value is None else value for value in figures(group.sums).values())])
    return out.getvalue()


def defused(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
