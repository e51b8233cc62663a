"""`agentrun dlq`: runs that were put aside, what is known of them, and what is to be done about each."""

import json
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from agentrun.commands.output import Json, ask_gateway, pages, print_json, print_table, when

app = typer.Typer(
    help="Dead letters: runs that were put aside. Asks the gateway at AGENTRUN_URL with AGENTRUN_API_KEY; a key of scope admin sees "
    "those of all users.",
    no_args_is_help=True,
)


class State(StrEnum):
    """Which dead letters are listed."""

    OPEN = "open"
    REDRIVEN = "redriven"
    DISCARDED = "discarded"
    ALL = "all"


Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of the runs, as `agentrun dlq list` shows them.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `agentrun dlq list` shows it.")]


@app.command("list")
def list_letters(
    state: Annotated[State, typer.Option(help="Which ones.")] = State.OPEN,
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    as_json: Json = False,
) -> None:
    """Runs that were put aside, newest first."""
    with ask_gateway() as gateway:
        found = list(pages(gateway, "/v1/dead-letters", "dead_letters", state=state.value, user=user))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["run_id"],
            when(one["created_at"]),
            one["user"],
            one["session"],
            one["reason"],
            str(one["attempts"]),
            one["state"],
            one["redriven_run_id"] or "",
        )
        for one in found
    ]
    print_table(("RUN", "SINCE", "USER", "SESSION", "REASON", "ATTEMPTS", "STATE", "REDRIVEN AS"), rows)


@app.command()
def show(run: Run, as_json: Json = False) -> None:
    """Everything that is known of a dead letter: its messages, who tried it, the last error, its effects."""
    with ask_gateway() as gateway:
        found = gateway.ask("GET", _path(run))
    if as_json:
        print_json([found])
        return
    for title, text in _facts(found):
        print(f"{title + ':':<12}{text}")


@app.command()
def redrive(runs: Runs, as_json: Json = False) -> None:
    """Do it again, each in one new run. May be repeated: no dead letter gets a second run."""
    with ask_gateway() as gateway:
        for run in runs:
            done = gateway.ask("POST", f"{_path(run)}/redrive")
            if as_json:
                print_json([done])
            else:
                print(f"{run}  {'was redriven before' if done['replayed'] else 'redriven'} as {done['run_id']}")


@app.command()
def discard(runs: Runs, as_json: Json = False) -> None:
    """Close dead letters: nothing more is done, what is known of them stays. May be repeated."""
    with ask_gateway() as gateway:
        for run in runs:
            done = gateway.ask("POST", f"{_path(run)}/discard")
            if as_json:
                print_json([done])
            else:
                print(f"{run}  discarded {when(done['discarded_at'])}")


def _path(run: str) -> str:
    return f"/v1/dead-letters/{quote(run, safe='')}"


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("run", found["run_id"]),
        ("session", f"{found['session']} of {found['user']}"),
        ("state", found["state"] + (f" as {found['redriven_run_id']}" if found["redriven_run_id"] else "")),
        ("reason", f"{found['reason']}, {when(found['created_at'])}"),
    ]
    facts += [("message", json.dumps(content, ensure_ascii=False)) for content in found["inputs"]]
    if found["last_error"]:
        facts.append(("last error", f"{found['last_error'].get('type')}: {found['last_error'].get('message')}"))
    facts += [
        ("attempt", f"{one['attempt']}  {one['outcome']}  {one['owner'].rpartition('/')[0]}  {_span(one)}")
        for one in found["tries"]
    ]
    facts += [("effect", f"{one['name']} {one['key']}  {one['state']}  {one['tries']} tries") for one in found["effects"]]
    return facts


def _span(one: dict[str, Any]) -> str:
    return f"{one['started_at']} to {one['ended_at'] or 'now'}"
