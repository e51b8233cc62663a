"""`agentrun usage`: what was spent, as a gateway reports it."""

import json
from typing import Annotated, Any

import typer

from agentrun.commands.output import ask_gateway, print_table

_TITLES = {
    "calls": "CALLS",
    "input_tokens": "INPUT",
    "cached_tokens": "CACHED",
    "output_tokens": "OUTPUT",
    "cost_usd": "USD",
    "unpriced": "UNPRICED",
    "unmeasured": "ESTIMATED",
    "lost_usd": "LOST USD",
}


def usage(
    group_by: Annotated[
        str, typer.Option("--group-by", metavar="LIST", help="Of day, model, session, user, task, agent, with commas.")
    ] = "day,model",
    since: Annotated[str | None, typer.Option("--from", metavar="DAY", help="The first day, in UTC; 30 days back.")] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="DAY", help="The last day, itself included; today.")] = None,
    user: Annotated[str | None, typer.Option(help="Only what this user spent.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with every column.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, as the gateway gives it.")] = False,
) -> None:
    """What was spent. Asks the gateway at AGENTRUN_URL with AGENTRUN_API_KEY: your own runs, or all with a key of scope admin."""
    query = {"group_by": group_by, "from": since, "to": until, "user": user}
    with ask_gateway() as gateway:
        if as_csv:
            print(gateway.text("GET", "/v1/usage", query={**query, "format": "csv"}), end="")
            return
        report = gateway.ask("GET", "/v1/usage", query=query)
    if as_json:
        print(json.dumps(report))
        return
    columns = [name for one in report["group_by"] for name in ([one] if one != "session" else ["session", "session_id"])]
    rows = [[*(one[name] for name in columns), *_figures(one)] for one in report["groups"]]
    rows.append(["total", *[""] * (len(columns) - 1), *_figures(report["total"])])
    print_table([*(name.upper().replace("_", " ") for name in columns), *_TITLES.values()], rows, right=len(columns))


def _figures(one: dict[str, Any]) -> list[str]:
    return ["unknown" if one[name] is None else str(one[name]) for name in _TITLES]
